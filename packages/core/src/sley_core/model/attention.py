"""Causal attention within packed documents; the only place where the tokens of a sequence interact.

A sequence-parallel attention replaces this module and wraps it: it exchanges sequence shards for head shards, calls it with the
full sequence of a few heads, and exchanges the context back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.model.tensors import device_kind

T = TypeVar("T")

_COMPUTED: Any = WeakIdKeyDictionary()  # field -> {(version of the field, what): value}


def once_per_field(field: Tensor, what: Hashable, compute: Callable[[], T]) -> T:
    """Returns `compute()`, or its cached result for the same field; it must depend on `field` and `what` alone.

    For what layers compute alike from a field: a mask from `cu_seqlens`, rotary tables from `positions`. The entry lives as
    long as the tensor object, i.e. its micro-batch, and depends on the tensor's version, so a field that is written to is
    computed anew. `compute` runs without gradients. A compiled layer computes inside its graph instead. In inference mode,
    whose tensors have no version and may not enter a graph later, every call computes.
    """
    if torch.compiler.is_compiling() or field.is_inference() or torch.is_inference_mode_enabled():
        return compute()
    known: dict[Any, T] = _COMPUTED.setdefault(field, {})
    key = field._version, what
    if key not in known:
        with torch.no_grad():
            known[key] = compute()
    return known[key]


def computed_from(field: Tensor) -> list[Any]:
    """Returns what has been computed from the field as it is now, and is cached: each layer that asks for it gets the same."""
    known: dict[Any, Any] = _COMPUTED.get(field, {})
    return [value for (version, _), value in known.items() if version == field._version]


_HALF = (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    """Computes softmax(q k^T / sqrt(d)) v over the earlier and equal positions of the same document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the context [b, s, h, d], in the dtype of q.

        q: [b, s, h, d]. k, v: [b, s, h_kv, d], where h is a multiple of h_kv.
        cu_seqlens: [b, n + 1] integers: the starts of each row's documents, 0 first, then padded with s. None: one
        document per row.
        """
        is_cuda = device_kind(q) == "cuda"
        if cu_seqlens is not None and is_cuda and q.dtype in _HALF and varlen() is not None:
            return _by_document(q, k, v, cu_seqlens)
        mask = None if cu_seqlens is None else document_mask(cu_seqlens, q.shape[1], q.dtype)
        grouped = q.shape[2] != k.shape[2]
        if grouped and is_cuda and (mask is not None or q.dtype not in _HALF):
            # here only torch's math kernel supports groups; the memory-efficient one needs as many key heads as query heads
            k, v = (shared.repeat_interleave(q.shape[2] // shared.shape[2], dim=2) for shared in (k, v))
            grouped = False
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return context.transpose(1, 2)


def document_mask(cu_seqlens: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Returns what is added to the scores of queries and keys, [b, 1, s, s] of `dtype`: 0 for earlier or equal positions of the
    same document, minus infinity for all others.

    Built once per micro-batch, not once per layer (`once_per_field`): of booleans torch would make this in every layer, and
    keep each for the backward.
    """
    what = "document mask", num_positions, dtype
    return once_per_field(cu_seqlens, what, lambda: _mask(cu_seqlens, num_positions, dtype))


def _mask(cu_seqlens: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Computes the mask of `document_mask`, on the device of `cu_seqlens`."""
    positions = torch.arange(num_positions, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens.contiguous(), positions.expand(len(cu_seqlens), -1).contiguous(), right=True)
    other = document[:, :, None] != document[:, None, :]
    hidden = (other | (positions[:, None] < positions[None, :]))[:, None]
    return torch.where(hidden, torch.full((), float("-inf"), dtype=dtype, device=hidden.device), 0.0)


_known: list[Any] = []


def varlen() -> Any:
    """Returns torch's attention over sequences of various lengths, or None. Imported late: that loads torch's compiler."""
    if not _known:  # not `functools.cache`: torch's compiler warns about it
        _known.append(_found())
    return _known[0]


def _found() -> Any:
    """Imports torch's `varlen_attn`; returns None if torch does not have it, or not with windows and grouped queries."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    kernel: Any = varlen_attn
    has_all = {"window_size", "enable_gqa"} <= set(inspect.signature(kernel).parameters)  # torch 2.10 had neither
    return kernel if has_all else None


def _by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Computes the attention with torch's varlen kernel, which skips pairs of positions from two documents."""
    batch, num_positions = q.shape[:2]
    bounds = once_per_field(cu_seqlens, ("varlen", num_positions), lambda: _flat_bounds(cu_seqlens, num_positions))
    context: Tensor = varlen()(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        num_positions,
        num_positions,  # upper bounds: to know the true maximum, the host would have to wait for the device
        window_size=(-1, 0),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return context.reshape(batch, num_positions, *context.shape[1:])


def _flat_bounds(cu_seqlens: Tensor, num_positions: int) -> Tensor:
    """Returns the document bounds of all rows joined, [b n + 1] int32; padding becomes documents of no length."""
    rows = torch.arange(len(cu_seqlens), device=cu_seqlens.device)[:, None] * num_positions
    end = rows.new_tensor([len(cu_seqlens) * num_positions])
    return torch.cat([(cu_seqlens[:, :-1] + rows).flatten(), end]).to(torch.int32)

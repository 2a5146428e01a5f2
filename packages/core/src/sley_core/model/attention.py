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

_CACHED: Any = WeakIdKeyDictionary()  # field -> {(version of the field, what): value}


def once_per_field(field: Tensor, what: Hashable, compute: Callable[[], T]) -> T:
    """Returns `compute()`, or its cached result; `compute` must depend only on `field` and the key `what`.

    Use it for values that many layers compute from one field, such as a mask from `cu_seqlens`. An entry lives as long as the
    tensor object, i.e. its micro-batch, and a write to the field invalidates it. `compute` runs without gradients. A compiled
    layer computes inside its graph instead. In inference mode, whose tensors have no version and may not enter a graph later,
    every call computes.
    """
    if torch.compiler.is_compiling() or field.is_inference() or torch.is_inference_mode_enabled():
        return compute()
    values: dict[Any, T] = _CACHED.setdefault(field, {})
    key = field._version, what
    if key not in values:
        with torch.no_grad():
            values[key] = compute()
    return values[key]


def cached_values(field: Tensor) -> list[Any]:
    """Returns all cached values for the current version of `field`."""
    values: dict[Any, Any] = _CACHED.get(field, {})
    return [value for (version, _), value in values.items() if version == field._version]


_HALF = (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    """Computes softmax(q k^T / sqrt(d)) v causally within each document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the context [b, s, h, d], in the dtype of q.

        q: [b, s, h, d]. k, v: [b, s, h_kv, d], where h is a multiple of h_kv.
        cu_seqlens: [b, n + 1] integers: the starts of each row's documents, 0 first, then padded with s. None: one
        document per row.
        """
        is_cuda = device_kind(q) == "cuda"
        if cu_seqlens is not None and is_cuda and q.dtype in _HALF and varlen() is not None:
            return _attend_with_varlen(q, k, v, cu_seqlens)
        mask = None if cu_seqlens is None else document_mask(cu_seqlens, q.shape[1], q.dtype)
        grouped = q.shape[2] != k.shape[2]
        if grouped and is_cuda and (mask is not None or q.dtype not in _HALF):
            # only torch's math kernel supports groups here; the memory-efficient one needs equal numbers of heads
            k, v = (shared.repeat_interleave(q.shape[2] // shared.shape[2], dim=2) for shared in (k, v))
            grouped = False
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return context.transpose(1, 2)


def document_mask(cu_seqlens: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Returns the additive attention mask, [b, 1, s, s] of `dtype`.

    It is 0 for earlier or equal positions of the same document, and minus infinity otherwise. It is built once per micro-batch
    (`once_per_field`). From a boolean mask torch would build it in every layer, and save each for the backward.
    """
    key = "document mask", num_positions, dtype
    return once_per_field(cu_seqlens, key, lambda: _compute_mask(cu_seqlens, num_positions, dtype))


def _compute_mask(cu_seqlens: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Computes the mask of `document_mask`, on the device of `cu_seqlens`."""
    positions = torch.arange(num_positions, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens.contiguous(), positions.expand(len(cu_seqlens), -1).contiguous(), right=True)
    is_other = document[:, :, None] != document[:, None, :]
    is_hidden = (is_other | (positions[:, None] < positions[None, :]))[:, None]
    return torch.where(is_hidden, torch.full((), float("-inf"), dtype=dtype, device=is_hidden.device), 0.0)


_varlen_cache: list[Any] = []


def varlen() -> Any:
    """Returns torch's `varlen_attn`, or None without it. Imports it late, since that loads torch's compiler."""
    if not _varlen_cache:  # not `functools.cache`: torch's compiler warns about it
        _varlen_cache.append(_import_varlen())
    return _varlen_cache[0]


def _import_varlen() -> Any:
    """Imports torch's `varlen_attn`; returns None if it is missing or lacks windows or grouped queries."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    kernel: Any = varlen_attn
    has_all = {"window_size", "enable_gqa"} <= set(inspect.signature(kernel).parameters)  # torch 2.10 had neither
    return kernel if has_all else None


def _attend_with_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Computes the attention with torch's varlen kernel, which skips pairs of positions in different documents."""
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
    """Returns the document bounds of the concatenated rows, [b n + 1] int32; padding becomes empty documents."""
    rows = torch.arange(len(cu_seqlens), device=cu_seqlens.device)[:, None] * num_positions
    end = rows.new_tensor([len(cu_seqlens) * num_positions])
    return torch.cat([(cu_seqlens[:, :-1] + rows).flatten(), end]).to(torch.int32)

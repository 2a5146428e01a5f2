"""Causal attention within packed documents. The tokens of a sequence interact only here.

A sequence-parallel attention wraps this module: it exchanges slices of the sequence for slices of the heads, calls this module
with the full sequence of a few heads, and exchanges the context back.
"""

import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError
from sley_core.model.tensors import device_kind

T = TypeVar("T")

_cached_values: Any = WeakIdKeyDictionary()
"""The values of each field, by the version of the field and the key in `once_per_field`."""


def once_per_field(field: Tensor, key: Hashable, compute: Callable[[], T]) -> T:
    """Returns `compute()`, or its cached result. `compute` must depend only on `field` and `key`. A cached result has no
    gradient. Use this for values that many layers compute from one field, such as a mask from `cu_seqlens`. A cached result
    lives as long as the tensor object `field`, which exists for one microbatch; a write to the field invalidates it. Compiled
    layers compute inside the graph. In inference mode, whose tensors have no version and may enter no graph, every call
    computes.
    """
    if torch.compiler.is_compiling() or field.is_inference() or torch.is_inference_mode_enabled():
        return compute()
    values: dict[Any, T] = _cached_values.setdefault(field, {})
    versioned_key = field._version, key
    if versioned_key not in values:
        with torch.no_grad():
            values[versioned_key] = compute()
    return values[versioned_key]


def cached_values(field: Tensor) -> list[Any]:
    """Returns all cached values for the current version of `field`."""
    values: dict[Any, Any] = _cached_values.get(field, {})
    return [value for (version, _), value in values.items() if version == field._version]


HALF_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes that flash attention kernels support."""


class Attention(nn.Module):
    """Computes softmax(scale * q k^T) v with a causal mask within each document."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Returns the context [b, s, h, d], in the dtype of q. q: [b, s, h, d]. k, v: [b, s, h_kv, d], where h is a multiple of
        h_kv. cu_seqlens: [b, n + 1] integers: the starts of each row's documents, 0 first, then padded with s; None means one
        document per row. scale: the factor of the scores; 1 / sqrt(d) if None. window: the number of positions, including
        itself, to which a position attends; None means all up to itself. dropout: the probability of dropping an attention
        weight.
        """
        is_cuda = device_kind(q) == "cuda"
        if cu_seqlens is not None and is_cuda and not dropout and _has_varlen(q.dtype):
            return _attend_with_varlen(q, k, v, cu_seqlens, scale, window)
        has_window = window is not None and window < q.shape[1]
        mask = attention_mask(cu_seqlens, window, q) if has_window or cu_seqlens is not None else None
        is_grouped = q.shape[2] != k.shape[2]
        if is_grouped and is_cuda and (mask is not None or q.dtype not in HALF_DTYPES):
            # only torch's math kernel supports groups here; the memory-efficient one needs equal numbers of heads
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
            is_grouped = False
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=is_grouped,
        )
        return context.transpose(1, 2)


def attention_mask(cu_seqlens: Tensor | None, window: int | None, x: Tensor) -> Tensor:
    """Returns the additive attention mask for the s positions of `x` [b, s, ...], in its dtype: [b, 1, s, s], or [1, 1, s, s]
    without `cu_seqlens`. In the row of a position, the mask is 0 at the last `window` positions of its document up to itself,
    and minus infinity elsewhere. The mask is cached (`once_per_field`). With a boolean mask, torch would build an additive mask
    in every layer, and save each of them for the backward.
    """
    if cu_seqlens is None:
        return _causal_mask(x.shape[1], window, x.dtype, x.device)
    key = "attention mask", window, x.shape[1], x.dtype
    return once_per_field(cu_seqlens, key, lambda: _compute_mask(cu_seqlens, window, x))


@lru_cache(maxsize=2)
@torch.no_grad()
def _causal_mask(num_positions: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the mask of `attention_mask` for one document per row, [1, 1, s, s]. Keeps the last two results."""
    one_document = torch.tensor([[0, num_positions]], device=device)
    return _compute_mask(one_document, window, torch.empty((1, num_positions), dtype=dtype, device=device))


def _compute_mask(cu_seqlens: Tensor, window: int | None, x: Tensor) -> Tensor:
    """Returns the mask that `attention_mask` describes, without a cache."""
    positions = torch.arange(x.shape[1], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    documents = torch.searchsorted(cu_seqlens.contiguous(), positions.expand(len(cu_seqlens), -1).contiguous(), right=True)
    is_hidden = documents[:, :, None] != documents[:, None, :]
    distance = positions[:, None] - positions[None, :]
    is_hidden = is_hidden | (distance < 0)
    if window is not None:
        is_hidden = is_hidden | (distance >= window)
    return torch.where(is_hidden[:, None], torch.full((), float("-inf"), dtype=x.dtype, device=is_hidden.device), 0.0)


KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Maps each name of `[model] attention`, except "auto", to the backend of `F.scaled_dot_product_attention`."""


def use_attention_kernel(name: str) -> AbstractContextManager[Any]:
    """Returns a context in which every attention uses the kernel `name`. If `name` is not in `KERNELS`, torch chooses."""
    return sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext()


def find_attention_kernel(name: str, head_dim: int, device: torch.device, dtype: torch.dtype, *, is_packed: bool) -> str:
    """Returns the name of the kernel that computes causal attention with `[model] attention = name`, such as "flash". head_dim:
    the number of elements of a head. is_packed: whether `cu_seqlens` is passed. Raises PlanError "attention-kernel" if the
    kernel `name` cannot compute such heads in `dtype` on `device`.
    """
    with use_attention_kernel(name):
        if is_packed and device.type == "cuda" and _has_varlen(dtype):
            return "flash"
        q = torch.empty((1, 1, 128, head_dim), dtype=dtype, device=device, requires_grad=True)
        mask = torch.zeros((1, 1, 128, 128), dtype=dtype, device=device) if is_packed else None
        try:
            backend = SDPBackend(torch._fused_sdp_choice(q, q, q, mask, 0.0, mask is None))
        except RuntimeError:  # "No viable backend"
            backend = SDPBackend.ERROR
    if backend == SDPBackend.ERROR:  # torch makes a new object in each call
        dtype_name = str(dtype).removeprefix("torch.")
        message = f"torch's attention kernel `{name}` cannot compute {dtype_name} heads of size {head_dim} on {device.type}"
        hint = 'use `attention = "auto"`, or another kernel'
        raise PlanError("attention-kernel", message, path=("model", "attention"), hint=hint)
    return next((key for key, value in KERNELS.items() if value == backend), backend.name.lower())


def _has_varlen(dtype: torch.dtype) -> bool:
    """Returns whether a CUDA device computes packed documents with `varlen_attn`, a flash kernel."""
    is_flash_enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return dtype in HALF_DTYPES and is_flash_enabled and load_varlen_kernel() is not None


_varlen_kernels: list[Any] = []


def load_varlen_kernel() -> Any:
    """Returns torch's `varlen_attn`, or None if it is missing or lacks windows or grouped queries, as in old versions of torch.
    Imports it at the first call, since the import loads torch's compiler.
    """
    if not _varlen_kernels:  # not `functools.cache`: torch's compiler warns about it
        kernel: Any = None
        with suppress(ImportError):
            from torch.nn.attention.varlen import varlen_attn as kernel
        is_supported = kernel is not None and {"window_size", "enable_gqa"} <= set(inspect.signature(kernel).parameters)
        _varlen_kernels.append(kernel if is_supported else None)
    return _varlen_kernels[0]


def _attend_with_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Computes `Attention.forward` with torch's `varlen_attn`, which skips pairs of positions in different documents."""
    batch, num_positions = q.shape[:2]
    bounds = flat_bounds(cu_seqlens, num_positions)
    context: Tensor = load_varlen_kernel()(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        num_positions,
        num_positions,  # upper bounds: to know the true maximum, the host would have to wait for the device
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return context.reshape(batch, num_positions, *context.shape[1:])


def flat_bounds(cu_seqlens: Tensor, num_positions: int) -> Tensor:
    """Returns the bounds of all documents in the concatenated rows, [b n + 1] int32. Padding becomes empty documents. The
    result is cached (`once_per_field`). cu_seqlens: [b, n + 1], document starts, padded with `num_positions`, the length of a
    row.
    """

    def compute() -> Tensor:
        rows = torch.arange(len(cu_seqlens), device=cu_seqlens.device)[:, None] * num_positions
        end = rows.new_tensor([len(cu_seqlens) * num_positions])
        return torch.cat([(cu_seqlens[:, :-1] + rows).flatten(), end]).to(torch.int32)

    return once_per_field(cu_seqlens, ("varlen", num_positions), compute)

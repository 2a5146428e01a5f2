"""The attention that `hf.decoder` registers with transformers: Sley's own, which supports packed documents and sequence slices.

transformers calls `attend` in the forward of each attention module. `attend` calls the `SleyAttention` that `add_attention` has
added to the module. The part that `[sequence]` names finds each `SleyAttention`, and makes it work on sequence slices.
"""

import sys
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from sley_core.api.model import Attention, attention_mask, flat_bounds, once_per_field
from sley_core.errors import RunError

INTERFACE_NAME = "sley"
"""The name of Sley's attention in transformers' `AttentionInterface`."""

ATTENTION_NAME = "sley_core"
"""The name of the `SleyAttention` as a submodule of a transformers attention module."""

FLASH_MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The Python modules of flash-attn and flash-attn-3, keyed by the names of their kernels in transformers."""


class SleyAttention(Attention):
    """Core's attention with more kernels, and with soft-capped scores as in Gemma 2. kernel: the name of the kernel in
    transformers. cu_seqlens: the document bounds in the current call of the block, or None; the block sets them, since not
    every family passes keyword arguments on to its attention. was_called: whether `attend` has called this module.
    """

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.was_called = False
        self.cu_seqlens: Tensor | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor:
        """Returns the context [b, s, h, d] of causal attention. `Attention.forward` describes the other arguments. softcap:
        replaces the scores with softcap x tanh(scores / softcap), unless it is None. Raises RunError "hf-attention" if the
        kernel is not installed, or does not support the dropout, the dtype or the device.
        """
        if self.kernel not in ("sdpa", "eager") and not q.is_meta:
            _check_call(self.kernel, q, dropout)
            if self.kernel == "flex_attention":
                return call_flex(q, k, v, cu_seqlens, scale, window, softcap)
            return call_flash(import_module(FLASH_MODULES[self.kernel]), q, k, v, cu_seqlens, scale, window, dropout, softcap)
        if softcap is None and self.kernel != "eager":
            return super().forward(q, k, v, cu_seqlens, scale, window, dropout)
        mask = attention_mask(cu_seqlens, window, q)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1) for shared in (k, v))
        scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [b, h, s, s]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask
        dtype = torch.promote_types(q.dtype, torch.float32)
        weights = nn.functional.dropout(scores.softmax(-1, dtype=dtype).to(q.dtype), dropout, self.training)
        return (weights @ v).transpose(1, 2)


def _check_call(kernel: str, q: Tensor, dropout: float) -> None:
    """Raises RunError "hf-attention" if `kernel`, not "sdpa" or "eager", is missing or unfit for dropout, dtype or device."""
    device, problem = q.device.type, ""
    if dropout and kernel != "flash_attention_2":
        problem = "has no dropout"
    elif kernel == "flex_attention":
        if device != "cuda" and torch.is_grad_enabled() and q.requires_grad:
            problem = f"has no backward on {device}"
    elif find_spec(FLASH_MODULES[kernel]) is None:
        problem = f"needs the module `{FLASH_MODULES[kernel]}`, which is not installed"
    elif device != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        problem = f"computes in bf16 and fp16 on CUDA, but not in {q.dtype} on {device}"
    if problem:
        raise RunError("hf-attention", f"`{kernel}` {problem}", hint='set `[model] attention = "auto"`')


def call_flash(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    scale: float | None,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Returns the context [b, s, h, d], computed by `module`, one of `FLASH_MODULES`. q, k, v: [b, s, h, d]. cu_seqlens: the
    document bounds [b, n + 1]; None for one document per row. scale, softcap: the factor and the bound of the scores. window:
    the number of positions to which a position attends. dropout: the probability of dropping an attention weight. None stands
    for the default.
    """
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    else:
        bounds = flat_bounds(cu_seqlens, length)
    options: dict[str, Any] = {"dropout_p": dropout} if dropout else {}
    context = module.flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        length,
        length,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
        **options,
    )
    context = context[0] if isinstance(context, tuple) else context  # flash-attn-3 may return the log-sum-exp too
    output: Tensor = context.reshape(batch, length, *context.shape[1:])
    return output


def call_flex(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Returns the context [b, s, h, d], computed by `flex_attention` (compiled on CUDA) from the arguments that `call_flash`
    describes.
    """
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        mask = _build_causal_block_mask(batch, length, window, q.device)
    else:
        mask = once_per_field(cu_seqlens, ("flex", window, length), lambda: _build_block_mask(cu_seqlens, length, window))

    def cap_score(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap  # type: ignore[operator]

    context: Tensor = _load_flex_attention(q.device.type == "cuda")(
        *(heads.transpose(1, 2) for heads in (q, k, v)),
        score_mod=None if softcap is None else cap_score,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return context.transpose(1, 2)


@lru_cache(maxsize=2)
@torch.no_grad()
def _build_causal_block_mask(batch: int, length: int, window: int | None, device: torch.device) -> Any:
    """Returns flex_attention's mask of causal attention for rows that contain one document each."""
    return _build_block_mask(torch.tensor([[0, length]], device=device).expand(batch, 2), length, window)


def _build_block_mask(bounds: Tensor, length: int, window: int | None) -> Any:
    """Returns flex_attention's causal mask within documents. bounds: `cu_seqlens` [b, n + 1]. window: in tokens, or None."""
    positions = torch.arange(length, device=bounds.device, dtype=bounds.dtype).repeat(len(bounds), 1)
    document = torch.searchsorted(bounds[:, 1:].contiguous(), positions, right=True)  # [b, s]

    def may_attend(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[b, i] == document[b, j]) & (i >= j) & (i - j < (window or length))

    flex = import_module("torch.nn.attention.flex_attention")  # loads torch's compiler
    return flex.create_block_mask(may_attend, len(bounds), None, length, length, device=bounds.device.type)


@cache
def _load_flex_attention(is_compiled: bool) -> Any:
    """Returns torch's `flex_attention`; imported on first use, since it loads torch's compiler."""
    function = import_module("torch.nn.attention.flex_attention").flex_attention
    return torch.compile(function) if is_compiled else function


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the context [b, s, h, d], and None in place of the attention weights. transformers calls this function for each
    attention module. query: [b, h, s, d]. key, value: [b, h_kv, s, d]. scaling, softcap: the factor and the bound of the
    scores. sliding_window: the number of positions to which a position attends. Raises RunError "hf-attention" for a mask or
    for attention sinks (`s_aux`).
    """
    if attention_mask is not None or s_aux is not None:
        argument = "attention sinks" if attention_mask is None else "its own mask"
        message = f"`{type(module).__name__}` uses {argument}, which `hf.decoder` does not support"
        raise RunError("hf-attention", message, hint="use a model of a tested family, which packages/hf/README.md lists")
    attention = cast(SleyAttention, module.get_submodule(ATTENTION_NAME))
    attention.was_called = True
    context = attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)),
        cu_seqlens=attention.cu_seqlens,
        scale=scaling,
        window=sliding_window,
        dropout=dropout if module.training else 0.0,
        softcap=softcap,
    )
    return context, None


AttentionInterface.register(INTERFACE_NAME, attend)


def uses_interface(model_class: type) -> bool:
    """Returns whether the attention modules of the transformers class `model_class` look up their kernel by its registered
    name.
    """
    return "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[model_class.__module__])


def add_attention(model: nn.Module, kernel: str) -> None:
    """Adds a `SleyAttention` to each attention module of a transformers model. kernel: the kernel's name in transformers."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx"):
            module.add_module(ATTENTION_NAME, SleyAttention(kernel))

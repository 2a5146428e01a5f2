"""Takes attention, RMSNorm and dropout as the single kernels that CUDA runs, on tensors without values.

              on a CPU                                   on CUDA, and within `FusedKernels`
attention     torch's fused operator; without memory     one kernel each way; the backward sums gradients of queries in fp32
              the scores of all pairs
RMSNorm       its formula; keeps the input in fp32       one kernel each way; keeps the input and a number per row
dropout       keeps a mask in the input's dtype          one kernel each way; keeps one byte per element

From torch's sources (aten/src/ATen/native/cuda, transformers/cuda). `standing_for("cuda")` changes masks of documents and the
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from sley_core.model.tensors import standing_for
from sley_estimate.layers.operators import ATTENTION, Operator, attention_backward, attention_operator, moved_bytes

Note = Callable[[Operator], None]
"""Records a kernel that torch does not see as one operator."""


@contextmanager
def as_on_cuda(note: Note | None = None) -> Iterator[None]:
    """Makes layers and the loss keep within the block what they keep on CUDA."""
    with standing_for("cuda"), FusedKernels(note):
        yield


class FusedKernels(TorchFunctionMode):
    """Within it attention, RMSNorm and dropout are one kernel each way, which `note` records."""

    def __init__(self, note: Note | None = None) -> None:
        super().__init__()
        self.note = note or (lambda operator: None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        other = self.instead.get(func)
        return func(*args, **(kwargs or {})) if other is None else other(self, *args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        """Returns the context. Mask and dropout cost nothing; a mask is kept in the dtype of the scores."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        context: Tensor = _Attention.apply(self.note, query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]  # torch's
        return context

    def norm(self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        """Returns the normed input; by the formula where the weight has another dtype, as on CUDA."""
        if weight is not None and weight.dtype != input.dtype:
            return F.rms_norm(input, list(normalized_shape), weight, eps)
        normed: Tensor = _RMSNorm.apply(self.note, input, weight)  # type: ignore[no-untyped-call]  # torch's
        return normed

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Returns the input with elements dropped; not as one kernel outside training, in place, or with p of 0 or 1."""
        if not training or inplace or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        dropped: Tensor = _Dropout.apply(self.note, input)  # type: ignore[no-untyped-call]  # torch's
        return dropped

    def backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Runs torch's backward from the gradient edges of `tensors`: from tensors torch would turn this mode off, and layers
        that run again within the backward would not be fused.
        """
        with self:
            torch.autograd.backward([get_gradient_edge(tensor) for tensor in tensors], *args, **kwargs)

    instead: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        F.scaled_dot_product_attention: attention,
        F.rms_norm: norm,
        torch.rms_norm: norm,
        F.dropout: dropout,
        torch.autograd.backward: backward,
    }


def _per_row(rows: Tensor) -> Tensor:
    """Returns a kernel's statistic of each row, [..., 1] in fp32."""
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


def _bytes(*tensors: Tensor) -> int:
    return sum(map(moved_bytes, tensors))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, note: Note, input: Tensor, weight: Tensor | None) -> Tensor:
        inputs = [input] if weight is None else [input, weight]
        ctx.note, ctx.like = note, [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.save_for_backward(*inputs, _per_row(input))
        normed = torch.empty_like(input)
        note(Operator("rms_norm", _bytes(*inputs, normed)))
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None]:
        ctx.saved_tensors  # noqa: B018  # a policy that runs the layer again does so here
        results = [gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        ctx.note(Operator("rms_norm", 2 * _bytes(*results) + _bytes(*gradients)))
        return None, results[0], results[1] if len(results) > 1 else None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, note: Note, input: Tensor) -> Tensor:
        ctx.note = note
        mask, dropped = torch.empty_like(input, dtype=torch.bool), torch.empty_like(input)
        ctx.save_for_backward(mask)
        note(Operator("dropout", _bytes(input, mask, dropped)))
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (mask,) = ctx.saved_tensors  # a policy that moved it brings it back
        result = torch.empty_like(gradients[0])
        ctx.note(Operator("dropout", _bytes(gradients[0], mask, result)))
        return None, result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, note: Note, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Returns the context: from torch's fused operator for 4 dims and one head width, so that a policy which keeps its
        result sees it; that is recorded as any operator. Keeps all four tensors, the mask and a number per row.
        """
        ctx.note, ctx.is_causal = note, is_causal
        context: Tensor
        if query.ndim == 4 and query.shape[-1] == value.shape[-1]:
            context = ATTENTION(query, key, value, 0.0, is_causal)[0]
        else:
            context = query.new_empty((*query.shape[:-1], value.shape[-1]))
            note(attention_operator(query, key, value, context, is_causal=is_causal))
        ctx.save_for_backward(query, key, value, context, _per_row(query), mask)
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        is_wide = query.dtype.itemsize >= torch.float32.itemsize
        _sums = None if is_wide else torch.empty_like(query, dtype=torch.float32)  # while the kernel runs
        ctx.note(attention_backward(query, key, value, gradients[0], results, is_causal=ctx.is_causal))
        return None, *results, None, None

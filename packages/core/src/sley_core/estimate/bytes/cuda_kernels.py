"""Makes layers keep and take what they do on CUDA, where that differs from a CPU, on whose tensors an
estimate takes its steps.

              on a CPU                                       on CUDA
RMSNorm       its formula, which keeps the input in fp32     one kernel, which keeps the input and a number per row
attention     torch's fused operator                         the same, and its backward sums gradients of queries in fp32
dropout       keeps a mask in the input's type               keeps one byte per element
documents     a mask of all pairs of positions               their bounds (`device_kind`)
loss          few logits at a time                           many (`device_kind`)

From torch's sources (aten/src/ATen/native/cuda, transformers/cuda); only a comparison with a device says how well it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.estimate.layers.fused import FusedKernels
from sley_core.estimate.layers.operators import Operator
from sley_core.model.device_kind import standing_for


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Makes layers, and the loss, keep within the block what they would keep on CUDA."""
    with standing_for("cuda"), CudaKernels():
        yield


class _Nobody:
    """Takes no notes."""

    def note(self, operator: Operator) -> None: ...


class CudaKernels(FusedKernels):
    """Within it, RMSNorm, attention and dropout keep for their backward what CUDA's kernels do."""

    def __init__(self) -> None:
        super().__init__(_Nobody())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.rms_norm and not _is_fused(*args, **(kwargs or {})):
            return func(*args, **(kwargs or {}))
        if func is F.dropout and (dropped := _dropped(*args, **(kwargs or {}))) is not None:
            return dropped
        return super().__torch_function__(func, types, args, kwargs)


def _is_fused(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> bool:
    """Returns whether CUDA has one kernel for this RMSNorm: without a weight, or with one of the input's dtype."""
    return weight is None or weight.dtype == input.dtype


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    """Returns what dropout makes of `input`, and keeps one byte per element for its backward, as CUDA's kernel does; None where
    no such kernel runs: outside of training, in place, or with p of 0 or 1.
    """
    if not training or inplace or not 0 < p < 1:
        return None
    found: Tensor = _Dropout.apply(input)  # type: ignore[no-untyped-call]  # torch's
    return found


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(input, dtype=torch.bool))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018  # a policy that moves what is saved brings it back
        (gradient,) = gradients
        return torch.empty_like(gradient)

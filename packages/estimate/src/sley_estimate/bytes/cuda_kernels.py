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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.model.tensors import standing_for
from sley_estimate.layers.fused import FusedKernels, Notes
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.recorder import moved_bytes


@contextmanager
def as_on_cuda(notes: Notes | None = None) -> Iterator[None]:
    """Makes layers, and the loss, keep within the block what they would keep on CUDA. notes: takes each kernel as one
    operator.
    """
    with standing_for("cuda"), CudaKernels(notes or _Nobody()):
        yield


class _Nobody:
    """Takes no notes."""

    def note(self, operator: Operator) -> None: ...


class CudaKernels(FusedKernels):
    """Within it, RMSNorm, attention and dropout keep for their backward what CUDA's kernels do, and are one operator forward
    and one backward each.
    """

    def norm_if_fused(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns what an RMSNorm makes of its input: in one kernel, where CUDA has one, else by its formula."""
        return self.norm(*args, **kwargs) if _is_fused(*args, **kwargs) else F.rms_norm(*args, **kwargs)

    def dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns what dropout makes of its input: in one kernel, where anything is dropped."""
        if _drops(*args, **kwargs):
            dropped: Tensor = _Dropout.apply(self.recorder, args[0] if args else kwargs["input"])  # type: ignore[no-untyped-call]  # torch's
            return dropped
        return F.dropout(*args, **kwargs)

    instead = FusedKernels.instead | {F.rms_norm: norm_if_fused, F.dropout: dropout}


def _is_fused(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> bool:
    """Returns whether CUDA has one kernel for this RMSNorm: without a weight, or with one of the input's dtype."""
    return weight is None or weight.dtype == input.dtype


def _drops(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Returns whether CUDA has one kernel for this dropout: not outside of training, in place, or with p of 0 or 1."""
    return training and not inplace and 0 < p < 1


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Notes, input: Tensor) -> Tensor:
        """Returns what dropout makes of `input`, keeps one byte per element for its backward, and notes the kernel."""
        ctx.recorder = recorder
        mask, dropped = torch.empty_like(input, dtype=torch.bool), torch.empty_like(input)
        ctx.save_for_backward(mask)
        recorder.note(Operator("dropout", sum(map(moved_bytes, (input, mask, dropped)))))
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        """Returns the gradient of what was dropped from, and notes the kernel."""
        (mask,) = ctx.saved_tensors  # a policy that moves what is saved brings it back
        (gradient,) = gradients
        made = torch.empty_like(gradient)
        ctx.recorder.note(Operator("dropout", sum(map(moved_bytes, (gradient, mask, made)))))
        return None, made

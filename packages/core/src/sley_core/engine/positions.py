"""Computes losses of full sequences from slices (`sp`), and checks in first steps that other losses are sums over positions.

`WholeSequences` gathers full sequences for a loss (`[loss] sequence = "whole"`):

    rank 0   output of slice 0 ──┐ gathered   ┌── the loss of whole sequences ──> gradient of slice 0; counts
    rank 1   output of slice 1 ──┘  on both   └── the same loss               ──> gradient of slice 1

Each rank computes the full loss, which needs its memory, and keeps the gradient of its own slice, so the backward does not
communicate. The loss and its weight count only on the first rank.

Any other loss must be a sum over positions, which `PositionAdditivity` checks on a few positions of this rank's own output:

    right    loss(positions 0 to 15) = loss(0 to 7) + loss(8 to 15)
    wrong    labels that the loss shifts itself, a term that compares neighbours, a mean over the sequence
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.step_batch import dim_and_size, gather_along_dim, gather_output
from sley_core.errors import RunError
from sley_core.records import LossRecord

if TYPE_CHECKING:
    from sley_core.comm.group import Group
    from sley_core.data.dataset import Batch, Field
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Loss


def needs_whole_sequences(plan: Plan) -> bool:
    """Returns whether the plan's loss needs full sequences, by its table or by its record."""
    loss = plan.loss
    sequence = loss.record.sequence if isinstance(loss.record, LossRecord) else loss.config.sequence
    return bool(sequence == "whole")


class WholeSequences:
    """Gathers the inputs of a loss over `sp`. fields: the declared fields of slices. counts: whether this loss counts."""

    def __init__(self, fields: Mapping[str, Field], sp: Group) -> None:
        self.fields = fields
        self.sp = sp
        self.counts = sp.coord == 0

    def __call__(self, output: Any, batch: Mapping[str, Tensor], micro: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Returns the output and the fields of full sequences. Blocks. All ranks of `sp` call it in the same order.

        batch: the fields that the loss reads, on the device. micro: all fields of the microbatch. Raises RunError
        "outputs-apart" for an output without the position dim.
        """
        fields = {}
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim
            fields[name] = value if dim is None else gather_along_dim(value, dim, self.sp, f"the slices of `{name}`")
        return gather_output(output, dim_and_size(micro, self.fields, "sequence_dim"), self.sp), fields


_NARROW_TOLERANCE = 2**-6
"""The relative tolerance of the sum of halves if the loss computes in a type narrower than fp64: bf16 has 8 bits."""

WINDOW = 16
"""The number of positions per check. The beginning, the middle and the end of a slice are checked."""


class PositionAdditivity:
    """Checks that `loss` is a sum over positions, in each forward until a check succeeds. fields: the data's declaration."""

    def __init__(self, loss: Loss, fields: Mapping[str, Field]) -> None:
        self.loss = loss
        self.fields = fields
        self._is_checked = False

    @torch.no_grad()
    def check(self, output: object, batch: Mapping[str, Tensor]) -> None:
        """Raises RunError "loss-not-additive" for a loss that relates positions. Losses that draw random numbers, or that
        cannot be evaluated on a part of the positions, are not checked. output: the model's output for this rank's slice
        `batch`.
        """
        if self._is_checked or type(output) is not Tensor:
            return
        fields = [name for name, field in self.fields.items() if field.sequence_dim is not None and name in batch]
        dim, length = dim_and_size(batch, self.fields, "sequence_dim") if fields else (0, 0)
        size = min(WINDOW, length) // 2 * 2
        if size < 2 or output.ndim <= dim or output.shape[dim] != length:
            return
        starts = sorted({0, (length - size) // 2, length - size})
        results = [self._check_window(output, batch, dim, start, size) for start in starts]  # all of them
        self._is_checked = any(results)

    def _check_window(self, output: Tensor, batch: Mapping[str, Tensor], dim: int, start: int, size: int) -> bool:
        """Compares the loss of a window with the sum over its halves. Returns whether no further check is needed."""
        half = size // 2
        spans = (start, size), (start, half), (start + half, half), (start, size)

        def window_loss(start: int, size: int) -> Tensor:
            """Returns the loss of `size` positions from `start` on, computed in fp64 if the loss supports it."""
            part = {}
            for name, value in batch.items():
                sequence_dim = self.fields[name].sequence_dim
                part[name] = value if sequence_dim is None else value.narrow(sequence_dim, start, size)
            window = output.narrow(dim, start, size)
            try:
                return loss.loss(window.double(), part)
            except RuntimeError:  # it has tensors of the model's type
                return loss.loss(window, part)

        try:
            with torch.random.fork_rng([output.device] if output.device.type == "cuda" else []):
                # Called on a copy: a loss may have state, such as a count of its calls.
                loss = deepcopy(self.loss) if isinstance(self.loss, nn.Module) else copy(self.loss)
                losses = [window_loss(*span) for span in spans]
        except Exception:  # a loss need not take a part of an output, nor another type, nor be copied
            return True  # it cannot be checked, and is not tried again in every forward
        window_total, left, right, window_total_again = map(float, losses)
        scale = max(abs(window_total), abs(left), abs(right))
        limit = 1e-6 if all(loss.dtype == torch.float64 for loss in losses) else _NARROW_TOLERANCE
        if not 0 < scale < float("inf"):
            return False  # no label counts in this window
        if abs(left + right - window_total) <= limit * scale or window_total != window_total_again:
            return True
        raise RunError(
            "loss-not-additive",
            f"the loss of {size} positions is {window_total:g}, but the losses of its halves add up to {left:g} + "
            f"{right:g} = {left + right:g}, so the loss combines positions, but each rank of `sp` has only a "
            "slice",
            path=("parallel", "sp"),
            hint="return a sum over positions, with labels that the data shifts; if the loss compares or "
            'averages positions, set sequence = "whole" in [loss]',
        )

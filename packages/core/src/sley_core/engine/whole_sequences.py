"""Gives a loss whole sequences where ranks have slices of them (`[loss] sequence = "whole"`).

    rank 0   output of slice 0 ──┐ gathered   ┌── the loss of whole sequences ──> gradient of slice 0; counts
    rank 1   output of slice 1 ──┘  on both   └── the same loss               ──> gradient of slice 1

Each rank computes the whole loss, and keeps the gradient of its own slice: nothing is exchanged in the backward. The loss and
its weight count on the first rank alone. Each rank needs memory for the whole output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sley_core.engine.outputs import gathered, spot_of, whole
from sley_core.records import LossRecord

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.data.dataset import Batch, Field
    from sley_core.plan.plan import Plan


def is_of_whole_sequences(plan: Plan) -> bool:
    """Returns whether the plan's loss asks for whole sequences, by its table or by its record."""
    loss = plan.loss
    sequence = loss.record.sequence if isinstance(loss.record, LossRecord) else loss.config.sequence
    return bool(sequence == "whole")


class WholeSequences:
    """Gathers what a loss needs over `sp`. fields: what the data declares of slices. counts: whether the loss counts on this
    rank.
    """

    def __init__(self, fields: Mapping[str, Field], sp: Group) -> None:
        self.fields = fields
        self.sp = sp
        self.counts = sp.coord == 0

    def __call__(self, output: Any, batch: Mapping[str, Tensor], micro: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Returns the output and the fields of whole sequences; blocks. All ranks of `sp` call it for the same micro-batches in
        the same order, as they run the same list.

        batch: the fields that the loss reads, on the device. micro: all fields of the micro-batch. Raises RunError
        "outputs-apart" for an output without the dim of positions.
        """
        found = {}
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim
            found[name] = value if dim is None else gathered(value, dim, self.sp, f"the slices of `{name}`")
        return whole(output, spot_of(micro, self.fields, "sequence_dim"), self.sp), found

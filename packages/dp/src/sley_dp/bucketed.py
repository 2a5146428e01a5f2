"""`dp.bucketed`: every gradient summed in flat buckets while the backward runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.api.comm import SumMemory
from sley_dp.narrow import Narrow
from sley_dp.reducer import BucketReducer
from sley_dp.sums import Host, Plain

if TYPE_CHECKING:
    from sley_core.api.parts import Parts
    from sley_dp.config import BucketedConfig


class Bucketed(BucketReducer):
    """Equals `core.each`, or with `reduction = "bf16"` is within 2^-7 of it."""

    def __init__(self, config: BucketedConfig) -> None:
        super().__init__(config, Narrow() if config.reduction == "bf16" else Plain())

    def attach(self, parts: Parts) -> None:
        super().attach(parts)
        if isinstance(self.sums, Plain) and (memories := _memories(parts)):
            self.sums = Host(memories)


def _memories(parts: Parts) -> dict[str, SumMemory]:
    """By reduce group, for those whose ranks may and can read each other's memory."""
    if not parts.groups.reads_memory:
        return {}
    found: dict[str, SumMemory] = {}
    timeout_s = parts.limits.collective_timeout_s
    # All ranks of a stage hold the same entries, so those of a group come to it in one order.
    for axis in dict.fromkeys(entry.reduce_group for entry in parts.book):
        memory = SumMemory.open(parts.groups[axis], timeout_s) if parts.groups[axis].size > 1 else None
        if memory is not None:
            found[axis] = memory
    return found

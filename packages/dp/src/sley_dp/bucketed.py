"""`dp.bucketed`: gradients summed bucket by bucket, each as soon as its last gradient is there.

A bucket is a stretch of the gradient store, so nothing is copied to reduce it and the optimizer reads the result where it
lies. Buckets are filled in reverse order of use; after the first step once more, in the order in which that step's backward
really completed the gradients.

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

The reference is PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2); `core.each` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import Pending, all_reduce, broadcast
from sley_core.engine.store import GradientBuffer, Layout
from sley_core.protocols import GradientHandler
from sley_dp.buckets import fill
from sley_dp.replicas import broadcast_values, check_values

if TYPE_CHECKING:
    from sley_core.engine.book import Entry
    from sley_core.engine.step_state import StepState
    from sley_core.run import Run
    from sley_dp.config import BucketedConfig


@dataclass(eq=False)
class Bucket:
    """A buffer of the store, how many of its entries are still missing in this step, and its reduction."""

    buffer: GradientBuffer
    missing: int = 0
    pending: Pending | None = None
    wire: Tensor | None = field(default=None, repr=False)


class Bucketed(GradientHandler):
    """Sums each entry over its reduce group, once per optimizer step, overlapped with the last backward."""

    def __init__(self, config: BucketedConfig) -> None:
        self.config = config
        self.buckets: list[Bucket] = []
        self._order: list[Entry] | None = None
        self._bucket_of: dict[Entry, Bucket] = {}
        self._layout = -1

    def attach(self, run: Run) -> None:
        self._run = run
        self._store = run.store
        self._groups = run.groups
        self._store.lay_out(self._plan)
        if not run.world.is_fake:
            if self.config.start == "broadcast":
                broadcast_values(run)
            elif self.config.start == "check":
                check_values(run)

    def begin_step(self, step: StepState) -> None:
        if self._order is None and self._store.seen_order:
            self._order = self._agreed_order()
            # Nobody may hold the old buffers when the new ones are made: two copies of the gradients would be the peak.
            self.buckets, self._bucket_of = [], {}
            self._store.lay_out(self._plan)
        if self._layout != self._store.num_layouts:
            self._layout = self._store.num_layouts
            self.buckets = [Bucket(buffer) for buffer in self._store.buffers]
            self._bucket_of = {entry: bucket for bucket in self.buckets for entry in bucket.buffer.entries}
        for bucket in self.buckets:
            bucket.missing = len(bucket.buffer.entries)
            bucket.pending = bucket.wire = None

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        bucket = self._bucket_of[entry]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._start(bucket)

    def finish_step(self, step: StepState) -> None:
        for bucket in self.buckets:
            assert bucket.missing == 0, f"{bucket.missing} gradients of {bucket.buffer.entries} never came"
            if bucket.pending is not None:
                bucket.pending.wait()
            if bucket.wire is not None:
                bucket.buffer.data.copy_(bucket.wire)
                bucket.wire = None

    def _start(self, bucket: Bucket) -> None:
        group = self._groups[bucket.buffer.reduce_group]
        if group.size == 1:
            return
        data = bucket.buffer.data
        if self.config.reduction == "bf16":
            data = bucket.wire = data.to(torch.bfloat16)
        # The bucket's reduce group; the store reports entries in one order on all of its ranks, so buckets fill alike.
        bucket.pending = all_reduce(data, group, what=f"the bucket of {bucket.buffer.entries[0].name}")

    def _plan(self, entries: list[Entry]) -> Layout:
        """Buckets per reduce group, filled in the agreed order; entries that it does not know come last."""
        if self._order is not None:
            place = {entry: at for at, entry in enumerate(self._order)}
            entries = sorted(entries, key=lambda entry: place.get(entry, len(place)))
        groups: dict[str, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(entry.reduce_group, []).append(entry)
        size = self._store.dtype.itemsize
        cap = self.config.bucket_mb * (1 << 20)
        buffers = [
            bucket for members in groups.values() for bucket in fill(members, lambda entry: entry.numel * size, cap)
        ]
        return Layout(buffers, entries)

    def _agreed_order(self) -> list[Entry]:
        """What the first rank of the stage saw; entries that no gradient reached there come last."""
        seen = self._store.seen_order
        unseen = [entry for entry in self._store.entries if entry not in set(seen)]
        indices = torch.tensor([entry.index for entry in [*seen, *unseen]], device=self._run.world.device.torch_device)
        # The stage's ranks hold the same entries; all of them come here at the start of their second step.
        broadcast(indices, self._groups["stage"], what="the order of gradients").wait()
        return [self._run.book.entries[index] for index in indices.tolist()]

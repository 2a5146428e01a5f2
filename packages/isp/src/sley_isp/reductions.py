"""Weight gradients on their way from full size to shards: buckets that are filled, and a queue of those under way.

lease ──> products written ──> sent and received ──> own rows summed ──> store.add ──> lease back
            `add`                in the background     `advance`, when all is here     `finish`, when the bound or
                                                                                       the end of a pass asks

Once per micro-batch a bucket leaves in the action that filled it. Once per step it stays, at full size, until the last
action that can add to it: fewer exchanges, for the memory of all full-size gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import REDUCE, checksum
from sley_core.api.parts import ALIGNMENT_BYTES, offsets
from sley_isp.buckets import Open
from sley_isp.units import padded, shard_of

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Work
    from sley_core.api.parts import Entry, GradientStore
    from sley_core.protocols import MemoryPool
    from sley_isp.buckets import GradientBucket
    from sley_isp.sites import Site

Write = Callable[[Tensor, bool], None]
"""Puts a gradient into a tensor of the store's dtype, or adds it there when the flag is set."""


class _Reduction(NamedTuple):
    work: Work
    owned: list[tuple[Entry, Tensor]]
    lease: ExitStack


class Reductions:
    """Sums gradients over `group` and adds this rank's rows to `store`, at most `bound` buckets' at a time.

    bound: 0 waits for each at once. once: buckets wait for the last action of the step that can add to them; `bound` then
    holds for those that have left. num_started, num_bytes, max_live, max_live_bytes: exchanges and what they sent; full-size
    gradients at most, the ones being written included, and the bytes of all buffers that were lent for them at one time,
    what comes from others among them; since the beginning.
    """

    def __init__(self, bound: int, store: GradientStore, pool: MemoryPool, group: Group, *, once: bool = False) -> None:
        self.bound = bound
        self.once = once
        self.store = store
        self.pool = pool
        self.group = group
        self.num_started = 0
        self.num_bytes = 0
        self.max_live = 0
        self.max_live_bytes = 0
        self._current: GradientBucket | None = None
        self._open: dict[GradientBucket, Open] = {}
        self._under_way: deque[_Reduction] = deque()
        self._live = 0
        self._live_bytes = 0

    def add(self, bucket: GradientBucket, site: Site, entry: Entry, write: Write) -> None:
        """`site` contributes to `entry`, a part of `bucket`, what `write` puts or adds into a full-size tensor."""
        self.advance()
        if bucket is not self._current:
            before = self._open.get(self._current) if self._current is not None else None
            if before is not None and self._may_leave(before.bucket) and (before.is_complete or not self.once):
                self._start(before)
            self._current = bucket
        filled = self._open.get(bucket) or self._opened(bucket)
        write(filled.wholes[entry][: entry.shape[0]], entry in filled.written)
        filled.written.add(entry)
        filled.came.add((site, entry))

    def flush(self, *, everything: bool = False) -> None:
        """Whatever may leave does: the action that filled it ends, or its only site has contributed.

        everything: outside of a step, where no contribution is known to be the last.
        """
        for filled in list(self._open.values()):
            if everything or self._may_leave(filled.bucket):
                self._start(filled)
            filled.came.clear()
        self._current = None

    def advance(self) -> None:
        """Sums what has come, the oldest first; stops at the first that is still on its way. Never blocks.

        A faster peer need not wait for this rank. The store is told in `finish` only, at the same place on all ranks: it may
        start other exchanges.
        """
        for reduction in self._under_way:
            if not reduction.work.test():
                return
            reduction.work.wait()

    def finish(self, left: int = 0) -> None:
        """Waits for the oldest until at most `left` are under way; each goes to the store."""
        while len(self._under_way) > left:
            reduction = self._under_way.popleft()
            reduction.work.wait()  # where this fails, a peer may still read the buffer, which is not lent again
            try:
                for entry, rows in reduction.owned:
                    self.store.add(entry, rows)
            finally:
                self._end(reduction)

    def forget(self) -> None:
        """Waits for all, and adds none: a step failed."""
        for filled in self._open.values():
            filled.lease.close()
        self._open.clear()
        self._current = None
        while self._under_way:
            self._end(self._under_way.popleft())
        self._live = 0

    def _may_leave(self, bucket: GradientBucket) -> bool:
        return not self.once or self.store.state.gradients_final(bucket.chunks)

    def _opened(self, bucket: GradientBucket) -> Open:
        if not self.once:
            self.finish(max(0, self.bound - 1))
        entries = [entry for entry in bucket.entries if entry.trainable]
        lease = ExitStack()
        wholes = self._lent([padded(entry) for entry in entries], lease)
        for entry, whole in zip(entries, wholes, strict=True):
            whole[entry.shape[0] :].zero_()
        filled = self._open[bucket] = Open(bucket, dict(zip(entries, wholes, strict=True)), lease)
        self._live += len(wholes)
        self.max_live = max(self.max_live, self._live)
        return filled

    def _start(self, filled: Open) -> None:
        """Sends the bucket off, whole on every rank, whatever each has written of it."""
        bucket = filled.bucket
        del self._open[bucket]
        if self.once:
            self.finish(max(0, self.bound - 1))
        wholes = filled.wholes
        for entry in wholes.keys() - filled.written:
            wholes[entry].zero_()  # another rank may have come by it, in a forward that depends on its data
        transport = self.group.transport(REDUCE)
        scratch = [(transport.num_scratch_rows(shard_of(entry).size), *entry.shape[1:]) for entry in wholes]
        received = self._lent(scratch, filled.lease)
        what = f"the gradients of {bucket.name}"
        contents = checksum(entry.name for entry in wholes)
        # The order of backwards, the same on all ranks of `wp`: they run the same actions on the same layers. Where the data
        # decides which modules run, and a bucket is less than a layer, the names in it tell the ranks that it did.
        work = transport.reduce_scatter(list(wholes.values()), received, what=what, contents=contents)
        owned = [(entry, self._own(entry, whole)) for entry, whole in wholes.items()]
        self._under_way.append(_Reduction(work, owned, filled.lease))
        self.num_started += 1
        self.num_bytes += sum(whole.nbytes for whole in wholes.values()) * (self.group.size - 1) // self.group.size
        self.finish(self.bound)

    def _lent(self, shapes: Sequence[tuple[int, ...]], lease: ExitStack) -> list[Tensor]:
        """Tensors of these shapes in one buffer of the pool, until `lease` ends; what is lent is counted until then."""
        starts, numel = offsets(shapes, ALIGNMENT_BYTES // self.store.dtype.itemsize)
        if numel:
            flat = lease.enter_context(self.pool.lease((numel,), self.store.dtype, self.store.device))
            self._live_bytes += flat.nbytes
            self.max_live_bytes = max(self.max_live_bytes, self._live_bytes)
            lease.callback(self._returned, flat.nbytes)
        else:
            flat = torch.empty(0, dtype=self.store.dtype, device=self.store.device)
        return [flat[start : start + prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=True)]

    def _end(self, reduction: _Reduction) -> None:
        reduction.work.wait_sent()
        reduction.lease.close()
        self._live -= len(reduction.owned)

    def _returned(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def _own(self, entry: Entry, whole: Tensor) -> Tensor:
        rows = shard_of(entry).size
        return whole[self.group.coord * rows : (self.group.coord + 1) * rows]

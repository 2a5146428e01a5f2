"""Weight gradients on their way from full size to shards: a queue with a bound, oldest first.

lease ──> product written ──> sent and received ──> own rows summed ──> store.add ──> lease back
          `start` returns here       in the background     `finish`, when the bound or the end of a pass asks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.comm.rows import Exchange, num_received, reduce_rows
from sley_core.engine.flat import ALIGNMENT_BYTES, offsets
from sley_isp.units import padded, shard_of

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.engine.book import Entry
    from sley_core.engine.store import GradientStore
    from sley_core.protocols import MemoryPool


class _Reduction(NamedTuple):
    exchange: Exchange
    owned: list[tuple[Entry, Tensor]]
    lease: ExitStack


class Reductions:
    """Sums gradients over `group` and adds this rank's rows to `store`, at most `bound` modules' at a time.

    bound: 0 waits for each at once. num_started, max_live: counted since the beginning; the latter includes the one that
    is being written.
    """

    def __init__(self, bound: int, store: GradientStore, pool: MemoryPool, group: Group) -> None:
        self.bound = bound
        self.store = store
        self.pool = pool
        self.group = group
        self.num_started = 0
        self.max_live = 0
        self._under_way: deque[_Reduction] = deque()

    def start(self, entries: Sequence[Entry], write: Callable[[list[Tensor]], None], what: str) -> None:
        """Reduces what `write` puts into full-size tensors, one per entry, of the store's dtype, without padding."""
        self.finish(max(0, self.bound - 1))
        lease = ExitStack()
        shapes = [padded(entry) for entry in entries]
        scratch = [(num_received(shard_of(entry).rows, self.group), *entry.shape[1:]) for entry in entries]
        starts, numel = offsets([*shapes, *scratch], ALIGNMENT_BYTES // self.store.dtype.itemsize)
        flat = lease.enter_context(self.pool.lease((numel,), self.store.dtype, self.store.device))
        views = [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(starts, [*shapes, *scratch], strict=True)
        ]
        wholes, received = views[: len(shapes)], views[len(shapes) :]
        for entry, whole in zip(entries, wholes, strict=True):
            whole[entry.shape[0] :].zero_()
        write([whole[: entry.shape[0]] for entry, whole in zip(entries, wholes, strict=True)])
        # The order of backwards, the same on all ranks of `wp`: they run the same actions on the same layers.
        exchange = reduce_rows(wholes, received, self.group, what=f"the gradients of {what}")
        owned = [(entry, self._own(entry, whole)) for entry, whole in zip(entries, wholes, strict=True)]
        self._under_way.append(_Reduction(exchange, owned, lease))
        self.num_started += 1
        self.max_live = max(self.max_live, len(self._under_way))
        self.finish(self.bound)

    def finish(self, left: int = 0) -> None:
        """Waits for the oldest until at most `left` are under way; each goes to the store."""
        while len(self._under_way) > left:
            exchange, owned, lease = self._under_way.popleft()
            exchange.wait()
            for entry, rows in owned:
                self.store.add(entry, rows)
            exchange.end()
            lease.close()

    def forget(self) -> None:
        """Waits for all, and adds none: a step failed."""
        while self._under_way:
            exchange, _, lease = self._under_way.popleft()
            exchange.end()
            lease.close()

    def _own(self, entry: Entry, whole: Tensor) -> Tensor:
        rows = shard_of(entry).rows
        return whole[self.group.coord * rows : (self.group.coord + 1) * rows]

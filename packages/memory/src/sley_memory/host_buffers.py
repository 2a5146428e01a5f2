"""Lends buffers on the host for what left the device: page-locked, allocated once, used again from step to step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.memory import DevicePool

if TYPE_CHECKING:
    from sley_core.api.comm import CopyStream, HostMemory
    from sley_memory.config import SizeClassesConfig

SPARE = 1.25
"""A free buffer up to this much larger than what is asked for is taken in its place, where lengths differ from step to step."""


def size_classes(config: SizeClassesConfig) -> DevicePool:
    """Returns a pool with as many sizes as `config` says."""
    return DevicePool(config.per_doubling)


class HostBuffers:
    """Lends buffers that `host_memory` makes, for copies of `stream`.

    budget_bytes: the most bytes lent at one time; None for no limit. num_allocations: since the beginning. num_lent_bytes,
    max_lent_bytes: requested and lent, now and at most. num_bytes: of all buffers, lent or free.

    A buffer may be returned while a copy from it is in flight: the next copy that writes it is on the same stream, after that
    one.
    """

    def __init__(self, host_memory: Callable[[int], HostMemory], stream: CopyStream, budget_bytes: int | None = None) -> None:
        self._host_memory = host_memory
        self._stream = stream
        self.budget_bytes = budget_bytes
        self.num_allocations = 0
        self.num_lent_bytes = 0
        self.max_lent_bytes = 0
        self.num_bytes = 0
        self._in_use_bytes = 0  # of whole buffers
        self._max_in_use_bytes = 0
        self._free: list[HostMemory] = []  # by size
        self._lent: dict[int, tuple[HostMemory, int]] = {}  # by id, with the bytes that were asked for

    def take(self, num_bytes: int) -> HostMemory | None:
        """Lends a buffer of at least `num_bytes` until `give`: a free one that is little larger, else a new one. Returns None,
        and lends nothing, if that would exceed the budget.
        """
        lent = self.num_lent_bytes + num_bytes
        if self.budget_bytes is not None and lent > self.budget_bytes:
            return None
        buffer = self._fitting(num_bytes) or self._new(num_bytes)
        self._lent[id(buffer)] = buffer, num_bytes
        self.num_lent_bytes = lent
        self.max_lent_bytes = max(self.max_lent_bytes, lent)
        self._in_use_bytes += buffer.num_bytes
        self._max_in_use_bytes = max(self._max_in_use_bytes, self._in_use_bytes)
        return buffer

    def give(self, buffer: HostMemory) -> None:
        """Takes a lent buffer back; the next that asks for about as much gets it."""
        _, num_bytes = self._lent.pop(id(buffer))
        self.num_lent_bytes -= num_bytes
        self._in_use_bytes -= buffer.num_bytes
        self._free.insert(bisect_left(self._free, buffer.num_bytes, key=_size), buffer)

    def begin(self) -> None:
        """Frees the smallest free buffers while more than twice of what was ever lent is held. Waits for copies if it frees.

        What lent buffers took at one time is never too much: each takes whole pages, so small ones take many times the bytes
        that were requested, and would be freed and allocated anew in every step.
        Called between steps: unlocking memory of the host may wait for all work of the device, and within a step that may
        include a receive whose sender waits for this rank.
        """
        count, rest = 0, self.num_bytes
        bound = max(2 * self.max_lent_bytes, self._max_in_use_bytes)
        while count < len(self._free) and rest > bound:
            rest -= self._free[count].num_bytes
            count += 1
        self._drop(count)

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns the bytes freed. Waits for copies."""
        return self._drop(len(self._free))

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every buffer, lent or free, as (name, uint8 tensor on the host)."""
        yield from ((f"lent.{number}", buffer.data) for number, (buffer, _) in enumerate(self._lent.values()))
        yield from ((f"free.{number}", buffer.data) for number, buffer in enumerate(self._free))

    def _fitting(self, num_bytes: int) -> HostMemory | None:
        """Removes and returns the smallest free buffer that holds `num_bytes` and is not much larger; None if there is none."""
        at = bisect_left(self._free, num_bytes, key=_size)
        if at == len(self._free) or self._free[at].num_bytes > max(num_bytes * SPARE, num_bytes + PAGESIZE):
            return None
        return self._free.pop(at)

    def _new(self, num_bytes: int) -> HostMemory:
        """Allocates a buffer of whole pages and returns it."""
        buffer = self._host_memory(-(-num_bytes // PAGESIZE) * PAGESIZE)  # whole pages, all of which can be lent again
        self.num_allocations += 1
        self.num_bytes += buffer.num_bytes
        return buffer

    def _drop(self, count: int) -> int:
        """Frees the `count` smallest free buffers, once copies are done; returns their bytes."""
        if not count:
            return 0
        self._stream.record().wait()  # copies may still read them
        num_bytes = sum(buffer.num_bytes for buffer in self._free[:count])
        del self._free[:count]
        self.num_bytes -= num_bytes
        return num_bytes


def _size(buffer: HostMemory) -> int:
    return buffer.num_bytes

"""Memory that is lent: on the host by `HostArena`, on the device by core's pool with the sizes that a plan asks for."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor

from sley_core.api.comm import HostMemory
from sley_core.api.memory import DevicePool, Moved
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_memory.config import SizeClassesConfig


def size_classes(config: SizeClassesConfig) -> DevicePool:
    """Returns a pool with as many sizes as `config` says."""
    return DevicePool(config.per_doubling)


@dataclass(eq=False)
class _Block:
    """memory: page-locked as long as it is referred to. moved: counts its bytes. num_spare: places that are not lent."""

    memory: HostMemory
    moved: Moved | None
    num_places: int
    num_spare: int = 0


class _Place(NamedTuple):
    size: int
    memory: Tensor
    block: _Block


class HostArena:
    """Lends page-locked memory of the host, which is allocated once and used again.

    make: makes page-locked memory of so many bytes. wait: waits, on the host, for all copies so far; called before memory is
    freed. budget: bytes that may be page-locked, None for no limit; what exceeds it is pageable, with one warning: copies of it
    take half as long again, and wait for the host. most_waste: how much larger than a request a lent place may be. frees:
    whether new memory replaces unused blocks; else only `trim` frees. num_bytes: of the host, in whole pages; num_lent_bytes,
    max_lent_bytes: of lent places, now and at most; num_allocations: since the beginning.

    A place may be given back while a copy from it is in flight: the next copy that writes it is on the same stream.
    """

    def __init__(
        self,
        make: Callable[[int], HostMemory],
        wait: Callable[[], None],
        budget: int | None = None,
        *,
        most_waste: float = inf,
        frees: bool = True,
    ) -> None:
        self._make = make
        self._wait = wait
        self._budget = budget
        self._most_waste = most_waste
        self._frees = frees
        self._has_warned = False
        self.num_allocations = self.num_bytes = self.num_lent_bytes = self.max_lent_bytes = 0
        self._blocks: list[_Block] = []
        self._spare: list[_Place] = []  # by size
        self._lent: dict[int, _Place] = {}  # by address

    def places(self, sizes: Sequence[int], moved: Moved | None = None) -> list[Tensor]:
        """Returns a place for each of `sizes`, in bytes above 0: uint8 [size], aligned to 256 bytes. Takes the smallest spare
        places that suffice; the rest lie side by side in one new block, which counts in `moved`.
        """
        places = [self._fitting(size) for size in sizes]
        if missing := [size for size, place in zip(sizes, places, strict=True) if place is None]:
            new = iter(self._side_by_side(missing, moved))
            places = [place or next(new) for place in places]
        lent = [place for place in places if place is not None]
        self._lent.update({place.memory.data_ptr(): place for place in lent})
        self.num_lent_bytes += sum(place.size for place in lent)
        self.max_lent_bytes = max(self.max_lent_bytes, self.num_lent_bytes)
        return [place.memory[:size] for place, size in zip(lent, sizes, strict=True)]

    def give(self, memory: Tensor) -> None:
        """Takes a place back."""
        place = self._lent.pop(memory.data_ptr())
        self.num_lent_bytes -= place.size
        place.block.num_spare += 1
        insort(self._spare, place, key=_size)

    def trim(self, num_bytes: int = 0) -> int:
        """Frees unused blocks, small ones first, until `num_bytes` are held, behind all copies; returns the bytes freed."""
        unused = sorted((block for block in self._blocks if block.num_spare == block.num_places), key=_num_bytes)
        freed = 0
        while unused and self.num_bytes > num_bytes:
            if not freed:
                self._wait()  # copies may still read them
            block = unused.pop(0)
            self._blocks.remove(block)
            self._spare = [place for place in self._spare if place.block is not block]
            freed += block.memory.num_bytes
            self.num_bytes -= block.memory.num_bytes
            if block.moved is not None:
                block.moved.host_bytes -= block.memory.num_bytes
        return freed

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every block as (name, uint8 tensor on the host)."""
        yield from ((f"host.{number}", block.memory.data) for number, block in enumerate(self._blocks))

    def _fitting(self, size: int) -> _Place | None:
        at = bisect_left(self._spare, size, key=_size)
        if at == len(self._spare) or self._spare[at].size > size * self._most_waste:
            return None
        place = self._spare.pop(at)
        place.block.num_spare -= 1
        return place

    def _side_by_side(self, sizes: Sequence[int], moved: Moved | None) -> list[_Place]:
        """Allocates a block, and returns its places."""
        if self._frees:  # memory whose size changes at each offload would else take more of the host each time
            self.trim()
        end = sum(round_up(size, ALIGNMENT_BYTES) for size in sizes)
        block = _Block(self._memory(end), moved, len(sizes))
        self._blocks.append(block)
        self.num_allocations += 1
        self.num_bytes += block.memory.num_bytes
        if moved is not None:
            moved.host_bytes += block.memory.num_bytes
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + round_up(size, ALIGNMENT_BYTES))
        return [_Place(size, block.memory.data[at : at + size], block) for at, size in zip(starts, sizes, strict=False)]

    def _memory(self, num_bytes: int) -> HostMemory:
        """Returns new memory, page-locked if the budget allows it, else pageable, with a warning the first time."""
        locked = num_bytes + sum(block.memory.num_bytes for block in self._blocks if block.memory.is_locked)
        if self._budget is None or locked <= self._budget:
            return self._make(num_bytes)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an offload needs {locked / 2**20:.0f} MiB of page-locked host memory, and `host_budget_mb` allows "
                f"{self._budget / 2**20:.0f}: the rest is pageable, and its copies are slower",
                RuntimeWarning,
                stacklevel=5,
            )
        return HostMemory(num_bytes, lock=False)


def _size(place: _Place) -> int:
    return place.size


def _num_bytes(block: _Block) -> int:
    return block.memory.num_bytes

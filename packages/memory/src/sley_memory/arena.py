"""Allocates reusable memory on the host."""

import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from sley_core.api.comm import HostMemory
from sley_core.api.memory import Moved
from sley_core.api.parts import ALIGNMENT_BYTES, round_up


@dataclass(eq=False)
class _Block:
    """A block of host memory, in slots. counters: the counters of its bytes, or None. num_free: the number of free slots."""

    memory: HostMemory
    counters: Moved | None
    num_slots: int
    num_free: int = 0


class _Slot(NamedTuple):
    """The part of `block` that one allocation uses. size: the number of bytes
    requested when the block was allocated. memory: a view of the part, uint8 [size].
    """

    size: int
    memory: Tensor
    block: _Block


class HostArena:
    """Allocates page-locked host memory in slots, which are reused after their release. A slot may be released while a copy
    from it is in flight, if the next copy that writes to the slot runs after that copy.

    allocate_host: allocates page-locked memory of a number of bytes. wait_for_copies: blocks the host until all copies so far
    are done; called before memory is freed. max_locked_bytes: memory beyond this limit is pageable, and the arena warns once.
    max_waste: the largest ratio of a reused slot's size to the size of the request. frees_unused: whether the arena frees
    unused blocks before it allocates a new block; otherwise only `trim` does. num_bytes: the size in bytes of all blocks, in
    whole pages. num_lent_bytes, max_lent_bytes: the current and the maximum size in bytes of used slots. num_allocations: the
    number of blocks allocated so far.
    """

    def __init__(
        self,
        allocate_host: Callable[[int], HostMemory],
        wait_for_copies: Callable[[], None],
        *,
        max_locked_bytes: float = inf,
        max_waste: float = inf,
        frees_unused: bool = True,
    ) -> None:
        self._allocate_host = allocate_host
        self._wait_for_copies = wait_for_copies
        self._max_locked_bytes = max_locked_bytes
        self._has_warned = False
        self._max_waste = max_waste
        self._frees_unused = frees_unused
        self.num_allocations = self.num_bytes = self.num_lent_bytes = self.max_lent_bytes = 0
        self._blocks: list[_Block] = []
        self._free_slots: list[_Slot] = []  # sorted by size
        self._used_slots: dict[int, _Slot] = {}  # keyed by address

    def allocate(self, sizes: Sequence[int], counters: Moved | None = None) -> list[Tensor]:
        """Returns memory for each of `sizes`, positive numbers of bytes: uint8 [size], aligned to 256 bytes. Reuses the
        smallest free slots that fit, and allocates one new block for all other sizes. Adds the size of this block to
        `counters`, if given.
        """
        free_slots = [self._pop_fitting_slot(size) for size in sizes]
        missing_sizes = [size for size, slot in zip(sizes, free_slots, strict=True) if slot is None]
        new_slots = iter(self._allocate_block(missing_sizes, counters) if missing_sizes else ())
        slots = [slot or next(new_slots) for slot in free_slots]
        self._used_slots.update({slot.memory.data_ptr(): slot for slot in slots})
        self.num_lent_bytes += sum(slot.size for slot in slots)
        self.max_lent_bytes = max(self.max_lent_bytes, self.num_lent_bytes)
        return [slot.memory[:size] for slot, size in zip(slots, sizes, strict=True)]

    def release(self, memory: Tensor) -> None:
        """Makes the slot of `memory`, which `allocate` returned, available again."""
        slot = self._used_slots.pop(memory.data_ptr())
        self.num_lent_bytes -= slot.size
        slot.block.num_free += 1
        insort(self._free_slots, slot, key=attrgetter("size"))

    def trim(self, num_bytes: int = 0) -> int:
        """Frees unused blocks, the smallest first, until the arena has at most `num_bytes` or no unused block. Returns the
        number of freed bytes. Waits for all copies before it frees the first block.
        """
        unused_blocks = [block for block in self._blocks if block.num_free == block.num_slots]
        unused_blocks.sort(key=lambda block: block.memory.num_bytes)
        num_freed_bytes = 0
        while unused_blocks and self.num_bytes > num_bytes:
            if not num_freed_bytes:
                self._wait_for_copies()  # copies may still read the blocks
            block = unused_blocks.pop(0)
            self._blocks.remove(block)
            self._free_slots = [slot for slot in self._free_slots if slot.block is not block]
            num_freed_bytes += block.memory.num_bytes
            self._count_bytes(-block.memory.num_bytes, block.counters)
        return num_freed_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every block as (name, uint8 tensor on the host)."""
        yield from ((f"host.{number}", block.memory.data) for number, block in enumerate(self._blocks))

    def _pop_fitting_slot(self, size: int) -> _Slot | None:
        """Removes and returns the smallest free slot for `size` bytes, or returns None if there is none within `max_waste`."""
        index = bisect_left(self._free_slots, size, key=attrgetter("size"))
        if index == len(self._free_slots) or self._free_slots[index].size > size * self._max_waste:
            return None
        slot = self._free_slots.pop(index)
        slot.block.num_free -= 1
        return slot

    def _allocate_block(self, sizes: Sequence[int], counters: Moved | None) -> list[_Slot]:
        """Returns the slots of a new block, one for each of `sizes`."""
        if self._frees_unused:  # else the arena would grow without limit if sizes change at each offload
            self.trim()
        starts = list(accumulate((round_up(size, ALIGNMENT_BYTES) for size in sizes), initial=0))
        block = _Block(self._allocate_memory(starts[-1]), counters, len(sizes))
        self._blocks.append(block)
        self.num_allocations += 1
        self._count_bytes(block.memory.num_bytes, counters)
        return [_Slot(size, block.memory.data[start : start + size], block) for start, size in zip(starts, sizes, strict=False)]

    def _allocate_memory(self, num_bytes: int) -> HostMemory:
        """Returns new memory, page-locked if the limit allows it. Otherwise, the memory is pageable; warns the first time."""
        num_locked_bytes = num_bytes + sum(block.memory.num_bytes for block in self._blocks if block.memory.is_locked)
        if num_locked_bytes <= self._max_locked_bytes:
            return self._allocate_host(num_bytes)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an offload needs {num_locked_bytes / 10**6:.0f} MB of page-locked memory, but `host_budget_mb` allows "
                f"{self._max_locked_bytes / 10**6:.0f} MB; the rest is pageable, so its copies are slower",
                RuntimeWarning,
                stacklevel=5,
            )
        return HostMemory(num_bytes, lock=False)

    def _count_bytes(self, difference: int, counters: Moved | None) -> None:
        """Adds `difference` to the byte counts of the arena and of `counters`."""
        self.num_bytes += difference
        if counters is not None:
            counters.host_bytes += difference

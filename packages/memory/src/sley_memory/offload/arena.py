"""Lends host memory for what is away: exact, page-locked up to a budget, and used again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.memory import HostMemory

if TYPE_CHECKING:
    from sley_core.api.memory import Moved

ALIGNMENT = 256
"""Bytes; where each place starts."""


def aligned(size: int) -> int:
    """Returns the bytes that a place of `size` takes: the next multiple of 256."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class _ArenaBlock:
    """memory: page-locked as long as it is referred to. moved: of the part that needed it. spare: places that nobody has."""

    memory: HostMemory
    moved: Moved
    num_places: int
    spare: list[Tensor] = field(default_factory=list)


class Arena:
    """Host memory of one offload manager. budget: bytes that may be page-locked; None for no limit.

    make: makes page-locked memory of so many bytes. What exceeds the budget is pageable, with one warning: copies of it take
    half as long again, and wait for the host. wait: waits, on the host, for all copies so far; called before memory is freed.
    """

    def __init__(self, make: Callable[[int], HostMemory], wait: Callable[[], None], budget: int | None = None) -> None:
        self._make = make
        self._wait = wait
        self._budget = budget
        self._has_warned = False
        self._blocks: list[_ArenaBlock] = []
        self._taken: dict[int, tuple[_ArenaBlock, Tensor]] = {}  # by address

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the host that it takes, in whole pages."""
        return sum(block.memory.num_bytes for block in self._blocks)

    def places(self, sizes: Sequence[int], moved: Moved) -> list[Tensor]:
        """Returns a place for each of `sizes`, in bytes above 0: uint8 [size], aligned to 256 bytes. Places that were given
        back are used first; the rest lie side by side in one new block, which counts in `moved`, and for which unused blocks
        are freed.
        """
        found = [self._spare(size) for size in sizes]
        if missing := [size for size, place in zip(sizes, found, strict=True) if place is None]:
            new = iter(self._side_by_side(missing, moved))
        return [(place if place is not None else next(new))[:size] for size, place in zip(sizes, found, strict=True)]

    def give(self, place: Tensor) -> None:
        """Takes a place back, for whoever asks next. Copies that read or write it come before those of its next owner, on the
        same streams.
        """
        block, whole = self._taken.pop(place.data_ptr())
        block.spare.append(whole)

    def _spare(self, size: int) -> Tensor | None:
        """Takes the smallest place of `size` or more that was given back and returns it, in full; None if there is none."""
        fitting = [(whole.numel(), at) for at, block in enumerate(self._blocks) for whole in block.spare]
        least, at = min(((numel, at) for numel, at in fitting if numel >= size), default=(0, -1))
        if at < 0:
            return None
        block = self._blocks[at]
        whole = block.spare.pop(next(n for n, one in enumerate(block.spare) if one.numel() == least))
        self._taken[whole.data_ptr()] = block, whole
        return whole

    def _side_by_side(self, sizes: Sequence[int], moved: Moved) -> list[Tensor]:
        """Allocates a block and returns its places. Frees blocks that nobody uses first: what changes its size at each offload
        would else take more of the host each time.
        """
        self._drop()
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += aligned(size)
        block = _ArenaBlock(self._memory(end), moved, len(sizes))
        self._blocks.append(block)
        moved.host_bytes += block.memory.num_bytes
        places = [block.memory.data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self._taken.update({place.data_ptr(): (block, place) for place in places})
        return places

    def _drop(self) -> None:
        """Frees the blocks all of whose places were given back."""
        unused = [block for block in self._blocks if len(block.spare) == block.num_places]
        if unused:
            self._wait()  # copies may still read them
        for block in unused:
            self._blocks.remove(block)
            block.moved.host_bytes -= block.memory.num_bytes

    def _memory(self, num_bytes: int) -> HostMemory:
        """Returns new memory of the host, page-locked if the budget allows it, else pageable, with a warning the first time."""
        locked = sum(block.memory.num_bytes for block in self._blocks if block.memory.is_locked)
        if self._budget is None or locked + num_bytes <= self._budget:
            return self._make(num_bytes)
        self._warn(locked + num_bytes, self._budget)
        return HostMemory(num_bytes, lock=False)

    def _warn(self, wanted: int, budget: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"what is to leave the device needs {wanted / 2**20:.0f} MiB of page-locked host memory, and `host_budget_mb` "
                f"allows {budget / 2**20:.0f}: the rest is pageable, and its copies are slower",
                RuntimeWarning,
                stacklevel=5,
            )

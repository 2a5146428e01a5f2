"""Host memory for what is away: exact, allocated once, page-locked up to a budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from sley_core.api.memory import HostMemory

ALIGNMENT = 256
"""Bytes; where each piece starts."""


class Arena:
    """Host memory of one offload manager. budget: bytes that may be page-locked; None for no limit.

    make: makes page-locked memory of so many bytes. What exceeds the budget is pageable, with one warning: copies of it take
    half as long again, and wait for the host.
    """

    def __init__(self, make: Callable[[int], HostMemory], budget: int | None = None) -> None:
        self._make = make
        self._budget = budget
        self._has_warned = False
        self._blocks: list[HostMemory] = []  # each is page-locked as long as it is referred to

    @property
    def num_bytes(self) -> int:
        """Bytes of the host that it takes, in whole pages."""
        return sum(block.num_bytes for block in self._blocks)

    def places(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns a place for each of `sizes`, in bytes: uint8 [size], side by side in one new block, each aligned."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        block = self._block(end)
        return [block.data[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _block(self, num_bytes: int) -> HostMemory:
        locked = sum(block.num_bytes for block in self._blocks if block.is_locked)
        if self._budget is not None and locked + num_bytes > self._budget:
            self._warn(locked + num_bytes, self._budget)
            block = HostMemory(num_bytes, lock=False)
        else:
            block = self._make(num_bytes)
        self._blocks.append(block)
        return block

    def _warn(self, wanted: int, budget: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"what is to leave the device needs {wanted / 2**20:.0f} MiB of page-locked host memory, and `host_budget_mb` "
                f"allows {budget / 2**20:.0f}: the rest is pageable, and its copies are slower",
                RuntimeWarning,
                stacklevel=4,
            )

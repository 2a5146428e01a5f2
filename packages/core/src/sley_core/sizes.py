"""Arithmetic of sizes: rounding up, and filling runs up to a cap. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

ALIGNMENT_BYTES = 256
"""Where every view of a buffer starts: suits vector loads and NCCL's copy paths, and equals the CUDA allocator's."""

Item = TypeVar("Item")


def round_up(size: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def split_by_size(items: Iterable[Item], size_of: Callable[[Item], float], cap: float) -> list[list[Item]]:
    """Returns `items` in their order, in as few runs of at most `cap` as that order allows; a larger item has its own run."""
    runs: list[list[Item]] = []
    room = -1.0
    for item in items:
        size = size_of(item)
        if not runs or size > room:
            runs.append([])
            room = cap
        runs[-1].append(item)
        room -= size
    return runs

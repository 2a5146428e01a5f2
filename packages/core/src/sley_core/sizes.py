"""Arithmetic of sizes: rounding up, and splitting into parts of a maximum size. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

ALIGNMENT_BYTES = 256
"""The alignment of views in a buffer, the same as that of the CUDA allocator. It allows vector loads and NCCL's fast copies."""

Item = TypeVar("Item")


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def split_by_size(items: Iterable[Item], size_of: Callable[[Item], float], cap: float) -> list[list[Item]]:
    """Splits `items`, in their order, into parts with a total size of at most `cap`. A larger item is a part by itself."""
    parts: list[list[Item]] = []
    remaining = -1.0
    for item in items:
        size = size_of(item)
        if not parts or size > remaining:
            parts.append([])
            remaining = cap
        parts[-1].append(item)
        remaining -= size
    return parts

"""Cuts gradients into buckets: pure, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def fill(items: Iterable[Item], num_bytes: Callable[[Item], int], cap_bytes: float) -> list[list[Item]]:
    """Returns `items` in their order, cut into as few buckets of at most `cap_bytes` as that order allows. num_bytes: of an
    item.

    An item larger than the cap gets a bucket of its own. Nothing is split, reordered or dropped.
    """
    buckets: list[list[Item]] = []
    room = -1.0
    for item in items:
        size = num_bytes(item)
        if size > room:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(item)
        room -= size
    return buckets

"""Repetitions that take the same memory again and again, of which few are enough while bytes are estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_counters: list[Callable[[], int]] = []


def alike(pieces: Iterable[T]) -> Iterator[T]:
    """Yields `pieces`, each of which takes the same operations on the same shapes; the last may be smaller.

    While bytes are estimated, only until one leaves the memory as the one before it did: from then on nothing new is seen.
    """
    before = None
    for piece in pieces:
        yield piece
        if _counters:
            now = _counters[-1]()
            if now == before:
                return
            before = now


@contextmanager
def counted(in_use: Callable[[], int]) -> Iterator[None]:
    """Within the block bytes are estimated, and nothing else. in_use: returns the bytes that are there."""
    _counters.append(in_use)
    try:
        yield
    finally:
        _counters.pop()

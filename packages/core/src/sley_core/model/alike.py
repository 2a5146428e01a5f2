"""Shortens repetitions that use the same memory each time, while bytes are estimated: a few of them are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_counters: list[Callable[[], int]] = []


def alike(pieces: Iterable[T]) -> Iterator[T]:
    """Yields `pieces`, each of which runs the same operations on the same shapes; the last may be smaller.

    While bytes are estimated (`counted`), stops once a piece leaves as many bytes in use as the one before: later ones add
    nothing.
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
    """Returns a context manager in which bytes are estimated, and nothing else is. in_use: returns the number of bytes in
    use.
    """
    _counters.append(in_use)
    try:
        yield
    finally:
        _counters.pop()

"""Tells what tensors without values stand for, while an estimate takes a run's steps with such tensors on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

PLAIN: set[type] = {Tensor}
"""The types of plain tensors. While bytes are estimated it includes fake tensors, which stand for plain ones."""

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)
_counters: list[Callable[[], int]] = []


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: neither a parameter nor of a subclass with behaviour of its own."""
    return type(tensor) in PLAIN


def device_kind(tensor: Tensor) -> str:
    """Returns the type of the device on which a run computes with `tensor`, such as "cpu" or "cuda": its own, or that for which
    it stands.
    """
    return _stands_for.get() or tensor.device.type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Within the block all tensors of this thread stand for some of a device of this type."""
    before = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(before)


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

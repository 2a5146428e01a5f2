"""`process_vm_readv` and `process_vm_writev` of Linux: copies between the memory of two processes of one user.

The field calls it cross-memory attach (CMA).
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MOST_SPANS = 1024
"""IOV_MAX of Linux: more in one call are refused."""

MOST_BYTES = 1 << 30
"""Copied by one call. Linux moves 2 GiB less a page at most (MAX_RW_COUNT), and says so only by what it returns."""


class MemorySpan(NamedTuple):
    """`num_bytes` bytes of some process at `address`."""

    address: int
    num_bytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _function(name: str) -> Any:
    """Returns a function of the C library by its name; None where it has none such."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = ctypes.c_ssize_t
    return function


_readv = _function("process_vm_readv")
_writev = _function("process_vm_writev")


def read(pid: int, here: Sequence[MemorySpan], there: Sequence[MemorySpan]) -> int:
    """Copies `there`, of process `pid`, into `here`, as long; returns the bytes copied, or -1 if it may not. Holds no GIL."""
    return _copy(_readv, pid, here, there)


def write(pid: int, here: Sequence[MemorySpan], there: Sequence[MemorySpan]) -> int:
    """Copies `here` into `there`, of process `pid`, span after span; returns the bytes copied, or -1 if it may not. Holds no
    GIL.
    """
    return _copy(_writev, pid, here, there)


def _copy(function: Any, pid: int, here: Sequence[MemorySpan], there: Sequence[MemorySpan]) -> int:
    """Calls `function` as often as Linux's limits need; returns the bytes copied, or -1 if a call fails or there is no
    `function`.
    """
    if function is None:
        return -1
    copied = 0
    for some, others in _calls(here, there):
        own, foreign = _vectors(some), _vectors(others)
        num_bytes = int(function(pid, own, len(own), foreign, len(foreign), 0))
        if num_bytes < 0:
            return -1
        copied += num_bytes
    return copied


def _calls(
    here: Sequence[MemorySpan], there: Sequence[MemorySpan]
) -> Iterator[tuple[Sequence[MemorySpan], Sequence[MemorySpan]]]:
    """Yields the same copies, as many at a time as one call takes: all at once if they fit; else in pairs of spans of one
    length, which are cut where they must be.
    """
    if len(there) <= MOST_SPANS and len(here) <= MOST_SPANS and sum(span.num_bytes for span in there) <= MOST_BYTES:
        yield here, there
        return
    some: list[MemorySpan] = []
    others: list[MemorySpan] = []
    room = MOST_BYTES
    for own, foreign in zip(here, there, strict=True):
        assert own.num_bytes == foreign.num_bytes, f"{own} for {foreign}"
        done = 0
        while done < own.num_bytes:
            if not room or len(some) == MOST_SPANS:
                yield some, others
                some, others, room = [], [], MOST_BYTES
            size = min(own.num_bytes - done, room)
            some.append(MemorySpan(own.address + done, size))
            others.append(MemorySpan(foreign.address + done, size))
            done += size
            room -= size
    yield some, others


def _vectors(spans: Sequence[MemorySpan]) -> ctypes.Array[_Vector]:
    """Returns spans in the form that Linux's calls take."""
    return (_Vector * len(spans))(*(_Vector(*span) for span in spans))

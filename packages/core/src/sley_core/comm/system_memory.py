"""`process_vm_readv` and `process_vm_writev` of Linux: copies between the memory of two processes of one user."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_SPANS = 1024
"""IOV_MAX of Linux: more in one call are refused."""


class Span(NamedTuple):
    """`num_bytes` bytes of some process at `address`."""

    address: int
    num_bytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _function(name: str) -> Any:
    """None where the C library has no such function."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = ctypes.c_ssize_t
    return found


_readv = _function("process_vm_readv")
_writev = _function("process_vm_writev")


def read(pid: int, here: Sequence[Span], there: Sequence[Span]) -> int:
    """Copies `there`, of process `pid`, into `here`, as long; returns how many bytes, or -1 if it may not. Holds no GIL."""
    return _copy(_readv, pid, here, there)


def write(pid: int, here: Sequence[Span], there: Sequence[Span]) -> int:
    """Copies `here` into `there`, of process `pid`, span after span; returns as `read` does."""
    return _copy(_writev, pid, here, there)


def _copy(function: Any, pid: int, here: Sequence[Span], there: Sequence[Span]) -> int:
    if function is None:
        return -1
    copied = 0
    for first in range(0, len(there), MOST_SPANS):
        own, others = _vectors(here[first : first + MOST_SPANS]), _vectors(there[first : first + MOST_SPANS])
        num_bytes = int(function(pid, own, len(own), others, len(others), 0))
        if num_bytes < 0:
            return -1
        copied += num_bytes
    return copied


def _vectors(spans: Sequence[Span]) -> ctypes.Array[_Vector]:
    return (_Vector * len(spans))(*(_Vector(*span) for span in spans))

"""Spares a process work that a run does not need: the collector of reference cycles, and memory that glibc gives back.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disable_gc() -> Iterator[None]:
    """Turns the garbage collector off within the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

_TUNING_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables that glibc reads for the same purpose."""

_NEVER = -1
_MAX_MMAP_THRESHOLD = 32 << 20
"""The largest block that glibc can be told to allocate from its heap, on 64 bits; it maps larger ones."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory of this process from now on; returns whether it did. Does nothing if the environment
    tunes malloc already, or with another C library.

    Else glibc maps the large blocks of each step anew, or returns the top of its heap to the system: thousands of page faults,
    up to 4 % of a step's time (docs/measurements.md).
    """
    if any(name in os.environ for name in _TUNING_VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))

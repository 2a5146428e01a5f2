"""Keeps freed memory in the process. Imports no torch."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

_TUNING_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""The environment variables that tune glibc's malloc."""

_NEVER = -1
_MAX_MMAP_THRESHOLD = 32 << 20
"""The largest threshold that glibc accepts on 64-bit systems. It maps larger blocks in any case."""


def keep_freed_memory() -> bool:
    """Makes glibc keep the freed memory of this process; returns whether this succeeded. Does nothing if the environment tunes
    malloc, or with another C library.

    By default glibc maps the large blocks of each step again, or returns the top of its heap to the system. This causes
    thousands of page faults, up to 4 % of a step's time (docs/measurements.md).
    """
    if any(name in os.environ for name in _TUNING_VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))

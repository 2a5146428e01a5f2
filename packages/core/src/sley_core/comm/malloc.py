"""Memory that a step frees stays with the process, for the next step: glibc would give it back and fetch it anew, zeroed.

A backward frees what the forward kept, megabytes at a time. glibc's malloc maps large blocks one by one, or returns the top
of its heap to the system when enough of it is free, so every step pays for thousands of page faults: up to 7 % of its time
(docs/measurements.md). A step needs next time what it needed this time, so nothing is lost by keeping it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

_TUNED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables that glibc reads for the same purpose."""

_NEVER = -1
_MOST_BYTES = 32 << 20
"""The largest block that glibc can be told to take from its heap, on 64 bits; larger ones it maps."""


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Tells glibc to keep what is freed; returns whether it did. For the whole process, and what it maps from now on.

    Whoever tunes malloc is left alone: nothing is done where the environment says what to keep, nor with another C library.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in _TUNED) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))

"""Measures the most memory that this process has held on its device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

STATUS, STATM = Path("/proc/self/status"), Path("/proc/self/statm")


def memory_mb(device: torch.device) -> float:
    """Returns the peak in MiB: of torch's allocations on a CUDA device, of this process's resident set on a CPU.

    The resident set includes everything: torch's libraries (some 200 MiB), threads' stacks, mapped files.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resident_mb()


def resident_mb() -> float:
    """Returns the largest resident set of this process, in MiB.

    From /proc if there is one: getrusage would report the parent's peak if that was higher at the fork.
    """
    try:
        status = STATUS.read_bytes()
        return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) / 2**10
    except (OSError, IndexError):
        return _resource_mb()


def private_mb() -> float:
    """Returns the memory that this process holds now for itself alone, in MiB: without mapped files, of which more is resident
    the more is read. 0 where the kernel does not tell.
    """
    try:
        _, resident, shared, *_ = STATM.read_bytes().split(maxsplit=3)
    except (OSError, ValueError):
        return 0.0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _resource_mb() -> float:
    """Returns the largest resident set of this process in MiB, as getrusage tells it."""
    import resource  # there is none on Windows

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit

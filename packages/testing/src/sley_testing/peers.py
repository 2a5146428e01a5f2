"""Tells whether processes of this user may read each other's memory here, which tests of that need."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def can_read_peers() -> bool:
    """Returns whether sley-cma is installed and a process may read another of this user: on x86-64 Linux, unless Yama lets
    parents only; root may in any case.
    """
    if find_spec("sley_cma") is None or platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    return os.geteuid() == 0 or not YAMA.exists() or YAMA.read_text("ascii").strip() == "0"


ATTACHES = (
    pytest.param(True, marks=pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")),
    False,
)
"""Cases of a test with and without `[parallel] cross_memory_attach`."""

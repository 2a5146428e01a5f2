"""Peak memory of a piece of work: live tensor bytes, and the process's high-water mark above the state after imports.

Each contestant is measured alone, in processes made for it.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch

from protocol import Step
from sley_core.metrics.memory import resident_mb
from sley_core.testing.live_bytes import memory_profile, peak_bytes


def peak_live_mb(work: Step) -> float:
    """MiB of tensors that were alive at once during `work`, construction included if it constructs."""
    torch.set_num_threads(1)
    with memory_profile() as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return peak_bytes(path) / 2**20


def peak_resident_mb(work: Step) -> float:
    """MiB by which `work` raises the high-water mark of this process's resident memory."""
    torch.set_num_threads(1)
    gc.collect()
    before = resident_mb()
    work()
    return resident_mb() - before

"""Peak memory of a piece of work: live tensor bytes, and the process's high-water mark above the state after imports.

Each contestant is measured alone, in processes made for it.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from protocol import Step
from sley_core.metrics.memory import resident_mb


def peak_live_mb(work: Step) -> float:
    """MiB of tensors that were alive at once during `work`, construction included if it constructs."""
    torch.set_num_threads(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return peak_of(json.loads(path.read_text())["traceEvents"]) / 2**20


def peak_of(events: Iterable[Mapping[str, Any]]) -> int:
    """The most bytes that were live at once, by address.

    The profiler's own sum does not see what gloo's threads free; by address, the next user of a place takes it over.
    """
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        place, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        total -= live.pop(place, 0)
        if num_bytes > 0:
            live[place] = num_bytes
            total += num_bytes
        peak = max(peak, total)
    return peak


def peak_resident_mb(work: Step) -> float:
    """MiB by which `work` raises the high-water mark of this process's resident memory."""
    torch.set_num_threads(1)
    gc.collect()
    before = resident_mb()
    work()
    return resident_mb() - before

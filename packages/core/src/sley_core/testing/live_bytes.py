"""The most tensor bytes that were alive at once, from a trace of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def memory_profile() -> torch.profiler.profile:
    """A profile of what is allocated and freed on the host, from `start` to `stop` or within a `with`."""
    # Of one cycle, so that nothing accumulates: without it torch 2.11 warns that the cycles before are dropped.
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def peak_bytes(trace: Path) -> int:
    """The peak in a trace that `export_chrome_trace` wrote of a `memory_profile`, by address.

    The profiler's own sum does not see what gloo's threads free; by address, the next user of a place takes it over.
    """
    events: list[dict[str, Any]] = json.loads(trace.read_text("utf-8"))["traceEvents"]
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

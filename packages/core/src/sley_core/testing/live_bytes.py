"""The most tensor bytes that were alive at once, from a trace of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def peak_bytes(trace: Path) -> int:
    """The peak in a trace that `export_chrome_trace` wrote of a profile with `profile_memory=True`, by address.

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

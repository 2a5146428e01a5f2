"""Timelines in the Chrome trace format, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sley_core.actions.costs import Timeline

MICROSECONDS = 1e6


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Returns JSON text: each of `timelines` is a process of that name, each of its stages a thread."""
    events: list[dict[str, Any]] = []
    for number, (title, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        for stage in range(timeline.stages):
            name = {"name": f"stage {stage}"}
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": stage, "args": name})
        for span in timeline.spans:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "pid": number,
                    "tid": span.stage,
                    "ts": span.start_s * MICROSECONDS,
                    "dur": (span.end_s - span.start_s) * MICROSECONDS,
                    "args": {"chunk": action.chunk, "micro": action.micro},
                }
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

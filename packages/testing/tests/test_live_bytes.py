"""What is read of the profiler's memory events is what its own trace has."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sley_testing.live_bytes import allocations, memory_profile, peak_bytes

SIDE = 300


def test_events_are_those_of_the_trace_that_the_profiler_writes(tmp_path: Path) -> None:
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    with memory_profile() as profile:
        for _ in range(2):
            (weight @ weight).exp().sum().backward()
    profile.results.save(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    told = sorted((one for one in events if one.get("name") == "[memory]"), key=lambda one: one["ts"])
    found = [(one.address, one.num_bytes) for one in allocations(profile)]
    assert found == [(one["args"]["Addr"], one["args"]["Bytes"]) for one in told]
    assert len(found) > 10


def test_the_peak_is_what_was_there_at_once() -> None:
    """Two of three tensors at a time, above what was there before."""
    before = torch.ones(SIDE, SIDE)
    with memory_profile() as profile:
        one, other = torch.ones(SIDE), torch.ones(2 * SIDE)
        del one
        third = before[0, : SIDE // 2].clone()
    assert peak_bytes(profile) == 3 * SIDE * 4, (other.shape, third.shape)

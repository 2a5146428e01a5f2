"""`[profile] steps` leaves one Chrome trace per rank, of those steps and no other."""

from __future__ import annotations

import json

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict


def train(tables, own, folder, num_steps):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world, folder=folder) as run:
        for _ in range(num_steps):
            run.step()


def num_steps_in(path):
    """How many optimizer steps a trace holds; torch marks them."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#SGD.step" and event["ph"] == "X" for event in events)


@pytest.mark.parametrize(("steps", "taken", "recorded"), [([1, 2], 3, 2), ([2, 3], 2, 1), ([3, 3], 2, None)])
def test_the_steps_that_are_asked_for_as_far_as_the_run_gets(own, small, tmp_path, steps, taken, recorded):
    train(small(profile={"steps": steps}), own, tmp_path, taken)
    traces = [path.name for path in tmp_path.glob("trace*")]
    assert traces == ([] if recorded is None else ["trace-rank0.json"])
    if recorded is not None:
        assert num_steps_in(tmp_path / "trace-rank0.json") == recorded

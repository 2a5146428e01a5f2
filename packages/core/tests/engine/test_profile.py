"""torch's profile of some steps of a run, with the actions of each step by name."""

from __future__ import annotations

import json

import pytest

from sley_core.actions.action import sequential
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict


@pytest.mark.parametrize(("steps", "taken", "recorded"), [([1, 2], 3, 2), ([2, 3], 2, 1), ([3, 3], 2, None)])
def test_the_steps_that_are_asked_for_as_far_as_the_run_gets(own, small, tmp_path, steps, taken, recorded):
    """torch marks optimizer steps in a trace."""
    plan = plan_from_dict(small(profile={"steps": steps}), own)
    with World.join("cpu") as world, assemble(plan, world, folder=tmp_path) as run:
        for _ in range(taken):
            run.step()
    traces = [path.name for path in tmp_path.glob("trace*")]
    assert traces == ([] if recorded is None else ["trace-rank0.json"])
    if recorded is not None:
        events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "Optimizer.step#SGD.step" and event["ph"] == "X" for event in events) == recorded
        actions = [str(action) for action in sequential(plan.num_micros(run.topology))]
        names = [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if event["ph"] == "X"]
        assert [name for name in names if name in actions] == actions * recorded

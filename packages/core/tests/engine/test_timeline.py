"""One step of a run is drawn: every action of its list, in order, where it ran, beside the same list simulated."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from sley_core.actions.action import sequential
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict


def train(tables, own, folder, num_steps):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world, folder=folder) as run:
        for _ in range(num_steps):
            run.step()


def spans(path):
    """{timeline: {stage: [(name, start, end)]}} of a Chrome trace, in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = {name: {} for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            row = found[names[event["pid"]]].setdefault(event["tid"], [])
            row.append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_step_without_a_pipeline(own, small, tmp_path):
    train(small(timeline={"step": 2}), own, tmp_path, 3)
    measured, predicted = spans(tmp_path / "timeline.json").values()
    (rows,) = measured.values()
    assert [name for name, _, _ in rows] == [str(action) for action in sequential(len(rows) // 2)]
    for _, start, end in rows:
        assert 0 < start < end
    for (_, _, end), (_, start, _) in pairwise(rows):
        assert end <= start
    assert list(predicted) == [0]
    assert predicted[0][0][1] == 0, "a simulated step waits for nothing"
    assert next(iter(spans(tmp_path / "timeline.json"))) == "measured, step 2"


@pytest.mark.parametrize(("step", "drawn"), [(2, 4), (3, 3)])
def test_a_run_that_goes_on_behind_the_step_draws_its_second_one(own, small, tmp_path, step, drawn):
    """A run that was brought to its next machines has other times: nothing was drawn there, and nothing said."""
    with World.join("cpu") as world, assemble(plan_from_dict(small(), own), world) as run:
        for _ in range(2):
            run.step()
        run.save_checkpoint(tmp_path / "saved")
    tables = small(timeline={"step": step}, run={**small()["run"], "steps": 4})
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world, folder=tmp_path) as run:
        run.load_checkpoint(tmp_path / "saved")
        run.train()
    assert next(iter(spans(tmp_path / "timeline.json"))) == f"measured, step {drawn}"


def test_a_step_beyond_the_run_is_refused(own, small):
    steps = small()["run"]["steps"]
    with pytest.raises(PlanError, match=f"so step {steps + 1} cannot be drawn"):
        train(small(timeline={"step": steps + 1}), own, None, 1)


@pytest.mark.parametrize(("steps", "taken", "recorded"), [([1, 2], 3, 2), ([2, 3], 2, 1), ([3, 3], 2, None)])
def test_the_steps_that_are_asked_for_as_far_as_the_run_gets(own, small, tmp_path, steps, taken, recorded):
    """torch marks optimizer steps in a trace."""
    train(small(profile={"steps": steps}), own, tmp_path, taken)
    traces = [path.name for path in tmp_path.glob("trace*")]
    assert traces == ([] if recorded is None else ["trace-rank0.json"])
    if recorded is not None:
        events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "Optimizer.step#SGD.step" and event["ph"] == "X" for event in events) == recorded

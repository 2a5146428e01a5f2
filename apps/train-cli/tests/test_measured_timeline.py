"""After a run with a pipeline its folder shows one measured step of all ranks beside the predicted one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.load import load_plan

pytestmark = pytest.mark.timeout(180)

PIPELINE = """\
[parallel]
dp = 1
pp = 2

[pipeline]
use = "pp.zero_bubble_h1"
"""


def spans(trace: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The actions of each timeline and stage, by start."""
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, dict[int, list[dict[str, Any]]]] = {name: defaultdict(list) for name in names.values()}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        found[names[event["pid"]]][event["tid"]].append(event)
    return found


def test_the_fifth_step_of_two_stages(together: Callable[..., Any], plan: Path, folder: Path) -> None:
    text = plan.read_text("utf-8").partition("[parallel]")[0] + PIPELINE
    plan.write_text(text.replace("steps = 4", "steps = 6").replace("num_layers = 1", "num_layers = 2"), "utf-8")
    result = together(2, "run", plan)
    assert result.code == 0, result.err
    run = folder / "runs" / "small"
    assert load_plan(run / "plan.toml").timeline.step == 5  # type: ignore[union-attr]
    measured, predicted = spans(run / "timeline.json").values()
    for stage in range(2):
        # What is predicted is what ran: the same actions in the same order.
        assert [each["name"] for each in measured[stage]] == [each["name"] for each in predicted[stage]]
        assert sorted(each["name"] for each in measured[stage]) == [f"{kind}0.{m}" for kind in "FIW" for m in range(4)]
        for before, after in pairwise(measured[stage]):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    ends = {(stage, each["name"]): each["ts"] + each["dur"] for stage in range(2) for each in measured[stage]}
    for micro in range(4):
        starts = {(stage, each["name"]): each["ts"] for stage in range(2) for each in measured[stage]}
        assert ends[0, f"F0.{micro}"] < starts[1, f"F0.{micro}"]
        assert ends[1, f"I0.{micro}"] < starts[0, f"I0.{micro}"]
    picture = (run / "timeline.svg").read_text("utf-8")
    assert picture.count("<g><title>") == 2 * 2 * 12
    assert "measured, step 5" in picture
    assert "predicted" in picture


def test_a_plan_says_which_step(cli: Callable[..., Any], plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8") + "\n[timeline]\nstep = 9\n", "utf-8")
    result = cli("check", plan)
    assert result.code == 3
    assert "so step 9 cannot be drawn" in result.err

"""A run that times layers cuts its pipeline by them, and a profile has the actions of each stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record

SLOW_S = 0.02
"""Long against what a busy core wakes late."""
PLAN = {
    "run": {"name": "measured", "steps": 3, "device": "cpu"},
    "model": {"factory": "dozing:layers", "options": {"seconds": [SLOW_S, SLOW_S, SLOW_S, 3 * SLOW_S], "dropout": 0.1}},
    "data": {"factory": "dozing:Samples"},
    "loss": {"factory": "dozing:SumOfSquares"},
    "batch": {"global_size": 2, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "parallel": {"pp": 2, "dp": 1},
    "pipeline": {"use": "pp.one_f_one_b"},
    "partition": {"use": "pp.measured"},
}


def seen(plan):
    """The layers of this rank, the costs in the resolved plan, and what three steps did."""
    found = []

    def prepare(run):
        found.extend([[layer.name for layer in run.layers], run.resolved_plan.partition.config.layer_costs])

    return record(plan, 3, prepare=prepare), *found


@pytest.mark.flaky(reruns=2)  # a busy machine makes layers slower, never faster
def test_slow_layers_count_for_what_they_take_and_timing_leaves_no_trace(ranks):
    """Weights, random states and modules are as in a plan that has the same costs, and measures nothing."""
    measured = ranks(2)(seen, PLAN)
    (_, first, costs), (_, second, others) = measured
    assert costs == others
    assert [round(cost / SLOW_S / 3) for cost in costs] == [1, 1, 1, 3]  # F, I and W
    assert (len(first), len(second)) == (3, 1)
    written = changed(PLAN, partition={"use": "pp.measured", "layer_costs": (1.0, 1.0, 1.0, 3.0)})
    for (one, *_), (other, *_) in zip(measured, ranks(2)(seen, written), strict=True):
        assert [row["loss"] for row in one.rows] == [row["loss"] for row in other.rows]
        assert_same_bits(one.first, other.first)
        assert_same_bits(one.weights, other.weights)


def fails(plan):
    with pytest.raises((RunError, ValueError)) as caught:
        record(plan, 1)
    return type(caught.value).__name__, str(caught.value)


def test_what_a_layer_raises_is_told_on_every_rank(ranks):
    first, second = ranks(2)(fails, changed(PLAN, model__options={"seconds": [0.0] * 3, "picky": True}))
    assert first == ("ValueError", "this layer takes nothing")
    assert second[0] == "RunError"
    assert "rank 0 could not time the layers: ValueError: this layer takes nothing" in second[1]


pytestmark = pytest.mark.timeout(180)


TIMED = """\
[parallel]
dp = 1
pp = 2

[pipeline]
use = "pp.zero_bubble_h1"

[profile]
steps = [3, 3]
"""


def test_a_profile_of_two_stages_has_the_actions_of_each(together: Callable[..., Any], plan: Path, folder: Path) -> None:
    """In the order of the list, one after the other."""
    text = plan.read_text("utf-8").partition("[parallel]")[0] + TIMED
    plan.write_text(text.replace("num_layers = 1", "num_layers = 2"), "utf-8")
    result = together(2, "run", plan)
    assert result.code == 0, result.err
    run = folder / "runs" / "small"
    resolved = load_plan(run / "plan.toml")
    assert resolved.pipeline is not None
    lists = resolved.pipeline.build().lists(2, 4)
    for stage in range(2):
        events = json.loads((run / f"trace-rank{stage}.json").read_text("utf-8"))["traceEvents"]
        names = [str(action) for action in lists[stage]]
        actions = sorted((one for one in events if one["name"] in names), key=lambda one: one["ts"])
        assert [one["name"] for one in actions] == names
        for before, after in pairwise(actions):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_layers_are_not_timed_on_slices_of_sequences() -> None:
    """A rank has a slice, and the timer calls layers on whole sequences. Costs that the plan gives need no timer."""
    tables = small_plan(model__num_layers=2, model__heads=2, parallel={"sp": 2, "pp": 2, "dp": 1})
    tables |= {"sequence": {"use": "isp.all_to_all"}, "pipeline": {"use": "pp.one_f_one_b"}}
    tables |= {"partition": {"use": "pp.measured"}, "data": {"use": "data.text", "source": "python-stdlib", "sequence": 24}}
    assert [problem.code for problem in check_plan(plan_from_dict(tables), 4)] == ["sequence-partition"]
    costs = {"use": "pp.measured", "layer_costs": [1.0] * 4}
    assert check_plan(plan_from_dict(tables | {"partition": costs}), 4) == []

"""A run that times layers cuts its pipeline by them, and shows a measured step beside the predicted one."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record

WIDTH = 8
SLOW_S = 0.06
PLAN = {
    "run": {"name": "measured", "steps": 3, "device": "cpu"},
    "model": {"factory": "test_measured:layers"},
    "data": {"factory": "test_measured:Numbers"},
    "loss": {"factory": "test_measured:Squares"},
    "batch": {"global_size": 4, "micro_size": 2},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "parallel": {"pp": 2, "dp": 1},
    "pipeline": {"use": "pp.one_f_one_b"},
    "partition": {"use": "pp.measured"},
}


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """`share` of SLOW_S goes by in its forward, as much again in its backward."""

    def __init__(self, share):
        super().__init__()
        self.share = share
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))  # which no method but the constructor gives its value
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.gain * self.dropout(self.inner(Sleepy.apply(x, self.share * SLOW_S)))


class First(Block):
    def forward(self, inputs):
        return super().forward(inputs)


class Picky(Block):
    def forward(self, x):
        raise ValueError("this layer takes nothing")


def layers(shares=(1, 1, 1, 3), picky=False):
    """The last one takes as long as the first three, though all have as many parameters."""
    found = [First(shares[0]), *(Block(share) for share in shares[1:])]
    return [*found[:-1], Picky(1)] if picky else found


class Numbers:
    def __init__(self):
        from sley_core.data.dataset import DataInfo, Field

        self.info = DataInfo({"inputs": Field("float32")}, vocab_size=None, sequence=None)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"inputs": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


class Squares:
    fields = ()

    def weight(self, batch):
        return float(len(batch["inputs"]))

    def loss(self, output, batch):
        return output.square().sum()


def tables(**changes):
    return changed(PLAN, **changes)


FOLDER = Path(__file__).parent


def look(plan):
    """The layers of this rank, and the costs in the resolved plan."""
    with World.join("cpu") as world, assemble(plan_from_dict(plan, FOLDER), world) as run:
        return [layer.name for layer in run.layers], run.resolved_plan.partition.config.layer_costs


def test_slow_layers_count_for_what_they_take(ranks):
    measured = []
    for _ in range(3):  # a loaded machine only adds, so the least of three is what a layer takes
        (first, costs), (second, others) = ranks(2)(look, tables())
        assert (len(first), len(second)) == (3, 1)
        assert costs == others
        measured.append(costs)
    least = [round(min(each) / SLOW_S) for each in zip(*measured, strict=True)]
    assert least == [1, 2, 2, 6], "nothing asks for a gradient of the first one's input"


def test_timing_leaves_no_trace(ranks):
    """Weights, random states and modules are as in a plan that has the same costs, and measures nothing."""
    measured = ranks(2)(record, tables(), 3, folder=FOLDER)
    written = {"use": "pp.measured", "layer_costs": (1.0, 2.0, 2.0, 6.0)}
    (first, costs), _ = ranks(2)(look, tables(partition=written))
    assert (len(first), costs) == (3, written["layer_costs"])
    for one, other in zip(measured, ranks(2)(record, tables(partition=written), 3, folder=FOLDER), strict=True):
        assert [row["loss"] for row in one.rows] == [row["loss"] for row in other.rows]
        assert_same_bits(one.first, other.first)
        assert_same_bits(one.weights, other.weights)


def fails(plan):
    with pytest.raises((RunError, ValueError)) as caught:
        look(plan)
    return type(caught.value).__name__, str(caught.value)


def test_what_a_layer_raises_is_told_on_every_rank(ranks):
    first, second = ranks(2)(fails, tables(model__options={"picky": True}))
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
    text = plan.read_text("utf-8").partition("[parallel]")[0] + TIMED
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


def test_layers_are_not_timed_on_slices_of_sequences() -> None:
    """A rank has a slice, and the timer calls layers on whole sequences. Costs that the plan gives need no timer."""
    tables = small_plan(model__num_layers=2, model__heads=2, parallel={"sp": 2, "pp": 2, "dp": 1})
    tables |= {"sequence": {"use": "isp.all_to_all"}, "pipeline": {"use": "pp.one_f_one_b"}}
    tables |= {"partition": {"use": "pp.measured"}, "data": {"use": "data.text", "source": "python-stdlib", "sequence": 24}}
    assert [problem.code for problem in check_plan(plan_from_dict(tables), 4)] == ["sequence-partition"]
    costs = {"use": "pp.measured", "layer_costs": [1.0] * 4}
    assert check_plan(plan_from_dict(tables | {"partition": costs}), 4) == []

"""A run that times layers cuts its pipeline by them, and a profile has the actions of each stage."""

from __future__ import annotations

import json
import time
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

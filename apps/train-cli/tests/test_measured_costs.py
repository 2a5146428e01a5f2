"""`pp.measured` cuts by what layers take, alike on every rank, and once: what it found is in the resolved plan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed
from sley_testing.runs import record

WIDTH = 8
SLOW_S = 0.06

PLAN = {
    "run": {"name": "measured", "steps": 3, "device": "cpu"},
    "model": {"factory": "test_measured_costs:layers"},
    "data": {"factory": "test_measured_costs:Numbers"},
    "loss": {"factory": "test_measured_costs:Squares"},
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
        costs = run.resolved_plan.partition.config.layer_costs
        return [layer.name for layer in run.layers], costs, run.resolved_plan.to_toml()


def test_slow_layers_count_for_what_they_take(ranks):
    (first, costs, _), (second, others, _) = ranks(2)(look, tables())
    assert (len(first), len(second)) == (3, 1)
    assert costs == others
    assert [round(cost / SLOW_S) for cost in costs] == [1, 2, 2, 6], "nothing asks for a gradient of the first one's input"


def test_recomputation_is_part_of_what_a_layer_takes(ranks):
    ((_, costs, _), _) = ranks(2)(look, tables(activations={"use": "core.recompute"}))
    assert [round(cost / SLOW_S) for cost in costs] == [1, 3, 3, 6], "the ends of a model are kept"


def test_a_plan_that_has_the_costs_measures_nothing(ranks):
    written = {"use": "pp.measured", "layer_costs": (3.0, 1.0, 1.0, 1.0)}
    (first, costs, text), (second, _, _) = ranks(2)(look, tables(partition=written))
    assert (len(first), len(second)) == (1, 3)
    assert costs == written["layer_costs"]
    assert "layer_costs" in text


def test_timing_leaves_no_trace(ranks):
    """The same numbers as with the same cut written down: weights, random states and modules are as they would be."""
    measured = ranks(2)(record, tables(), 3, folder=FOLDER)
    written = ranks(2)(record, tables(partition={"use": "pp.explicit", "layers": [3, 1]}), 3, folder=FOLDER)
    for one, other in zip(measured, written, strict=True):
        assert [row["loss"] for row in one.rows] == [row["loss"] for row in other.rows]
        assert_same_bits(one.first, other.first)
        assert_same_bits(one.weights, other.weights)


def test_tied_layers_are_timed_too(ranks):
    model = {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 2, "tie_embeddings": True}
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 16}
    plan = tables(model=model, data=data, loss={"use": "core.cross_entropy"})
    (first, costs, _), (second, _, _) = ranks(2)(look, plan)
    assert len(costs) == len(first) + len(second) == 4
    assert all(cost > 0 for cost in costs)


def fails(plan):
    with pytest.raises((RunError, ValueError)) as caught:
        look(plan)
    return type(caught.value).__name__, str(caught.value)


def test_what_a_layer_raises_is_told_on_every_rank(ranks):
    first, second = ranks(2)(fails, tables(model__options={"picky": True}))
    assert first == ("ValueError", "this layer takes nothing")
    assert second[0] == "RunError"
    assert "rank 0 could not time the layers: ValueError: this layer takes nothing" in second[1]


def test_a_fake_world_goes_by_parameters_and_says_so():
    with World.fake(0, 2) as world, assemble(plan_from_dict(tables(), FOLDER), world) as run:
        assert len(run.layers) == 2
        assert run.notes == ["`pp.measured` times layers in a run; here they are cut by parameters"]
        assert run.resolved_plan.partition.config.layer_costs is None

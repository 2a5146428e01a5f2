"""Weights are used in many ways; each trains as it does whole, or is refused by name, never a wrong number."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict

PARTS = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}


def model(name: str) -> dict[str, Any]:
    return {**PARTS, "model": {"factory": f"isp_readers:{name}"}}


@pytest.mark.parametrize("accumulation", ["auto", "direct"])
def test_a_linear_of_which_the_bias_alone_is_sharded(parity, own, accumulation):
    parity(2, wp=2, precision={"compute": "fp64", "accumulation": accumulation}, **model("half_sharded"))


def test_a_block_that_torch_runs_another_way_in_evaluations(parity, own):
    parity(2, wp=2, **model("encoder"))


@pytest.mark.parametrize("weights", [{}, {"reduce": "step"}])
def test_a_layer_that_takes_one_of_its_linears_by_the_data(parity, own, weights):
    """The ranks' micro-batches take different ones in the same step, and their gradients travel together."""
    parity(2, wp=2, batch__micro_size=1, weights=weights, **model("branches"))


def first_step(tables: dict[str, Any], folder: Any, evaluates: bool = False) -> str:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder=folder), world) as run:
        with pytest.raises(RunError) as caught:
            (run.evaluate if evaluates else run.step)()
        return str(caught.value)


WAYS = [
    ({"unit": "module"}, True),
    ({"unit": "module"}, False),
    ({"fused": False}, True),
    ({"fused": False}, False),
    ({"fused": False, "overlap": False, "reduce": "step"}, True),
]


@pytest.mark.parametrize("model_name", ["branches", "uneven_branches"])
@pytest.mark.parametrize(("weights", "memory"), WAYS)
def test_ranks_that_go_different_ways_are_told(ranks, sharded, folder, own, weights, memory, model_name):
    """Where each module's gradients travel alone, one rank's would be taken for those of another, of its size or not."""
    changes = model(model_name) | {"batch__micro_size": 1, "parallel": {"host_memory": memory}}
    changes["limits"] = {"collective_timeout_s": 20.0}
    for message in ranks(2)(first_step, sharded(2, weights=weights, **changes), folder):
        assert "ranks-differ" in message
        assert "of branch." in message


def test_a_frozen_weight_that_is_read(ranks, sharded, folder, own):
    """Its shard has numbers enough to go on with, and nothing would ever say so."""
    for message in ranks(2)(first_step, sharded(2, **model("scaled")), folder):
        assert "sharded-weight-read" in message
        assert "scaled.frozen.weight" in message


def test_a_weight_that_evaluations_read(ranks, sharded, folder, own):
    for message in ranks(2)(first_step, sharded(2, **model("projected")), folder, evaluates=True):
        assert "sharded-weight-read" in message
        assert "projected.linear.weight" in message

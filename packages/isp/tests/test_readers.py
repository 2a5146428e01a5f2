"""Weights are used in many ways; each trains as it does whole, or is refused by name, never a wrong number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.backends import Backend
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
    parity(2, wp=2, batch__micro_size=1, weights=weights, run__seed=APART, **model("branches"))


def first_step(tables: dict[str, Any], folder: Any, evaluates: bool = False) -> str:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder=folder), world) as run:
        with pytest.raises(RunError) as caught:
            (run.evaluate if evaluates else run.step)()
        return str(caught.value)


APART = 1
"""A seed under which the first micro-batches of two ranks take different branches."""

WAYS = [
    ({"unit": "module"}, True),
    ({"unit": "module"}, False),
    ({"fused": False}, True),
    ({"fused": False}, False),
    ({"fused": False, "overlap": False, "reduce": "step"}, True),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_name", ["branches", "uneven_branches"])
@pytest.mark.parametrize(("weights", "memory"), WAYS)
def test_ranks_that_go_different_ways_are_told(ranks, sharded, texts, own, weights, memory, model_name):
    """Where each module's gradients travel alone, one rank's would be taken for those of another, of its size or not."""
    changes = model(model_name) | {"run__seed": APART, "batch__micro_size": 1, "parallel": {"cross_memory_attach": memory}}
    changes["limits"] = {"collective_timeout_s": 20.0}
    for message in ranks(2)(first_step, sharded(2, weights=weights, **changes), texts):
        assert "ranks-differ" in message
        assert "of branch." in message
        assert not memory or "LayerDrop" in message, "data is not all that a forward may depend on"


def by_collectives(tables: dict[str, Any], folder: Any, evaluates: bool) -> tuple[str, bool]:
    """As on a backend whose collectives have no place for a mark; and whether all weights are as they were."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder=folder), world) as run:
        wp = run.groups["wp"]
        for name, lane in wp.lanes.items():
            wp.transports[name] = Backend(wp, name, lane, wp.log, is_coalesced=False)
        before = [param.parameter.detach().clone() for param in run.registry]
        with pytest.raises(RunError) as caught:
            (run.evaluate if evaluates else run.step)()
        return str(caught.value), all(
            torch.equal(param.parameter, one) for param, one in zip(run.registry, before, strict=True)
        )


@pytest.mark.parametrize(("weights", "evaluates"), [({"fused": False}, False), ({"unit": "module", "overlap": False}, True)])
def test_ranks_that_go_different_ways_are_told_where_no_mark_rides_along(ranks, sharded, texts, own, weights, evaluates):
    """Branches of one size: their weights or gradients are taken for each other's, but no step is taken with them."""
    changes = model("branches") | {"run__seed": APART, "batch__micro_size": 1, "parallel": {"cross_memory_attach": False}}
    tables = sharded(2, weights=weights, evaluation={"every": 9, "steps": 1}, **changes)
    for message, is_as_before in ranks(2)(by_collectives, tables, texts, evaluates):
        assert "ranks-differ" in message
        assert "of wp[0, 1], rank 1 made " in message
        assert "exchanges, the last of " in message
        assert is_as_before


def test_a_frozen_weight_that_is_read(ranks, sharded, texts, own):
    """Its shard has numbers enough to go on with, and nothing would ever say so."""
    for message in ranks(2)(first_step, sharded(2, **model("scaled")), texts):
        assert "sharded-weight-read" in message
        assert "scaled.frozen.weight" in message


def test_a_weight_that_evaluations_read(ranks, sharded, texts, own):
    for message in ranks(2)(first_step, sharded(2, **model("projected")), texts, evaluates=True):
        assert "sharded-weight-read" in message
        assert "projected.linear.weight" in message


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "linear": lambda linear: F.linear(torch.ones(6, dtype=torch.float64), linear.weight).sum(),
    "norm": lambda linear: linear.weight.norm(),
    "detach": lambda linear: linear.weight.detach().sum(),
    "data": lambda linear: linear.weight.data.sum(),
    "tolist": lambda linear: linear.bias.tolist()[0],
    "__getitem__": lambda linear: linear.bias[0],
    "deepcopy": lambda linear: copy.deepcopy(linear).in_features,
    "view": lambda linear: nn.utils.parameters_to_vector(linear.parameters()).sum(),
    "register_hook": lambda linear: linear.weight.register_hook(print) and 1.0,
    "mul_": lambda linear: linear.weight.mul_(0.5) and 1.0,
}
SIZES: dict[str, Callable[[nn.Linear], Any]] = {
    "shape": lambda linear: linear.weight.shape[0],
    "size": lambda linear: linear.weight.size(0) + linear.bias.size()[0],
    "numel": lambda linear: 1 / sqrt(linear.weight.numel()),
    "len": lambda linear: len(linear.bias),
    "fan": lambda linear: sum(nn.init._calculate_fan_in_and_fan_out(linear.weight)),
    "like": lambda linear: torch.ones_like(linear.weight).sum() + linear.weight.new_ones(3).sum(),
    "count": lambda linear: sum(parameter.numel() for parameter in linear.parameters()),
    "dtype": lambda linear: torch.finfo(linear.weight.dtype).eps * linear.weight.element_size(),
    "to": lambda linear: torch.ones(3).to(linear.weight).sum(),
}


def late_read(tables: dict[str, Any], folder: Any, name: str) -> list[str]:
    """What one of READS is answered that begins after a step and an evaluation without it: in both, and by hand."""
    from isp_readers import Asks

    said = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder=folder), world) as run:
        run.step()
        run.evaluate()
        linear = next(layer.module for layer in run.layers if layer.name == "asks").linear
        read = READS[name]
        Asks.asks = staticmethod(read)
        for ask in (run.step, run.evaluate, torch.no_grad()(lambda: read(linear))):
            try:
                ask()
                said.append("nothing")
            except RunError as error:
                said.append(str(error))
        Asks.asks = None
        run.step()
    return said


@pytest.mark.sample(3)
@pytest.mark.parametrize("memory", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", READS)
def test_a_read_that_begins_late_is_refused_as_an_early_one(ranks, sharded, texts, own, name, memory):
    """Training, evaluating, without gradients, by hand: whenever somebody asks for values, and however."""
    tables = sharded(2, parallel={"cross_memory_attach": memory}, **model("asks"))
    for answers in ranks(2)(late_read, tables, texts, name):
        for answer in answers:
            assert f"sharded-weight-read]: `{name}` reads the parameter 'asks.linear." in answer


def sizes(tables: dict[str, Any], folder: Any) -> tuple[dict[str, float], list[bool]]:
    """SIZES of a sharded linear, and whether its parameters are trained after it was frozen."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder=folder), world) as run:
        linear = next(layer.module for layer in run.layers if layer.name == "asks").linear
        found = {name: float(size(linear)) for name, size in SIZES.items()}
        linear.requires_grad_(False)
        return found, [param.trainable for param in run.registry if param.name.startswith("asks.linear")]


def test_a_sharded_weight_has_the_sizes_of_the_whole(ranks, sharded, texts, own):
    whole = nn.Linear(6, 13, dtype=torch.float64)
    for found, trained in ranks(2)(sizes, sharded(2, **model("asks")), texts):
        assert found == {name: float(size(whole)) for name, size in SIZES.items()}
        assert trained == [False, False], "what is trained is still theirs to say"


def test_a_model_that_goes_by_the_size_of_its_weights(parity, own):
    """muP, and whoever else multiplies by 1 / sqrt(numel): of the whole weight, as everywhere."""
    parity(2, wp=2, weights={"embedding": "hidden"}, **model("by_size"))


@pytest.mark.parametrize("name", ["normed", "replaced"])
def test_weights_that_are_not_the_linear_s_own(parity, own, name):
    """torch's weight norms; a forward that was replaced, and a call with other tensors for a while."""
    parity(2, wp=2, **model(name))


def test_a_shard_that_is_read_as_a_weight_is_refused(ranks, sharded, texts, own):
    changes = PARTS | {"model": {"factory": "isp_parts:reads_another"}}
    for said in ranks(2)(first_step, sharded(2, **changes), texts):
        assert "'block.linear.weight'" in said
        assert "3 of 6 rows" in said

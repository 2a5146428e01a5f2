"""A layer never computes with a gathered weight that is older than its shards: after a failed step, a write, or a wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.shards import wholes
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import weights


def failing(tables: dict[str, Any], folder: Any, fails: bool) -> Any:
    """A step, then a forward that raises half-way if `fails`, other weights, and two steps."""
    import isp_parts

    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        run.step()
        if fails:
            before = run.feed.state()
            isp_parts.Fails.asked = True
            with pytest.raises(ValueError, match="asked to"):
                run.step()
            isp_parts.Fails.asked = False
            run.feed.restore(before)
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.5)
        run.step()
        run.step()
        pool = run.stepper.executor.weights.pool
        return weights(run), pool.num_lent


FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}


def test_a_step_that_failed_leaves_nothing(ranks, sharded, texts, own):
    """What was gathered for the failed forward is never used after it, and every buffer came back."""
    tables = sharded(2, model={"factory": "isp_parts:failing"}, **FOREIGN)
    wanted = ranks(2)(failing, tables, texts, False)
    for (clean, _), (found, lent) in zip(wanted, ranks(2)(failing, tables, texts, True), strict=True):
        assert_same_bits(clean, found)
        assert lent == 0


def by_hand(tables: dict[str, Any], folder: Any) -> Any:
    """Calls the layers without a run's executor, after steps and after weights that were written by hand."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        run.step()
        tokens = torch.arange(4)[None]

        def call() -> torch.Tensor:
            hidden: Any = tokens
            for layer in run.layers:
                hidden = layer.module(hidden)
            return hidden

        with torch.no_grad():
            first = call()
            for param in run.registry:
                param.parameter.mul_(2.0)
            second = call()
        output = call()
        same = torch.equal(output.detach(), second)
        run.store.begin_step()
        output.sum().backward()
        param = run.registry["block1.up.weight"]
        summed = run.store.gradient(param) if param.shard else param.parameter.grad
        gradient = wholes({param: summed}, run.groups)[param]
        pool = run.stepper.executor.weights.pool
        return first, second, gradient / world.size, same, pool.num_lent


def test_a_model_called_by_hand(ranks, sharded, texts, own):
    """Right with and without gradients, right after a backward and after a write, and nothing stays gathered."""
    model = {"factory": "isp_parts:mixed"}
    wanted = by_hand(sharded(1, 1, model=model, **FOREIGN) | {"weights": {"use": "isp.communicator"}}, texts)
    for found in ranks(2)(by_hand, sharded(2, model=model, **FOREIGN), texts):
        for value, expected in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        assert found[3:] == (True, 0)


def rewritten(tables: dict[str, Any], folder: Any) -> Any:
    """Writes a block's shards in the middle of the third step, while it is gathered; how often that was, and the weights."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        number: Counter[str] = Counter()
        communicator = run.stepper.executor.weights
        if communicator is not None:
            gather = communicator._gather

            def spy(unit: Any) -> Any:
                number[unit.name] += 1
                return gather(unit)

            communicator._gather = spy
        run.step()
        run.step()
        normal = number["blocks.1"]
        number.clear()
        block = next(layer.module for layer in run.layers if layer.name == "blocks.1")

        def write(module: Any, args: Any) -> None:
            handle.remove()
            with torch.no_grad():
                run.registry["blocks.1.attention.query.weight"].parameter.mul_(1.5)

        handle = block.attention.register_forward_pre_hook(write)
        run.step()
        return number["blocks.1"] - normal // 2, weights(run)


def test_a_gather_is_never_older_than_its_weights(ranks, sharded, texts):
    """A write makes what was gathered before it worthless, even within a step: the next use has what was written."""
    changes = {"batch": {"global_size": 4, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}, "run__steps": 9}
    changes["model__num_layers"] = 3
    _, wanted = rewritten(sharded(1, 1, **changes), texts)
    for more, found in ranks(2)(rewritten, sharded(2, **changes), texts):
        assert_close_gradients(wanted, found, 1e-10)
        assert more == 1


def waited(tables: dict[str, Any], folder: Any) -> Any:
    """Registers a wait for every layer; returns in which order waits and gathers came, and for how many of each."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        communicator = run.stepper.executor.weights
        events: list[tuple[str, str]] = []
        gather = communicator._gather

        def spy(unit: Any) -> Any:
            events.append(("gather", unit.layer))
            gathered = gather(unit)
            events.append(("gathered", unit.layer))
            return gathered

        communicator._gather = spy
        for layer in run.layers:
            run.before_layer(layer.name, lambda name=layer.name: events.append(("wait", name)))
        run.step()
        run.step()
        return events


@pytest.mark.parametrize("unit", ["layer", "module"])
def test_waits_come_before_every_gather(ranks, sharded, texts, unit):
    """Gathered ahead or on demand, in forward, recomputation and backward: what `before_layer` registered is awaited first."""
    activations = {"use": "core.recompute", "fraction": 0.5}
    (events, _) = ranks(2)(waited, sharded(2, weights={"unit": unit}, activations=activations), texts)
    gathers = [at for at, (kind, _) in enumerate(events) if kind == "gather"]
    assert gathers
    for at in gathers:
        assert events[at + 1] == ("wait", events[at][1])

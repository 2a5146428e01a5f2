"""A model called by hand between steps: whatever becomes of the call, the run goes on as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.shards import wholes
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights

FOREIGN = {
    "model": {"factory": "isp_parts:mixed"},
    "data": {"factory": "isp_parts:Points"},
    "loss": {"factory": "isp_parts:Squares"},
}


def between(tables: dict[str, Any], folder: Any, call: Callable[[Run], Any] | None) -> tuple[Any, dict[str, Tensor], int]:
    """What `call` returns between two steps, the weights after them, and how many buffers are lent then."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        said = None if call is None else call(run)
        run.step()
        return said, weights(run), run.stepper.executor.weights.pool.num_lent


@pytest.fixture
def unharmed(ranks, sharded, texts, own) -> Callable[..., list[Any]]:
    """`unharmed(call, **changes)`: what `call(run)` returns on two ranks, where it leaves no trace."""

    def unharmed(call: Callable[[Run], Any], weights: dict[str, Any] | None = None, **changes: Any) -> list[Any]:
        tables = sharded(2, weights=weights, **FOREIGN | changes)
        wanted = ranks(2, 40).once(between, tables, texts, None)
        found = ranks(2, 40)(between, tables, texts, call)
        for (_, clean, _), (_, one, lent) in zip(wanted, found, strict=True):
            assert_same_bits(clean, one)
            assert lent == 0
        return [said for said, _, _ in found]

    return unharmed


def output(run: Run) -> Tensor:
    hidden: Any = torch.arange(4)[None]
    for layer in run.layers:
        hidden = layer.module(hidden)
    return hidden


def inferred(run: Run) -> bool:
    with torch.no_grad():
        wanted = output(run)
    run.stepper.executor.weights.pool.trim()
    with torch.inference_mode():
        return torch.equal(output(run), wanted)


def test_under_inference_mode(unharmed):
    """The buffers that it makes are those of training too."""
    assert unharmed(inferred) == [True, True]


def of_a_wrong_shape(run: Run, graph: bool) -> list[int]:
    """Whether a buffer is lent after each of many failing calls of a linear; and of an embedding, for too large a token."""
    lent = []
    for _ in range(12):
        with torch.set_grad_enabled(graph), pytest.raises(RuntimeError):
            run.layers[-1].module(torch.zeros(1, 99, dtype=torch.float64))
        lent.append(run.stepper.executor.weights.pool.num_lent)
    with torch.set_grad_enabled(graph), pytest.raises(IndexError):
        run.layers[0].module(torch.full((1, 4), 99))
    return [*lent, run.stepper.executor.weights.pool.num_lent]


@pytest.mark.sample(1)
@pytest.mark.parametrize("graph", [False, True])
def test_a_call_that_fails(unharmed, graph):
    """A wrong shape is the caller's mistake: every buffer comes back, and no rank waits for another."""
    for lent in unharmed(partial(of_a_wrong_shape, graph=graph)):
        assert lent == [0] * 13


def starts_not(run: Run) -> int:
    """How many buffers are lent after a gather that could not start."""
    (transport,) = {type(one) for one in run.groups["wp"].transports.values()}
    start = transport.all_gather

    def fail(*args: Any, **more: Any) -> Any:
        raise OSError("asked to")

    transport.all_gather = fail  # type: ignore[method-assign]
    with torch.no_grad(), pytest.raises(OSError, match="asked to"):
        output(run)
    transport.all_gather = start  # type: ignore[method-assign]
    return run.stepper.executor.weights.pool.num_lent


def test_a_gather_that_cannot_start(unharmed):
    assert unharmed(starts_not) == [0, 0]


def backward_at_once(run: Run) -> str:
    """What a backward right after a step is told; and one that does what it was told gets its gradient."""
    with pytest.raises(RunError) as caught:
        output(run).sum().backward()
    lent = run.stepper.executor.weights.pool.num_lent
    run.store.begin_step()
    output(run).sum().backward()
    param = run.registry["head.weight"]
    hidden: Any = torch.arange(4)[None]
    with torch.no_grad():
        for layer in run.layers[:-1]:
            hidden = layer.module(hidden)
    wanted = run.world.size * hidden.sum((0, 1)).expand(6, 6)
    torch.testing.assert_close(wholes({param: run.store.gradient(param)}, run.groups)[param], wanted)
    return f"{lent} lent: {caught.value}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"reduce": "step"},
        {"embedding": "hidden"},
        pytest.param({"unit": "module", "fused": False}, marks=pytest.mark.campaign),
    ],
)
def test_a_backward_after_a_step(unharmed, weights):
    for said in unharmed(backward_at_once, weights):
        assert said.startswith("0 lent: error[gradient-complete]: a backward between two steps")
        assert "run.store.begin_step()" in said

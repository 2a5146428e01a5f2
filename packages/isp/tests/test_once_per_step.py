"""Gradients that are summed at full size and reduced once per step: the same numbers, fewer exchanges, counted memory."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict

ONCE = {"reduce": "step"}
BATCH = {"global_size": 12, "micro_size": 2}
"""Three micro-batches on each of two ranks."""


@pytest.mark.parametrize(
    ("fused", "tied", "fraction"),
    [
        (True, True, 0.5),
        (False, False, 0.0),
        pytest.param(True, False, 0.0, marks=pytest.mark.campaign),
        pytest.param(False, True, 0.5, marks=pytest.mark.campaign),
    ],
)
def test_parity(parity, fused, tied, fraction):
    weights = ONCE | {"fused": fused}
    changes = {"model__tie_embeddings": tied, "model__num_layers": 3}
    changes["activations"] = {"use": "core.recompute", "fraction": fraction}
    parity(2, wp=2, weights=weights, batch=BATCH, **changes)


@pytest.mark.parametrize(
    "match",
    ["blocks.*", pytest.param("*query*", marks=pytest.mark.campaign), pytest.param("embed*", marks=pytest.mark.campaign)],
)
def test_frozen_weights(parity, match):
    parity(2, wp=2, weights=ONCE, batch=BATCH, optimizer__groups=[{"match": match, "freeze": True}])


def test_copies_of_shards(parity):
    """The shards are then summed over `wdp`, by a reducer that starts as soon as they are complete."""
    parity(4, wp=2, dp=4, weights=ONCE, batch__micro_size=1)


@pytest.mark.parametrize("compute", ["bf16", pytest.param("fp32", marks=pytest.mark.campaign)])
def test_gradients_wider_than_weights(parity, compute):
    parity(2, wp=2, weights=ONCE, batch=BATCH, precision__compute=compute)


def counted(tables: dict[str, Any], folder: Any) -> dict[str, int]:
    """Of the third step: exchanges of gradients and new buffers; and the peaks of all three."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        communicator = run.stepper.executor.weights
        for _ in range(3):
            run.step()
        return communicator.counts() | {"lent": communicator.pool.num_lent}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fused", "tied"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.campaign),
        pytest.param(False, True, marks=pytest.mark.campaign),
    ],
)
def test_each_gradient_travels_once(ranks, sharded, texts, fused, tied):
    """Per micro-batch every unit sends its gradients three times; per step once, and a tied weight is one of them."""
    changes = {"batch": BATCH, "evaluation": {"every": 9, "steps": 1}, "model__tie_embeddings": tied}
    num_units = 4 if fused else 2 * 7 + 2
    for reduce, number in (("micro_batch", 3 * num_units), ("step", num_units - tied)):
        found = ranks(2)(counted, sharded(2, weights={"reduce": reduce, "fused": fused}, **changes), texts)
        for one in found:
            assert one["reductions_per_step"] == number
            assert one["allocations_after_step_2"] == 0
            assert one["lent"] == 0
            if reduce == "step":
                assert one["most_full_gradients"] == 2 * 7 + 2 - tied, "all of them"
            else:
                assert one["most_full_gradients"] <= (2 * 7 if fused else 4)

"""Counts, not impressions: how many exchanges a step and an evaluation issue, and how large they are."""

from __future__ import annotations

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import collectives
from sley_testing.plans import changed, small_plan

LAYERS, MICROS, EVALUATED = 2, 2, 3
PLAN = small_plan(
    model__num_layers=LAYERS,
    data__sequence=16,
    batch={"global_size": 2, "micro_size": 1},
    evaluation={"every": 10, "steps": EVALUATED},
    sequence={"use": "isp.all_to_all"},
    parallel={"sp": 2, "dp": 1, "cross_memory_attach": False},  # only what gloo sends is counted
)


def exchanges(folder, fraction):
    """The elements of each exchange in a step and in an evaluation, and the operations that were none of them."""
    tables = changed(PLAN, activations={"use": "core.recompute", "fraction": fraction})
    found, others = [], set()
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()  # the first one compares first values too
        for call in (run.step, run.evaluate):
            with collectives() as calls:
                call()
            # The other rank's half; the messages before them say what they are.
            found.append([2 * one.numel for one in calls if one.op == "send" and one.dtype != "uint8"])
            others |= {one.op for one in calls} - {"send", "recv"}
    return found, others


@pytest.mark.sample(1)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_exchanges_of_a_step_and_of_an_evaluation(ranks, texts, fraction):
    """Two per attention, one for q, k and v together; two more in its backward; and again what is recomputed.

    A slice of 8 positions has 4 + 2 + 2 heads of 4 channels to give, and 4 heads of context.
    """
    there, back = 8 * (4 + 2 + 2) * 4, 8 * 4 * 4
    again = int(fraction * LAYERS)
    for (step, evaluation), others in ranks(2)(exchanges, texts, fraction):
        assert others == {"all_reduce"}, "the loss weight, gradients, totals"
        assert evaluation == EVALUATED * MICROS * LAYERS * [there, back]
        assert step.count(there) == MICROS * (2 * LAYERS + again)
        assert step.count(back) == MICROS * (2 * LAYERS + again)
        assert len(step) == step.count(there) + step.count(back)

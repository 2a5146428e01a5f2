"""A pipeline of any schedule, tied or not, equals the one-process run."""

from __future__ import annotations

from random import Random

import pytest

from sley_core.actions.action import Placement
from sley_core.comm import collectives
from sley_pp.csv_schedules import write_csv
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import any_lists

PLAN = small_plan(model__num_layers=4, run__steps=4, evaluation={"every": 2, "steps": 1})
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]


def plan(schedule, pp, dp=1, **changes):
    return changed(PLAN, pipeline={"use": schedule}, parallel={"pp": pp, "dp": dp}, **changes)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_two_stages(compared, texts, tied):
    compared(2, [plan(schedule, 2, model__tie_embeddings=tied) for schedule in SCHEDULES], folder=texts)


@pytest.mark.parametrize(
    ("stages", "schedules"),
    [
        (4, ["pp.zero_bubble_h1"]),
        pytest.param(4, ["pp.gpipe", "pp.one_f_one_b"], marks=pytest.mark.campaign),
        pytest.param(3, ["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_h1"], marks=pytest.mark.campaign),
    ],
)
def test_more_stages(compared, texts, stages, schedules):
    compared(stages, [plan(schedule, stages, model__tie_embeddings=True) for schedule in schedules], folder=texts)


@pytest.mark.parametrize("schedules", [["pp.zero_bubble_v"], pytest.param(["pp.one_f_one_b"], marks=pytest.mark.campaign)])
def test_two_stages_of_two_replicas(compared, texts, schedules):
    every = compared(4, [plan(schedule, 2, 2, model__tie_embeddings=True) for schedule in schedules], folder=texts)
    for schedule, layouts in zip(schedules, every, strict=True):
        for one, other in (layouts[:2], layouts[2:]):
            assert_same_bits(one.weights, other.weights)
        tied = [seen.weights["embed.tokens.weight"] for seen in layouts if "embed.tokens.weight" in seen.weights]
        assert len(tied) == (2 if schedule == "pp.zero_bubble_v" else 4), "a V ends where it began"
        for copy in tied[1:]:
            assert_same_bits({"tie": tied[0]}, {"tie": copy})


def by_host(_run):
    collectives.goes_by_host = lambda *_: True


def test_stages_whose_messages_go_by_the_host(compared, texts):
    """As those of stages that share a device, whose tensors gloo cannot send."""
    compared(2, [plan("pp.one_f_one_b", 2, model__tie_embeddings=True)], folder=texts, prepare=by_host)


@pytest.mark.campaign
def test_fewer_micro_batches_than_stages_many_recomputation_and_single_precision(compared, texts):
    recompute = [{"activations__use": "core.recompute", "activations__fraction": fraction} for fraction in (0.5, 1.0)]
    plans = [plan("pp.one_f_one_b", 2, batch__micro_size=micro) for micro in (1, 8)]
    plans += [plan("pp.zero_bubble_h1", 2, **changes) for changes in recompute]
    plans += [plan("pp.zero_bubble_v", 2, precision__compute="fp32", model__tie_embeddings=True)]
    compared(2, plans, folder=texts)


@pytest.mark.parametrize(
    ("stages", "chunks", "seeds"),
    [
        (2, 3, range(2)),
        pytest.param(2, 3, range(2, 3), marks=pytest.mark.campaign),
        pytest.param(3, 2, range(3), marks=pytest.mark.campaign),
    ],
)
def test_any_deal_of_the_model_and_any_order_that_can_run(compared, texts, stages, chunks, seeds):
    """From a file: neighbours on one stage, on stages beside each other or on others, the model's ends on any."""
    plans = []
    for seed in seeds:
        chance = Random(seed)
        route = list(range(stages)) * chunks
        chance.shuffle(route)
        file = texts / f"{stages}.{chunks}.{seed}.csv"
        file.write_text(write_csv(any_lists(placement := Placement(tuple(route)), 4, chance), placement))
        tables = plan("pp.csv", stages, model__tie_embeddings=True)
        plans.append(tables | {"pipeline": {"use": "pp.csv", "file": str(file)}, "partition": {"use": "pp.uniform"}})
    compared(stages, plans, folder=texts)


def test_weights_that_are_computed_when_they_are_read(compared, small):
    """Nobody reads those of another stage's layers, not even to count them."""
    compared(2, [small("pp.one_f_one_b", 2, model={"factory": "pp_parts:computed"})])

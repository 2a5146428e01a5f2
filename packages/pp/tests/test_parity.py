"""A pipeline of any schedule, tied or not, equals the one-process run."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest

from sley_core.actions.placement import Placement
from sley_core.testing.lists import any_lists
from sley_core.testing.parity import assert_same_bits
from sley_pp.schedules.csv import write_csv

PLAN = {
    "run": {"name": "pipeline", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "core.llama", "num_layers": 4, "hidden": 16, "heads": 2, "ffn_hidden": 24},
    "data": {"use": "core.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "evaluation": {"every": 2, "steps": 1},
    "precision": {"compute": "fp64"},
}
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents))
    return folder


def plan(schedule, pp, dp=1, **changes):
    tables = deepcopy(PLAN)
    for path, value in changes.items():
        table, key = path.split("__")
        tables.setdefault(table, {})[key] = value
    return tables | {"pipeline": {"use": schedule}, "parallel": {"pp": pp, "dp": dp}}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_two_stages(compared, folder, tied):
    compared(2, [plan(schedule, 2, model__tie_embeddings=tied) for schedule in SCHEDULES], folder=folder)


@pytest.mark.parametrize("stages", [pytest.param(3, marks=pytest.mark.campaign), 4])
def test_more_stages(compared, folder, stages):
    schedules = ["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_h1"]
    compared(stages, [plan(schedule, stages, model__tie_embeddings=True) for schedule in schedules], folder=folder)


def test_two_stages_of_two_replicas(compared, folder):
    schedules = ["pp.one_f_one_b", "pp.zero_bubble_v"]
    every = compared(4, [plan(schedule, 2, 2, model__tie_embeddings=True) for schedule in schedules], folder=folder)
    for schedule, layouts in zip(schedules, every, strict=True):
        for one, other in (layouts[:2], layouts[2:]):
            assert_same_bits(one.weights, other.weights)
        tied = [seen.weights["embed.tokens.weight"] for seen in layouts if "embed.tokens.weight" in seen.weights]
        assert len(tied) == (2 if schedule == "pp.zero_bubble_v" else 4), "a V ends where it began"
        for copy in tied[1:]:
            assert_same_bits({"tie": tied[0]}, {"tie": copy})


def test_fewer_micro_batches_than_stages_many_recomputation_and_single_precision(compared, folder):
    recompute = [{"activations__use": "core.recompute", "activations__fraction": fraction} for fraction in (0.5, 1.0)]
    plans = [plan("pp.one_f_one_b", 2, batch__micro_size=micro) for micro in (1, 8)]
    plans += [plan("pp.zero_bubble_h1", 2, **changes) for changes in recompute]
    plans += [plan("pp.zero_bubble_v", 2, precision__compute="fp32", model__tie_embeddings=True)]
    compared(2, plans, folder=folder)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 3), (3, 2)])
def test_any_deal_of_the_model_and_any_order_that_can_run(compared, folder, stages, chunks):
    """From a file: neighbours on one stage, on stages beside each other or on others, the model's ends on any."""
    plans = []
    for seed in range(3):
        chance = Random(seed)
        route = list(range(stages)) * chunks
        chance.shuffle(route)
        file = folder / f"{stages}.{chunks}.{seed}.csv"
        file.write_text(write_csv(any_lists(placement := Placement(tuple(route)), 4, chance), placement))
        tables = plan("pp.csv", stages, model__tie_embeddings=True)
        plans.append(tables | {"pipeline": {"use": "pp.csv", "file": str(file)}, "partition": {"use": "pp.uniform"}})
    compared(stages, plans, folder=folder)


def test_weights_that_are_computed_when_they_are_read(compared, small):
    """Nobody reads those of another stage's layers, not even to count them."""
    compared(2, [small("pp.one_f_one_b", 2, model={"factory": "pp_parts:computed"})])

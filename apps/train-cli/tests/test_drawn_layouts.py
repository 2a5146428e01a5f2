"""Layouts with stages, slices, shards and replicas at once, given and drawn by a printed seed, equal one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import assert_parity_of_parts, record

PLAN = small_plan(
    model__num_layers=4,
    model__ffn_hidden=27,
    data__sequence=16,
    batch__micro_size=1,
    optimizer__weight_decay=0.1,
    evaluation={"every": 2, "steps": 1},
)
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]


def layout(alone: Tables, parallel: dict[str, int], schedule: str, weights: Tables, buckets: float | None) -> Tables:
    """The plan `alone`, of one process, over ranks."""
    tables = changed(alone, parallel=parallel)
    if parallel["pp"] > 1:
        tables["pipeline"] = {"use": schedule}
    if parallel["sp"] > 1:
        tables["sequence"] = {"use": "isp.all_to_all"}
    if parallel["wp"] > 1:
        tables["weights"] = {"use": "isp.communicator", **weights}
    if buckets is not None:
        tie = [{"use": "pp.shared_modules"}] if alone["model"]["tie_embeddings"] and parallel["pp"] > 1 else []
        tables["gradient_handlers"] = [{"use": "dp.bucketed", "bucket_mb": buckets}, *tie]
    return tables


def recorded(plans: list[Tables], folder: Path) -> list[Any]:
    return [record(tables, 2, folder=folder) for tables in plans]


def check(ranks: Any, folder: Path, world: int, pairs: list[tuple[Tables, Tables]]) -> None:
    """Each layout's rows, gradients and weights on every rank, against the plan of one process."""
    found = ranks(world, 600)(recorded, [tables for _, tables in pairs], folder)
    for (alone, tables), layouts in zip(pairs, zip(*found, strict=True), strict=True):
        print(tables)
        reference = record(alone, 2, folder=folder)
        assert_parity_of_parts(reference, layouts, "fp64")


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["pp.zero_bubble_v", "pp.zero_bubble_h1"])
@pytest.mark.parametrize(("tied", "weights"), [(True, {"unit": "module"}), (False, {"head": "vocabulary"})])
def test_slices_and_shards_on_two_stages(ranks, texts, schedule, tied, weights):
    """Weight gradients are put off while exchanges of attention, gathers and reductions cross; tied and not."""
    alone = changed(PLAN, model__num_layers=2, model__tie_embeddings=tied)
    parallel = {"pp": 2, "sp": 2, "dp": 1, "wp": 2}
    check(ranks, texts, 4, [(alone, layout(alone, parallel, schedule, weights, None))])


def drawn(draw: random.Random, world: int, num_layers: int, folder: Path) -> tuple[Tables, Tables]:
    """A plan of one process and the same over `world` ranks, in a layout that `check` allows."""
    while True:
        pp = draw.choice([size for size in (1, 2) if world % size == 0])
        sp, wp = (draw.choice([size for size in (1, 2, 4) if world // pp % size == 0]) for _ in range(2))
        alone = changed(PLAN, model__num_layers=num_layers)
        alone["model"] |= {"tie_embeddings": draw.random() < 0.5, "kv_heads": draw.choice([1, 2, 4])}
        alone["data"]["documents"] = draw.choice(["pack", "cut", "pad"])
        alone["activations"] = {"use": "core.recompute", "fraction": draw.choice([0.0, 0.5, 1.0])}
        alone["loss"] = {"use": "core.cross_entropy", "label_smoothing": draw.choice([0.0, 0.1])}
        weights = {
            "unit": draw.choice(["layer", "module"]),
            "ahead": draw.choice([0, 1, 2]),
            "fused": draw.random() < 0.5,
            "reduce": draw.choice(["micro_batch", "step"]),
            "head": draw.choice(["gather", "vocabulary"]),
            "embedding": "gather" if alone["model"]["tie_embeddings"] else draw.choice(["gather", "hidden"]),
        }
        parallel = {"pp": pp, "sp": sp, "dp": world // pp // sp, "wp": wp}
        tables = layout(alone, parallel, draw.choice(SCHEDULES), weights, draw.choice([None, 0.0005, 25.0]))
        if sp * wp > 1 and not check_plan(plan_from_dict(tables, folder), world):
            return alone, tables


@pytest.mark.parametrize(
    ("world", "num_plans", "num_layers"),
    [(4, 1, 2), pytest.param(4, 30, 4, marks=pytest.mark.campaign), pytest.param(8, 10, 4, marks=pytest.mark.campaign)],
)
def test_any_layout_equals_one_process(ranks, texts, world, num_plans, num_layers):
    """Any sizes with any schedule, options and buckets."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    check(ranks, texts, world, [drawn(draw, world, num_layers, texts) for _ in range(num_plans)])

"""Orders of registration, options and layouts, drawn by a seed that is printed, change neither counts nor numbers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import assert_parity, record, same_on_all

FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}
SHORT = {"batch": {"global_size": 4, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}, "run__steps": 9}


def drawn() -> tuple[int, random.Random]:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed, random.Random(seed)


def gathered(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    """For each plan: what the third step gathers and how much of it nobody foresaw; then an evaluation; what is left."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            communicator = run.stepper.executor.weights
            names: Counter[str] = Counter()
            gather = communicator._gather

            def spy(unit: Any, names: Counter[str] = names, gather: Any = gather) -> Any:
                names[unit.name] += 1
                return gather(unit)

            communicator._gather = spy
            run.step()
            run.step()
            names.clear()
            before = communicator.prefetch.num_demands
            run.step()
            training, demands = dict(names), communicator.prefetch.num_demands - before
            names.clear()
            run.evaluate()
            peak, left = communicator.prefetch.max_held, (communicator.pool.num_lent, len(communicator.prefetch.held))
            found.append((training, demands, dict(names), peak, left))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("unit", ["layer", "module"])
def test_counts_for_any_order_of_registration(ranks, sharded, texts, own, unit):
    """Gathers, demands and peaks are those of the order of use, whatever the order of registration."""
    seed, _ = drawn()
    orders: list[dict[str, Any]] = [{}, *({"order": seed + at} for at in range(2))]
    plans = [
        sharded(2, weights={"unit": unit}, model={"factory": "isp_parts:mixed", "options": options}, **SHORT, **FOREIGN)
        for options in orders
    ]
    for plain, *others in ranks(2, 120)(gathered, plans, texts):
        training, demands, evaluating, peak, left = plain
        assert demands == 1
        assert max(training.values()) == 2
        assert training["embed" if unit == "layer" else "embed.table"] == 1, "none in the backward"
        assert set(evaluating.values()) == {1}
        assert peak <= (2 if unit == "layer" else 2 * 5 + 1)
        assert left == (0, 0)
        assert others == [plain] * len(others)


@pytest.mark.parametrize(
    ("unit", "reentrant"),
    [
        ("layer", False),
        ("module", True),
        pytest.param("layer", True, marks=pytest.mark.campaign),
        pytest.param("module", False, marks=pytest.mark.campaign),
    ],
)
def test_counts_of_a_model_that_recomputes_by_itself(ranks, sharded, texts, own, reentrant, unit):
    """With either of torch's checkpoints: two gathers per weight and micro-batch at most, one in evaluation."""
    model = {"factory": "isp_parts:recomputing", "options": {"reentrant": reentrant}}
    plans = [sharded(2, weights={"unit": unit}, model=model, **SHORT, **FOREIGN)]
    for ((training, demands, evaluating, _, left),) in ranks(2)(gathered, plans, texts):
        assert max(training.values()) == 2
        assert demands == 1
        assert set(evaluating.values()) == {1}
        assert left == (0, 0)


def a_plan(draw: random.Random, sharded: Any, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process's plan and one of `world` ranks with the same model and data."""
    sp = draw.choice([size for size in (1, 2, 4) if world % size == 0])
    wp = draw.choice([size for size in (1, 2, 4) if world % size == 0 and size * sp > 1] or [world])
    shared = {
        "model__heads": 4,
        "model__kv_heads": draw.choice([1, 2, 4]),
        "model__num_layers": draw.choice([1, 2, 3]),
        "model__tie_embeddings": draw.random() < 0.5,
        "model__ffn_hidden": draw.choice([24, 27, 33]),
        "data__documents": draw.choice(["pack", "cut", "pad"]),
        "batch": {"global_size": 8, "micro_size": draw.choice([1, 2])},
        "loss": {"use": "core.cross_entropy", "label_smoothing": draw.choice([0.0, 0.1])},
        "activations": {"use": "core.recompute", "fraction": draw.choice([0.0, 0.25, 0.5, 0.75, 1.0])},
        "optimizer__groups": draw.choice([[], [{"match": "*value*", "freeze": True}]]),
    }
    weights = {
        "overlap": draw.random() < 0.8,
        "unit": draw.choice(["layer", "module"]),
        "ahead": draw.choice([0, 1, 2, 5]),
        "fused": draw.random() < 0.5,
        "reduce": draw.choice(["micro_batch", "step"]),
        "head": draw.choice(["gather", "vocabulary"]),
        "embedding": "gather" if shared["model__tie_embeddings"] else draw.choice(["gather", "hidden"]),
    }
    if weights["unit"] == "layer":
        weights["launch"] = draw.choice(["*", "attention.output", "feed_forward.*"])
    split: dict[str, Any] = {"sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": sp}} if sp > 1 else {}
    return sharded(1, 1, **shared), sharded(wp, world // sp, weights=weights, **shared, **split)


def recorded(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    return [record(tables, 3, folder=folder) for tables in plans]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "num_plans"), [(2, 1), (4, 1), pytest.param(4, 30, marks=pytest.mark.campaign)])
def test_any_plan_equals_one_process(ranks, sharded, texts, world, num_plans):
    """Any sizes with any options equal one process in fp64."""
    _, draw = drawn()
    pairs = [a_plan(draw, sharded, world) for _ in range(num_plans)]
    found = ranks(world, 600)(recorded, [tables for _, tables in pairs], texts)
    for (alone, tables), layouts in zip(pairs, zip(*found, strict=True), strict=True):
        print(tables)
        reference = record(alone, 3, folder=texts)
        assert_parity(reference, layouts, "fp64")
        same_on_all(layouts)
        for layout in layouts:
            assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9)

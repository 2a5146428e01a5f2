"""When weights are gathered, how many at a time, and of which size gradients are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.parity import assert_same_bits
from sley_testing.runs import Recorded, record, weights

BLOCKS = 4
DEEP: dict[str, Any] = {
    "model__num_layers": BLOCKS,
    "evaluation": {"every": 100, "steps": 2},
    "run": {"name": "deep", "steps": 9, "device": "cpu", "seed": 7},
}


def counted(tables: dict[str, Any], folder: Any, num_steps: int = 3) -> dict[str, Any]:
    """The counters of the last of some steps, of an evaluation, and the peaks of all."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        communicator = run.stepper.executor.weights
        prefetch, pool = communicator.prefetch, communicator.pool
        gathered: Counter[str] = Counter()
        gather = communicator._gather

        def spy(unit: Any) -> Any:
            gathered[unit.name] += 1
            return gather(unit)

        communicator._gather = spy
        for _ in range(num_steps):
            gathered.clear()
            before = prefetch.num_demands, pool.num_allocations
            with collectives() as calls:
                run.step()
        training = dict(gathered)
        demands, allocations = prefetch.num_demands - before[0], pool.num_allocations - before[1]
        left = len(prefetch.held), pool.num_lent
        gathered.clear()
        run.evaluate()
        return {
            "training": training,
            "evaluating": dict(gathered),
            "demands": demands,
            "allocations": allocations,
            "left": (left, (len(prefetch.held), pool.num_lent)),
            "max_held": prefetch.max_held,
            "max_live": communicator.reductions.max_live,
            "calls": list(calls),
        }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fraction", [0.0, 0.5, 1.0, pytest.param(0.25, marks=pytest.mark.campaign), pytest.param(0.75, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("unit", ["layer", "module"])
def test_counts_at_every_fraction(ranks, sharded, texts, fraction, unit):
    """With one micro-batch a step: two gathers per block, one for what stays between its two uses, one demand gather.

    The block before the head is still there when its backward comes, so it is gathered once. In evaluation it is one
    gather for each of the two micro-batches that a rank has.
    """
    changes = DEEP | {"batch": {"global_size": 4, "micro_size": 2}}
    activations = {"use": "core.recompute", "fraction": fraction}
    tables = sharded(2, weights={"unit": unit}, activations=activations, **changes)
    one, other = ranks(2)(counted, tables, texts)
    assert_same_sequence([one.pop("calls"), other.pop("calls")])
    assert one == other
    last = {f"blocks.{BLOCKS - 1}"} if unit == "layer" else {f"blocks.{BLOCKS - 1}.feed_forward.down"}
    for name, number in one["training"].items():
        once = name.startswith(("embed", "head")) or (name in last and not (unit == "module" and fraction == 1.0))
        assert number == (1 if once else 2), name
    assert len(one["training"]) == (BLOCKS + 2 if unit == "layer" else 7 * BLOCKS + 2)
    assert set(one["evaluating"].values()) == {2}
    assert one["demands"] == 1
    assert one["allocations"] == 0
    assert one["left"] == ((0, 0), (0, 0))
    assert one["max_held"] <= (2 if unit == "layer" else 2 * 7 + 1), "two blocks"
    assert one["max_live"] <= (2 * 7 if unit == "layer" else 4), "two blocks"


def test_one_demand_per_step_of_many_micro_batches(ranks, sharded, texts):
    """The first unit of the next micro-batch is gathered in the backward of the one before."""
    tables = sharded(2, **DEEP | {"batch": {"global_size": 16, "micro_size": 2}})
    for found in ranks(2)(counted, tables, texts):
        assert found["demands"] == 1
        assert all(number <= 8 for number in found["training"].values())


VARIANTS: dict[str, dict[str, Any]] = {
    "not overlapped": {"overlap": False},
    "by module": {"unit": "module"},
    "far ahead": {"ahead": 3},
    "not ahead": {"ahead": 0},
    "one reduction": {"reductions": 1},
    "not fused": {"fused": False},
    "after attention": {"launch": "attention.output"},
}
FAR_APART = ("not overlapped", "far ahead", "after attention")
"""Those that change most; parity with one process, and counts, are also looked at of the others."""


@pytest.mark.parametrize(
    ("activations", "names"),
    [
        ({"use": "core.keep"}, FAR_APART),
        pytest.param({"use": "core.keep"}, tuple(VARIANTS), marks=pytest.mark.campaign),
        pytest.param({"use": "core.recompute", "fraction": 0.5}, tuple(VARIANTS), marks=pytest.mark.campaign),
    ],
)
def test_no_option_changes_a_bit(ranks, sharded, texts, activations, names):
    """The bits of the mode that waits for everything at once: fp32, three steps; three ranks, so sums have an order."""
    changes = {"activations": activations, "precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}}
    changes |= {"evaluation": None, "model__num_layers": 3}
    plans = {"": sharded(3, **changes)} | {name: sharded(3, weights=VARIANTS[name], **changes) for name in names}
    for found in ranks(3, 120)(all_recorded, plans, texts):
        wanted = found.pop("")
        for name, other in found.items():
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in wanted.rows], name
            assert_same_bits(wanted.weights, other.weights)


def all_recorded(plans: dict[str, Any], folder: Any) -> dict[str, Recorded]:
    return {name: record(tables, 3, folder=folder) for name, tables in plans.items()}


def varying(tables: dict[str, Any], folder: Any, sizes: list[int]) -> Any:
    """Trains on batches of these sizes, cut from the plan's data; returns the weights."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        for size in sizes:
            batch = run.feed.next()
            run.step({name: value[: size // run.topology.dp] for name, value in batch.items()})
        return weights(run)


def test_any_number_of_micro_batches_per_step(ranks, sharded, texts):
    """1, 4 and 2 micro-batches in a step give the same bits, overlapped or not."""
    sizes = [4, 16, 8]
    changes = {"batch": {"global_size": 16, "micro_size": 2}}
    wanted, *_ = ranks(2)(varying, sharded(2, weights={"overlap": False}, **changes), texts, sizes)
    for found in ranks(2)(varying, sharded(2, **changes), texts, sizes):
        assert_same_bits(wanted, found)


def allocated(tables: dict[str, Any], folder: Any) -> tuple[int, int]:
    """Bytes of gradients that the store holds, and of everything that the parameters' `grad` holds after a step."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        run.step()
        sharded = [param for param in run.registry if param.shard is not None]
        for param in sharded:
            assert param.parameter.grad is None or param.parameter.grad is run.store.gradient(param), param
        return run.store.num_bytes, sum(param.parameter.nbytes for param in run.registry)


def test_gradients_are_of_the_size_of_shards(ranks, sharded, texts):
    """One accumulator per shard, and no placeholder of the whole weight."""
    for gradients, parameters in ranks(2)(allocated, sharded(2), texts):
        assert gradients <= parameters * 1.2, "alignment is all that is added"

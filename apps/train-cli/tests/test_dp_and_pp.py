"""Where `dp` and `pp` meet: buckets of a stage are reduced once, in its last gradient action."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import collectives
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import GRADIENTS, Recorded, record

OWN = Path(__file__).parent / "own"
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.0005}
SHARED = {"use": "pp.shared_modules"}

Tables = dict[str, Any]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(OWN)
    return OWN


def tables(schedule: str | None = None, compute: str = "fp32", **changes: Any) -> Tables:
    found = {
        "run": {"name": "both", "steps": 4, "device": "cpu", "seed": 11},
        "model": {"factory": "matrix_parts:layers", "options": {"tied": True}},
        "data": {"factory": "matrix_parts:Rows"},
        "batch": {"global_size": 16, "micro_size": 2},
        "optimizer": {"use": "core.adamw", "lr": 1e-3},
        "precision": {"compute": compute},
    }
    if schedule:
        found |= {"pipeline": {"use": schedule}, "parallel": {"pp": 2, "dp": 2}, "gradient_handlers": [BUCKETED, SHARED]}
    return found | changes


def reductions(tables: Tables, folder: Path) -> tuple[list[int], list[int], list[list[str]]]:
    """Of two steps: the elements of this stage's buckets, those of the last step's reductions, and where each began."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        reducer: Any = run.stepper.handlers[0]
        began: list[list[str]] = []
        start = reducer.sums.start

        def started(*arguments: Any) -> None:
            action = run.store.state.action
            began[-1].append("after" if action is None else f"{action.kind.value}{action.chunk}.{action.micro}")
            start(*arguments)

        reducer.sums.start = started
        stage = run.groups["stage"].ranks
        sizes: list[int] = []
        for _ in range(2):
            began.append([])
            with collectives() as calls:
                run.step()
            sizes = [call.numel for call in calls if call.op == "all_reduce" and call.ranks == stage and call.numel > 1]
        return sorted(buffer.data.numel() for buffer in run.store.buffers), sorted(sizes), began


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        ("pp.one_f_one_b", {"B0.3"}),
        ("pp.interleaved", {"B0.3", "B1.3"}),
        ("pp.zero_bubble_h1", {"W0.3", "after"}),
        ("pp.zero_bubble_v", {"W0.3", "W1.3", "after"}),
    ],
)
def test_each_bucket_is_reduced_once_in_the_last_gradient_action(
    ranks: Callable[..., Any], own: Path, schedule: str, last: set[str]
) -> None:
    """As many collectives as buckets, whatever the micro-batches; of a split backward, none before its last W."""
    for buckets, reduced, began in ranks(4)(reductions, tables(schedule), own):
        assert len(buckets) > 1
        assert reduced == buckets
        for step in began[1:]:
            assert len(step) == len(buckets)
            assert set(step) <= last


def overflow(run: Run, rank: int) -> None:
    """A gradient of this rank's is infinite in the second step."""
    if int(os.environ["RANK"]) != rank:
        return
    param = next(param for param in run.registry if "norm" in param.name)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, math.inf) if run.store.state.step == 1 else gradient

    param.parameter.register_hook(spoil)


@pytest.mark.parametrize("reduction", ["same", "bf16"])
def test_fp16_with_buckets_and_stages(ranks: Callable[..., Any], own: Path, reduction: str) -> None:
    """Near the one-process run; an overflow on the last stage of one replica is skipped by all four ranks."""
    handlers = [BUCKETED | {"reduction": reduction}, SHARED]
    half = tables("pp.zero_bubble_h1", "fp16", gradient_handlers=handlers)
    reference = record(tables(compute="fp16"), 1, folder=own)
    layouts: list[Recorded] = ranks(4, 120)(record, half, 3, folder=own, prepare=partial(overflow, rank=3))
    near = GRADIENTS["fp16" if reduction == "same" else "bf16"]
    for layout in layouts:
        first = layout.gradients[0]
        assert_close_gradients({name: reference.gradients[0][name] for name in first}, first, near)
        assert [row["skipped"] for row in layout.rows] == [0, 1, 0]
        assert [row["loss_scale"] for row in layout.rows] == [65536.0, 65536.0, 32768.0]
        assert all(value.isfinite().all() for value in layout.weights.values())
    for one, other in (layouts[:2], layouts[2:]):
        assert_same_bits(one.weights, other.weights)


def test_any_reducer_of_the_users_needs_the_tie_s_handler_behind_it(own: Path) -> None:
    """A list without it is refused, and so is one in which it comes first; left out, it is written in."""
    plan = tables("pp.one_f_one_b")
    assert check_plan(plan_from_dict(plan, own), 4) == []
    plan["gradient_handlers"] = [BUCKETED]
    with World.fake(0, 4) as world, pytest.raises(PlanError, match="stages \\[0, 1\\] share a parameter"):
        assemble(plan_from_dict(plan, own), world)
    plan["gradient_handlers"] = [SHARED, BUCKETED]
    assert [problem.code for problem in check_plan(plan_from_dict(plan, own), 4)] == ["handler-order"]
    del plan["gradient_handlers"]
    assert [handler.name for handler in plan_from_dict(plan, own).gradient_handlers] == ["core.each", "pp.shared_modules"]

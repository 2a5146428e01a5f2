"""Stages of one kind are looked at once, and several in processes of their own: both change no number."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sley_core.assemble import draft_of
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes import stages
from sley_estimate.bytes.rank import RankBytes, fake_run, rank_bytes
from sley_estimate.bytes.stages import can_fork, first_draft, forked, stage_bytes, stage_kinds
from sley_estimate.step.estimate import records_of
from sley_estimate.step.record import RankRecord
from sley_testing.plans import Tables, changed, small_plan

PLAN = small_plan(
    model__num_layers=6,
    precision={"compute": "fp32"},
    parallel={"pp": 4, "dp": 2},
    batch={"global_size": 8, "micro_size": 1},
    pipeline={"use": "pp.gpipe"},
    partition={"use": "pp.explicit", "layers": [2, 2, 2, 2]},
    gradient_handlers=[{"use": "dp.sharded"}],
)
WORLD = 8
LIMIT_S = 60.0
MANY = changed(
    PLAN,
    model__num_layers=4,
    parallel__pp=3,
    pipeline={"use": "pp.one_f_one_b"},
    partition={"use": "pp.explicit", "layers": [2, 2, 2]},
)
"""Of three kinds: each stage holds another number of micro-batches. Of two, none would be looked at in another process."""


def kinds(tables: Tables, folder: Path) -> list[int]:
    """The number of the first stage that is like it, of each stage."""
    plan = plan_from_dict(tables, folder)
    with World.fake(0, WORLD) as world:
        found = stage_kinds(plan, plan.topology(WORLD), draft_of(plan, world))
    return [found.index(kind) for kind in found]


def one_by_one(tables: Tables, folder: Path) -> list[RankBytes]:
    plan = plan_from_dict(tables, folder)
    return [rank_bytes(plan, rank, plan.world()) for rank in range(0, plan.world(), 2)]


def test_stages_of_a_kind_hold_alike(texts: Path) -> None:
    assert kinds(PLAN, texts) == [0, 1, 1, 3]
    assert list(stage_bytes(plan_from_dict(PLAN, texts), WORLD)) == one_by_one(PLAN, texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__groups": [{"match": "blocks.3.*", "weight_decay": 0.0}]},
        {"activations": {"use": "memory.selective", "layers": ["blocks.2"]}},
        {"partition": {"use": "pp.explicit", "layers": [2, 2, 3, 1]}},
        {"pipeline": {"use": "pp.one_f_one_b"}},
    ],
    ids=["another group", "another policy", "more layers", "more in flight"],
)
def test_stages_that_differ_are_of_two_kinds(texts: Path, changes: Any) -> None:
    found = kinds(changed(PLAN, **changes), texts)
    assert found[1] != found[2]


def recorded(tables: Tables, folder: Path, cores: int) -> list[RankRecord]:
    plan = plan_from_dict(tables, folder)
    size = plan.world()
    return list(records_of(plan, size, first_draft(plan, size), cores).ranks)


def in_forks(tables: Tables, folder: Path) -> tuple[list[RankBytes], list[RankRecord]]:
    assert can_fork()
    with patch.object(stages, "forked", wraps=forked) as used:
        plan = plan_from_dict(tables, folder)
        found = list(stage_bytes(plan, plan.world(), cores=2)), recorded(tables, folder, 2)
    assert used.call_count >= 4, "else nothing was done in a process of its own"
    return found


def test_processes_of_their_own_say_the_same(ranks: Any, texts: Path) -> None:
    ((num_bytes, steps),) = ranks(1, 100, init=False, fresh=True)(in_forks, MANY, texts)
    assert num_bytes == one_by_one(MANY, texts)
    assert steps == recorded(MANY, texts, 1)


def failing() -> None:
    raise RunError("estimate-layer", "it cannot be called")


def test_what_a_process_raises_is_raised_here() -> None:
    with pytest.raises(RunError, match="it cannot be called"):
        list(forked([failing], 2, LIMIT_S))


def waiting() -> None:
    time.sleep(60)


def test_a_process_that_does_not_end_is_ended() -> None:
    began, before = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(RunError, match=r"estimate-late.*not done after 0.3 s"):
        list(forked([int, waiting], 2, limit_s=0.3))
    assert time.monotonic() - began < 20
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_the_start_has_no_weight_twice(texts: Path, compute: str) -> None:
    """Values as they were made and gradients, both fp32; beside them the bucket to which values move, and masters."""
    model = {"use": "models.llama", "num_layers": 8, "hidden": 64, "heads": 4}
    reducer = {"use": "dp.sharded", "bucket_mb": 0.1}
    tables = small_plan(model=model, precision={"compute": compute}, batch__global_size=16, gradient_handlers=[reducer])
    with fake_run(plan_from_dict(tables, texts), 0, 8) as (run, ledger, _):
        numel = sum(param.numel for param in run.registry)
        largest = max(buffer.num_bytes for buffer in run.parts.weights.buffers)
        peak, _ = ledger.peak()
    assert largest < 0.1 * 4 * numel
    assert 8 * numel <= peak < 9 * numel + largest  # and half a byte of masters, and padding

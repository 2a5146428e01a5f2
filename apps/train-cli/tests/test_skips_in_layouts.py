"""`on_nan = "skip"` skips the same steps in every layout, wherever the number that is none arose, and then goes on alike."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sley_core.run import Run
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, record

NUM_STEPS = 3
PLAN = small_plan(
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__vocab_size=257,
    data__sequence=16,
    batch__micro_size=1,
    run__on_nan="skip",
    run__max_skips=1,
)
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.005}
ISP = {"use": "isp.communicator"}
INF = {"optimizer__clip_kind": "inf", "optimizer__clip_norm": 0.01}
CASES: dict[str, tuple[Tables, Tables]] = {
    "buckets": ({}, {"parallel": {"dp": 4}, "gradient_handlers": [BUCKETED]}),
    "parts of buckets": (INF, {"parallel": {"dp": 4}, "gradient_handlers": [SHARDED]}),
    "stages": (INF, {"parallel": {"pp": 2, "dp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}),
    "shards": ({}, {"parallel": {"dp": 4, "wp": 2}, "weights": ISP}),
    "slices": ({}, {"parallel": {"dp": 2, "sp": 2}, "sequence": {"use": "isp.all_to_all"}}),
}


def spoil(run: Run, rank: int) -> None:
    """One number of one gradient of this rank's is none, in the second step."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    param = next(param for param in run.registry if "norm" in param.name)

    def change(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, math.nan) if run.store.state.step == 1 else gradient

    param.parameter.register_hook(change)


def recorded(plans: list[Tables], folder: Path) -> list[Recorded]:
    """One after the other in the same ranks; the spoilt rank differs from plan to plan."""
    return [record(tables, NUM_STEPS, folder=folder, prepare=partial(spoil, rank=at % 4)) for at, tables in enumerate(plans)]


def taken(found: Recorded) -> Recorded:
    """Without the step that was skipped."""
    assert [row["skipped"] for row in found.rows] == [0, 1, 0]
    assert not math.isfinite(found.rows.pop(1)["grad_norm"])
    return found


def test_every_layout_skips_the_step_of_one_process_and_goes_on_with_its_numbers(ranks: Any, texts: Path) -> None:
    plans = [changed(PLAN, **model) | layout for model, layout in CASES.values()]
    by_rank = ranks(4, 400)(recorded, plans, texts)
    references: dict[str, Recorded] = {}
    for at, (name, (model, layout)) in enumerate(CASES.items()):
        print(name)
        if str(model) not in references:
            alone = record(changed(PLAN, **model), NUM_STEPS, folder=texts, prepare=partial(spoil, rank=0))
            references[str(model)] = taken(alone)
        reference, found = references[str(model)], [taken(rank[at]) for rank in by_rank]
        assert_parity_of_parts(reference, found, "fp64")
        assert all([row["lr"] for row in one.rows] == [row["lr"] for row in reference.rows] for one in found)
        stage = 4 // layout["parallel"].get("pp", 1)
        for first in range(0, 4, stage):
            for other in found[first + 1 : first + stage]:
                assert_same_bits(found[first].weights, other.weights)

"""Calls of `run.step` within `run.accumulate()` and the one after them equal one step on all their samples, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, gradients, weights

PLAN = small_plan(
    run__steps=9,
    model__num_layers=3,
    model__heads=2,
    model__kv_heads=None,
    model__vocab_size=257,
    data__sequence=16,
    data__documents="cut",
    batch__micro_size=1,
    optimizer__clip_norm=0.3,
    optimizer__weight_decay=0.1,
    learning_rate={"use": "core.cosine", "warmup_steps": 2},
)
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.005}
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
TIES = {"use": "pp.shared_modules"}
SLICES = {"sequence": {"use": "isp.all_to_all"}}
ISP = {"use": "isp.communicator"}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "alone": (1, {}),
    "dp2 sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}),
    "zero bubble": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}),
    "wp2 once per step": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": {**ISP, "reduce": "step"}}),
    "sp2": (2, {"parallel": {"sp": 2}, **SLICES}),
    "dp2 bucketed": (2, {"parallel": {"dp": 2}, "gradient_handlers": [BUCKETED]}),
    "dp2 each": (2, {"parallel": {"dp": 2}}),
    "dp2 powersgd in full rank": (
        2,
        {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "start_step": 9}]},
    ),
    "1f1b, tied": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "model__tie_embeddings": True}),
    "zero bubble v": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_v"}}),
    "wp2, classes and columns": (
        2,
        {"parallel": {"dp": 2, "wp": 2}, "weights": {**ISP, "head": "vocabulary", "embedding": "hidden"}},
    ),
    "wp2 of dp4 sharded": (4, {"parallel": {"dp": 4, "wp": 2}, "weights": ISP, "gradient_handlers": [SHARDED]}),
    "interleaved dp2": (
        4,
        {
            "parallel": {"pp": 2, "dp": 2},
            "pipeline": {"use": "pp.interleaved"},
            "gradient_handlers": [SHARDED, TIES],
            "model__tie_embeddings": True,
        },
    ),
    "sp2 pp2, a loss of whole sequences": (
        4,
        {
            "parallel": {"sp": 2, "pp": 2},
            "pipeline": {"use": "pp.zero_bubble_h1"},
            "loss": {"factory": "whole_losses:Smooth", "sequence": "whole"},
            **SLICES,
        },
    ),
    "recomputed": (1, {"activations": {"use": "core.recompute", "fraction": 1.0}}),
    "directly": (1, {"precision__accumulation": "direct"}),
    "states away": (1, {"offload": [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}]}),
    "on the host": (1, {"offload": [{"use": "memory.host_optimizer", "bucket_mb": 0.01}]}),
}

Batch = dict[str, Tensor]


def batches(seed: int) -> list[Batch]:
    """Global batches of three calls, of 4, 8 and 4 samples, whose numbers of labels that count differ more than their sizes."""
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for size, ignored in ((4, 0.9), (8, 0.0), (4, 0.4)):
        tokens = torch.randint(0, 256, (size, 16), generator=drawn)
        labels = torch.randint(0, 256, (size, 16), generator=drawn)
        labels[torch.rand(size, 16, generator=drawn) < ignored] = -100
        made.append({"tokens": tokens, "labels": labels})
    return made


def own(run: Run, batch: Mapping[str, Tensor]) -> Batch:
    size = len(batch["tokens"]) // run.topology.dp
    first = run.groups["dp"].coord * size
    return {name: value[first : first + size] for name, value in batch.items()}


def accumulated(tables: Tables, folder: Path, disturbs: bool) -> Recorded:
    """Takes three steps of three calls each. disturbs: evaluates, predicts and saves weights between the calls."""
    recorded = Recorded()
    heard: list[int] = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.listeners.append(lambda row: heard.append(int(row["step"])))
        recorded.first = weights(run)
        for number in range(3):
            first, second, third = (own(run, batch) for batch in batches(number))
            with run.accumulate():
                before = weights(run)
                losses = [run.evaluate(first)] if disturbs else []
                row = run.step(first)
                if disturbs:
                    assert row == {"step": number + 1, "loss": pytest.approx(losses[0], rel=1e-9)}
                    run.predict(second)
                    run.save_weights(folder / "saved")
            with run.accumulate():  # once more: calls may be told to accumulate one by one
                _, outputs = run.step(second, return_outputs=True)
                assert (outputs is None) == (not run.stepper.executor.has_loss)
            if disturbs:
                run.evaluate(first)
            assert_same_bits(before, weights(run))
            recorded.rows.append(run.step(third))
            recorded.gradients.append(gradients(run))
            assert run.num_steps_done == number + 1
        recorded.weights = weights(run)
        assert heard == [1, 2, 3]
    return recorded


def at_once(tables: Tables, folder: Path) -> Recorded:
    """Takes the same three steps, each with all samples."""
    recorded = Recorded()
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        recorded.first = weights(run)
        for number in range(3):
            parts = batches(number)
            recorded.rows.append(run.step({name: torch.cat([part[name] for part in parts]) for name in parts[0]}))
            recorded.gradients.append(gradients(run))
        recorded.weights = weights(run)
    return recorded


@pytest.mark.sample(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_equal_one_step_of_all(ranks: Any, texts: Path, layout: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "own")
    size, changes = LAYOUTS[layout]
    disturbs = list(LAYOUTS).index(layout) % 2 == 1
    model = {key: value for key, value in changes.items() if key.startswith(("model", "loss"))}
    wanted = at_once(changed(PLAN, **model), texts)
    tables = changed(PLAN, **changes)
    found = [accumulated(tables, texts, disturbs)] if size == 1 else ranks(size, 120)(accumulated, tables, texts, disturbs)
    assert_parity_of_parts(wanted, found, "fp64")
    assert [row["tokens"] for row in found[0].rows] == [row["tokens"] for row in wanted.rows]

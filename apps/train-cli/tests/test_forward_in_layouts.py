"""A program forwards its own batch in any layout: outputs and losses are those of the layers, called one after the other."""

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
from sley_testing.runs import weights

PLAN = small_plan(
    model__num_layers=3,
    model__heads=2,
    model__kv_heads=None,
    model__vocab_size=257,
    data__sequence=16,
    data__documents="cut",
    batch__micro_size=1,
)
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.005}
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
VOCABULARY = {"use": "isp.communicator", "head": "vocabulary"}
SLICES = {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "dp2 sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}),
    "pp2": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}),
    "sp2": (2, SLICES),
    "wp2": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}),
    "wp2 shared classes": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": VOCABULARY}),
    "zero bubble v": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_v"}}),
    "wp2 sp2 shared classes": (4, {**SLICES, "parallel": {"dp": 2, "sp": 2, "wp": 4}, "weights": VOCABULARY}),
    "interleaved dp2": (
        4,
        {
            "parallel": {"pp": 2, "dp": 2},
            "pipeline": {"use": "pp.interleaved"},
            "gradient_handlers": [BUCKETED, {"use": "pp.shared_modules"}],
        },
    ),
    "zero bubble sp2": (4, {**SLICES, "parallel": {"sp": 2, "pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}),
}

Batch = dict[str, Tensor]


def batches() -> list[Batch]:
    """Global batches of 8 and 4 samples; labels that do not count are spread unevenly over samples."""
    drawn = torch.Generator().manual_seed(5)
    made = []
    for size in (8, 4):
        tokens = torch.randint(0, 256, (size, 16), generator=drawn)
        labels = torch.randint(0, 256, (size, 16), generator=drawn)
        labels[torch.rand(size, 16, generator=drawn) < torch.linspace(0, 0.9, size)[:, None]] = -100
        made.append({"tokens": tokens, "labels": labels})
    return made


def own(run: Run, batch: Mapping[str, Tensor]) -> Batch:
    size = len(batch["tokens"]) // run.topology.dp
    return rows_of(batch, run.groups["dp"].coord * size, size)


def rows_of(batch: Mapping[str, Tensor], first: int, size: int) -> Batch:
    return {name: value[first : first + size] for name, value in batch.items()}


def forwarded(tables: Tables, folder: Path) -> dict[str, Any]:
    """Forwards before, between and after steps."""
    found: dict[str, Any] = {}
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        found["rows"] = run.rows
        found["slice"] = run.groups["sp"].coord if run.topology.sp > 1 else None
        large, small = (own(run, batch) for batch in batches())
        found["untrained"] = run.predict(large)
        before = weights(run)
        row, found["in step"] = run.step(large, return_outputs=True)
        found["loss in step"] = row["loss"]
        assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())
        after = weights(run)
        read = {name: value for name, value in small.items() if name != "labels"}
        found["joined"] = run.predict(read, join=True)
        found["listed"] = run.predict([rows_of(read, at, 1) for at in range(len(read["tokens"]))], join=True)
        found["losses"] = run.evaluate(small), run.evaluate(large)
        assert_same_bits(after, weights(run))
        found["next"], found["after"] = run.step(large)["loss"], run.predict(small, join=True)
    return found


def by_hand(tables: Tables, folder: Path) -> dict[str, Any]:
    """Calls the layers of one process one after the other."""
    found: dict[str, Any] = {}
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:

        def called(batch: Batch) -> Tensor:
            value: tuple[Any, ...] = ()
            with torch.no_grad():
                for layer in run.layers:
                    value = (layer.module(*value, **{name: batch[name] for name in layer.fields}),)
            return value[0]

        def loss(batch: Batch) -> float:
            logits = called(batch).flatten(0, 1)
            return float(torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()))

        large, small = batches()
        found["untrained"], found["loss in step"] = called(large), loss(large)
        run.step(large)
        found["joined"], found["losses"], found["next"] = called(small), (loss(small), loss(large)), loss(large)
        run.step(large)
        found["after"] = called(small)
    return found


def check(found: dict[str, Any], wanted: dict[str, Any], dp: int, coord: int) -> None:
    def rows(value: Tensor) -> Tensor:
        return value.chunk(dp)[coord]

    def close(got: Tensor, due: Tensor) -> None:
        assert got.shape == due.shape
        assert not got.requires_grad
        torch.testing.assert_close(got, due, rtol=1e-9, atol=1e-9)

    numbers = [found["loss in step"], *found["losses"], found["next"]]
    assert numbers == pytest.approx([wanted["loss in step"], *wanted["losses"], wanted["next"]], rel=1e-9)
    if found["joined"] is None:  # a stage without the last layer
        assert [found[key] for key in ("untrained", "in step", "listed", "after")] == [None] * 4
        return
    untrained = rows(wanted["untrained"])
    if found["slice"] is not None:
        untrained = untrained.chunk(2, 1)[found["slice"]]
    close(found["untrained"], untrained)
    close(found["in step"], untrained)
    for key in ("joined", "after"):
        close(found[key], rows(wanted[key]))
    close(torch.cat(found["listed"]), found["joined"])


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_losses_are_those_of_the_layers(ranks: Any, texts: Path, layout: str):
    size, changes = LAYOUTS[layout]
    wanted = by_hand(PLAN, texts)
    every = ranks(size, 120)(forwarded, changed(PLAN, **changes), texts)
    dp = changes.get("parallel", {}).get("dp", 1)
    for found in every:
        check(found, wanted, dp, found["rows"].start * dp // 8)
    assert any(found["joined"] is not None for found in every)


def test_one_process_has_the_outputs_of_its_layers(texts: Path):
    check(forwarded(PLAN, texts), by_hand(PLAN, texts), 1, 0)

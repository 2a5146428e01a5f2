"""A program's own batches have the outputs and losses of the layers in every layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import running, weights
from sley_trainer.run import Run

Batch = dict[str, Tensor]
BATCH = {"global_size": 4, "micro_size": 1}
PLAN = small_plan(run__steps=9, model__vocab_size=257, data__sequence=16, data__documents="cut", batch=BATCH)
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
VOCABULARY = {"use": "isp.communicator", "head": "vocabulary"}
SLICES = {"sequence": {"use": "isp.all_to_all"}}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "zero bubble, sp 2": (4, {**SLICES, "parallel": {"sp": 2, "pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}),
    "zero bubble v": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_v"}}),
    "wp 2, sp 2, classes": (4, {**SLICES, "parallel": {"dp": 2, "sp": 2, "wp": 4}, "weights": VOCABULARY}),
    "dp 2, sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}),
}


def batches(*sizes: int, seed: int = 5) -> list[Batch]:
    """Returns global batches of these sizes. Ignored labels are spread unevenly over the samples."""
    generator = torch.Generator().manual_seed(seed)
    global_batches = []
    for size in sizes:
        tokens, labels = torch.randint(0, 256, (2, size, 16), generator=generator)
        labels[torch.rand(size, 16, generator=generator) < torch.linspace(0, 0.9, size)[:, None]] = -100
        global_batches.append({"tokens": tokens, "labels": labels})
    return global_batches


def own_rows(run: Run, batch: Mapping[str, Tensor]) -> Batch:
    size = len(batch["tokens"]) // run.topology.dp
    return rows_of(batch, run.groups["dp"].coord * size, size)


def rows_of(batch: Mapping[str, Tensor], first: int, size: int) -> Batch:
    return {name: value[first : first + size] for name, value in batch.items()}


def call_run(tables: Tables, folder: Path) -> dict[str, Any]:
    """Returns the outputs and losses of a run before, between and after steps."""
    results: dict[str, Any] = {}
    with running(tables, folder) as run:
        results["rows"] = run.rows
        results["slice"] = run.groups["sp"].coord if run.topology.sp > 1 else None
        large, small = (own_rows(run, batch) for batch in batches(4, 2))
        results["untrained"] = run.predict(large)
        row, results["in step"] = run.step(large, return_outputs=True)
        after = weights(run)
        inputs = {name: value for name, value in small.items() if name != "labels"}
        results["joined"] = run.predict(inputs, join=True)
        results["listed"] = run.predict([rows_of(inputs, at, 1) for at in range(len(inputs["tokens"]))], join=True)
        losses = run.evaluate(small), run.evaluate(large)
        assert_same_bits(after, weights(run))
        results["losses"] = [row["loss"], *losses, run.step(large)["loss"]]
        results["after"] = run.predict(small, join=True)
    return results


def call_layers(tables: Tables, folder: Path) -> dict[str, Any]:
    """Returns the same outputs and losses by calling the layers of one process."""
    results: dict[str, Any] = {}
    with running(tables, folder) as run:

        def forward(batch: Batch) -> Tensor:
            value: tuple[Any, ...] = ()
            with torch.no_grad():
                for layer in run.layers:
                    value = (layer.module(*value, **{name: batch[name] for name in layer.fields}),)
            return value[0]

        def loss(batch: Batch) -> float:
            return float(F.cross_entropy(forward(batch).flatten(0, 1), batch["labels"].flatten()))

        large, small = batches(4, 2)
        results["untrained"], first = forward(large), loss(large)
        run.step(large)
        results["joined"], results["losses"] = forward(small), [first, loss(small), loss(large), loss(large)]
        run.step(large)
        results["after"] = forward(small)
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_losses_are_those_of_the_layers(ranks: Any, texts: Path, layout: str) -> None:
    size, changes = LAYOUTS[layout]
    expected = call_layers(PLAN, texts)
    by_rank = ranks(size, 120)(call_run, changed(PLAN, **changes), texts)
    dp = changes.get("parallel", {}).get("dp", 1)
    for results in by_rank:
        coord = results["rows"].start * dp // 4
        assert results["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        if results["joined"] is None:  # a stage without the last layer
            assert [results[key] for key in ("untrained", "in step", "listed", "after")] == [None] * 4
            continue
        untrained = expected["untrained"].chunk(dp)[coord]
        if results["slice"] is not None:
            untrained = untrained.chunk(2, 1)[results["slice"]]
        pairs = [
            (results["untrained"], untrained),
            (results["in step"], untrained),
            (torch.cat(results["listed"]), results["joined"]),
        ]
        pairs += [(results[key], expected[key].chunk(dp)[coord]) for key in ("joined", "after")]
        for value, reference in pairs:
            assert not value.requires_grad
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-9)
    assert any(results["joined"] is not None for results in by_rank)

"""Chunks of the head change no loss and no gradient, no tensor holds all logits, and what does not fit is refused by name."""

from math import prod
from pathlib import Path
from typing import Any

import own_heads
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.engine import reduction
from sley_core.errors import RunError, SleyError
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import assert_parity, assert_same_run, record, record_reference, running

MODEL = {"model": {"factory": "own_heads:layers"}}
TOKENS, WIDTH = 2 * 24, 16
"""The tokens of a microbatch, and the width of a hidden state."""


def chunked(tables: Tables, size: int | str) -> Tables:
    return changed(tables, loss={"use": "core.cross_entropy"} | tables.get("loss", {}) | {"chunk_tokens": size})


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [1, 7, "auto"])
@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"model__tie_embeddings": True}, "fp64"),
        ({"loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}, "fp64"),
        ({"precision": {"compute": "fp32", "accumulation": "autograd"}}, "fp32"),
        ({"precision": {"compute": "fp32", "accumulation": "direct"}}, "fp32"),
        ({"precision": {"compute": "bf16"}}, "bf16"),
        ({"precision": {"compute": "fp16", "loss_scale": {"init_scale": 256.0}}}, "fp16"),
        ({"optimizer__groups": [{"match": "head.output*", "freeze": True}]}, "fp64"),
        ({"optimizer__groups": [{"match": "[eb]*", "freeze": True}]}, "fp64"),
        ({"model": {"factory": "own_heads:layers", "options": {"change": "soft cap"}}}, "fp64"),
        ({"model": {"factory": "own_heads:layers", "options": {"change": "method"}}}, "fp64"),
        ({"model": {"factory": "own_heads:layers", "options": {"change": "linear"}}}, "fp64"),
        (MODEL | {"optimizer__groups": [{"match": "*.weight", "freeze": True}]}, "fp64"),
    ],
)
def test_chunks_change_no_loss_and_no_gradient(texts: Path, changes: Tables, precision: str, size: int | str) -> None:
    batch = {"global_size": 4, "micro_size": 2}
    tables = small_plan(evaluation={"every": 9, "steps": 1}, batch=batch, **changes)
    assert_parity(record_reference(tables, 2, folder=texts), [record(chunked(tables, size), 2, folder=texts)], precision)


def test_chunks_without_labels_and_negative_labels(texts: Path) -> None:
    """All labels of the first chunks are ignored, and in the second step those of a microbatch."""
    tables = small_plan(**MODEL)
    with running(tables, texts) as run:
        batches = [run.feed.next() for _ in range(2)]
    for batch in batches:
        batch["labels"][0] = -100
        batch["labels"][1, :20] = -1
    batches[1]["labels"][:2] = -100
    expected = record(tables, 2, folder=texts, batches=batches)
    assert_parity(expected, [record(chunked(tables, 5), 2, folder=texts, batches=batches)], "fp64")


def test_products_in_bf16_are_added_a_few_rows_at_a_time(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = small_plan(precision={"compute": "bf16"})
    expected = record(tables, 2, folder=texts)
    monkeypatch.setattr(reduction, "MAX_PRODUCT_BYTES", 5 * WIDTH * 2)
    assert_parity(expected, [record(chunked(tables, 7), 2, folder=texts)], "bf16")


def test_canonical_sums_in_chunks_have_the_same_bits_on_two_ranks(texts: Path, ranks: Any) -> None:
    tables = chunked(small_plan(parallel={"reduction": "canonical"}), 7)
    expected = record(tables, 2, folder=texts)
    for actual in ranks(2)(record, changed(tables, parallel={"reduction": "canonical", "dp": 2}), 2, folder=texts):
        assert_same_run(expected, actual)


def test_losses_of_sources_in_chunks(texts: Path) -> None:
    text = {"use": "data.text", "sequence": 24, "weight": 1.0}
    sources = [text | {"name": name, "files": [f"text/{name}.txt"]} for name in "ab"]
    tables = small_plan(data={"use": "data.mixture", "sequence": 24, "sources": sources})
    expected, actual = (record(plan, 1, folder=texts).rows[0] for plan in (tables, chunked(tables, 10)))
    for name in ("loss/a", "loss/b", "share/a"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-12)


class Shapes(TorchDispatchMode):
    """Records the shapes of all results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.shapes.add(tuple(tensor.shape))
        return result


def test_no_tensor_holds_the_logits_of_more_than_a_chunk(texts: Path) -> None:
    tables = small_plan(evaluation={"every": 9, "steps": 1})
    for size, most in ((None, TOKENS), (10, 10)):  # 48 tokens are five chunks
        with running(tables if size is None else chunked(tables, size), texts) as run, Shapes() as seen:
            run.step()
            run.evaluate()
        num_classes = run.layers[-1].module.output.out_features
        shapes = {shape for shape in seen.shapes if shape[-1:] == (num_classes,)} - {(num_classes,), (WIDTH, num_classes)}
        assert max(prod(shape[:-1]) for shape in shapes) == most


def test_a_call_by_hand_and_predictions_return_logits(texts: Path) -> None:
    tables = small_plan()
    outputs = []
    for plan in (tables, chunked(tables, 7)):
        with running(plan, texts) as run:
            run.step()
            batch = {name: value[:2] for name, value in run.feed.next().items()}
            hidden = batch["tokens"]
            for layer in run.layers:
                hidden = layer.module(*([hidden] if layer.name != "embed" else [batch["tokens"]]))
            outputs.append(hidden.detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"change": "mean"}, "logits-split.* logits that only the loss computes"),
        ({"change": "product"}, "logits-split.* logits that only the loss computes"),
        ({"two": True}, r"head-chunks.* has `0`, `1\.output`"),
    ],
)
def test_other_changes_of_logits_and_two_linears_in_the_last_layer_are_refused(texts: Path, options: Any, says: str) -> None:
    tables = chunked(small_plan(model={"factory": "own_heads:layers", "options": options}), "auto")
    with pytest.raises(SleyError, match=says), running(tables, texts) as run:
        run.step()


def test_a_scaled_cross_entropy_is_refused(texts: Path) -> None:
    """The weight's gradient is accumulated before the loss is scaled, so it would be wrong."""
    with running(chunked(small_plan(), 7), texts) as run:
        run.stepper.executor.loss = own_heads.Halved(run.plan.loss.config)
        with pytest.raises(RunError, match="loss-scaled"):
            run.step()

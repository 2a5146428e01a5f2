"""A step splits samples of any accepted form into microbatches, and rejects every other form by name."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.data.batches import SequenceSlicer
from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.step_batch import BatchSplitter
from sley_core.errors import RunError
from sley_testing.collectives import collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.plain import split_batch
from sley_testing.runs import RunRecord, assert_equal_replicas, assert_parity, record, running, weights

FIELDS = {"tokens": Field("int64", 0, 1, "token"), "labels": Field("int64", 0, 1), "ends": Field("int32", 0)}
INFO = DataInfo(FIELDS, vocab_size=100)


class Count:
    """A loss that weighs labels, and remembers of which shapes."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def weight(self, batch: Any) -> float:
        self.asked.append(tuple(batch["labels"].shape))
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Any, batch: Any) -> Tensor:
        raise AssertionError("nothing is computed here")


def splitter(num_slices: int = 1, index: int = 0, *, computes_weight: bool = True) -> BatchSplitter:
    return BatchSplitter(INFO, 2, SequenceSlicer(FIELDS, num_slices, index), Count(), computes_weight=computes_weight)


def a_batch(size: int = 6) -> dict[str, Tensor]:
    tokens = torch.arange(size * 8).view(size, 8)
    labels = torch.where(tokens % 5 == 0, -100, tokens)
    return {"ends": torch.arange(size, dtype=torch.int32).view(size, 1), "labels": labels, "tokens": tokens}


@pytest.mark.parametrize(("num_slices", "index"), [(1, 0), (2, 0), (2, 1)])
def test_one_batch_and_its_micro_batches_are_the_same_step(num_slices: int, index: int) -> None:
    forms: list[Any] = [a_batch(), split_batch(a_batch(), 2), tuple(split_batch(a_batch(), 2))]
    whole, *others = [splitter(num_slices, index).split_input(form) for form in forms]
    assert whole.num_microbatches == 3
    for other in others:
        assert sum(other.weights) == sum(whole.weights) > 0
        for wanted, found in zip(whole.micros, other.micros, strict=True):
            assert list(wanted) == list(found), "in the declared order"
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert list(whole.micros[0])[:3] == list(FIELDS)
    assert whole.micros[0]["tokens"].shape == (2, 8 // num_slices)
    assert all(piece["tokens"].shape[1] == 8 for piece in (*whole.whole, *others[0].whole)), "sequences are whole there"


def test_a_batch_is_cut_without_a_copy_and_weighed_in_one_piece() -> None:
    splits, batch = splitter(), a_batch()
    splits.split_feed(batch)
    splits.loss.asked.clear()
    batch = splits.split_feed(batch | {"tokens": batch["tokens"]})
    assert splits.loss.asked == [(6, 8)], "a shape that is known is not asked for its parts again"
    assert batch.micros[1]["tokens"].data_ptr() == batch.whole[0]["tokens"][2:].data_ptr()


@pytest.mark.parametrize(
    ("given", "code", "match"),
    [
        (torch.zeros(2, 8), "batch-fields", "but got a Tensor"),
        ("tokens", "batch-fields", "but got a str"),
        ([torch.zeros(2, 8)], "batch-fields", "but got a list of Tensor"),
        ([a_batch(2), None], "batch-fields", "but got a list of NoneType, dict"),
        (iter([a_batch(2)]), "batch-fields", "but got a list_iterator"),
        ([a_batch(2), {"lables": a_batch(2)["tokens"]}], "batch-fields", "lables"),
        ([a_batch(2) | {"tokens": [[1], [2]]}], "batch-fields", "`tokens` must be a tensor, but is a list"),
        ([], "batch-size", r"the list's items have \[\] microbatches, but each must have 1 \(\[batch\] micro_size = 2\)"),
        ([a_batch(4)], "batch-size", r"the list's items have \[2\] microbatches, but each must have 1"),
        (a_batch(0), "batch-size", r"must be a multiple of \[batch\] micro_size = 2, but is 0"),
        (a_batch(3), "batch-size", r"must be a multiple of \[batch\] micro_size = 2, but is 3"),
        ([a_batch(2), a_batch(1)], "batch-size", r"must be a multiple of \[batch\] micro_size = 2, but is 1"),
        ([a_batch(2), a_batch(2) | {"tokens": a_batch(2)["tokens"] + 99}], "token-out-of-range", "the token id 100"),
    ],
)
def test_what_is_wrong_is_named(given: Any, code: str, match: str) -> None:
    with pytest.raises(RunError, match=match) as caught:
        splitter().split_input(given)
    assert caught.value.diagnostics[0].code == code


SIZES = (2, 8, 4)
"""Samples of each step's global batch; on two ranks with microbatches of one that is 1, 4 and 2 microbatches."""


def own_steps(tables, folder, sizes):
    """Steps on own batches of these sizes, this rank's share of each: rows, weights, and what was sent in each step."""
    recorded = RunRecord()
    sent = []
    with running(tables, folder) as run:
        recorded.initial_weights = weights(run)
        run.stepper.compare = None  # the first step compares first values, beside what is counted here
        for step, size in enumerate(sizes):
            mine = size // run.world.size
            own = importlib.import_module("own_data").batch(10 * step + run.world.rank * mine, mine)
            with collectives() as calls:
                recorded.rows.append(run.step(own))
            sent.append([str(call) for call in calls])
            recorded.gradients.append({e.name: run.store.gradient(e).clone() for e in run.store.params})
        recorded.weights = weights(run)
    return recorded, sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_steps_of_1_4_and_2_micro_batches(ranks, own, small, recompute):
    tables = small(activations={"use": "core.recompute" if recompute else "core.keep"})
    reference, _ = own_steps(tables, own, SIZES)
    layouts, sent = zip(*ranks(2)(own_steps, tables, own, SIZES), strict=True)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)
    for wanted, found in zip(reference.gradients, layouts[0].gradients, strict=True):
        assert_close_gradients(wanted, found, 1e-10)
    assert [row["tokens"] for row in layouts[0].rows] == [12 * size for size in SIZES]
    assert sent[0] == sent[1]
    assert sent[0][0] == sent[0][1] == sent[0][2], "more microbatches cost no more communication"


def test_micro_batches_that_are_shorter_than_one_another_are_the_batch_of_which_the_rest_is_padding(own, small):
    """No label counts there."""
    batch = importlib.import_module("own_data").batch(0, 4)
    lengths = (12, 3, 7, 5)
    padded = {name: value.clone() for name, value in batch.items()}
    for at, length in enumerate(lengths):
        padded["labels"][at, length:] = -100
    short = [{name: value[at : at + 1, :length] for name, value in batch.items()} for at, length in enumerate(lengths)]
    full, ragged = (record(small(), 1, folder=own, batches=[one]) for one in (padded, short))
    assert_close_gradients(full.gradients[0], ragged.gradients[0], 1e-10)
    assert ragged.rows[0]["loss"] == pytest.approx(full.rows[0]["loss"], rel=1e-12)
    assert ragged.rows[0]["tokens"] == sum(lengths)

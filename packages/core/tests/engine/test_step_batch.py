"""Whatever form samples are given in, a step sees micro-batches; what is no such thing is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.data.batches import Slices
from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.step_batch import BatchSplitter
from sley_core.errors import RunError

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


def splitter(num_slices: int = 1, index: int = 0, *, weighs: bool = True) -> BatchSplitter:
    return BatchSplitter(INFO, 2, Slices(FIELDS, num_slices, index), Count(), weighs=weighs)


def a_batch(size: int = 6) -> dict[str, Tensor]:
    tokens = torch.arange(size * 8).view(size, 8)
    labels = torch.where(tokens % 5 == 0, -100, tokens)
    return {"ends": torch.arange(size, dtype=torch.int32).view(size, 1), "labels": labels, "tokens": tokens}


def apart(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[at : at + 2] for name, value in batch.items()} for at in range(0, len(batch["tokens"]), 2)]


@pytest.mark.parametrize(("num_slices", "index"), [(1, 0), (2, 0), (2, 1)])
def test_one_batch_and_its_micro_batches_are_the_same_step(num_slices: int, index: int) -> None:
    forms: list[Any] = [a_batch(), apart(a_batch()), tuple(apart(a_batch()))]
    whole, *others = [splitter(num_slices, index).given(form) for form in forms]
    assert whole.num_micros == 3
    for other in others:
        assert other.weight == whole.weight > 0
        for wanted, found in zip(whole.micros, other.micros, strict=True):
            assert list(wanted) == list(found), "in the declared order"
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert list(whole.micros[0])[:3] == list(FIELDS)
    assert whole.micros[0]["tokens"].shape == (2, 8 // num_slices)
    assert all(piece["tokens"].shape[1] == 8 for piece in (*whole.whole, *others[0].whole)), "sequences are whole there"


def test_a_batch_is_cut_without_a_copy_and_weighed_in_one_piece() -> None:
    splits, batch = splitter(), a_batch()
    splits.fed(batch)
    splits.loss.asked.clear()
    batch = splits.fed(batch | {"tokens": batch["tokens"]})
    assert splits.loss.asked == [(6, 8)], "a shape that is known is not asked for its parts again"
    assert batch.micros[1]["tokens"].data_ptr() == batch.whole[0]["tokens"][2:].data_ptr()


def test_micro_batches_may_differ_in_length() -> None:
    micros = apart(a_batch())
    micros[1] = {name: value[:, :3] for name, value in micros[1].items()}
    found = splitter().given(micros)
    assert [micro["tokens"].shape for micro in found.micros] == [(2, 8), (2, 3), (2, 8)]


@pytest.mark.parametrize(
    ("given", "code", "match"),
    [
        (torch.zeros(2, 8), "batch-fields", "not a Tensor"),
        ("tokens", "batch-fields", "not a str"),
        ([torch.zeros(2, 8)], "batch-fields", "not a list of Tensor"),
        ([a_batch(2), None], "batch-fields", "not a list of NoneType, dict"),
        (iter([a_batch(2)]), "batch-fields", "not a list_iterator"),
        ([a_batch(2), {"lables": a_batch(2)["tokens"]}], "batch-fields", "lables"),
        ([a_batch(2) | {"tokens": [[1], [2]]}], "batch-fields", "`tokens` is a list, not a tensor"),
        ([], "batch-size", r"has \[\] times \[batch\] micro_size = 2"),
        ([a_batch(4)], "batch-size", r"has \[2\] times"),
        ([a_batch(2), a_batch(1)], "batch-size", "1 samples of this rank are no multiple"),
        ([a_batch(2), a_batch(2) | {"tokens": a_batch(2)["tokens"] + 99}], "token-out-of-range", "the token id 100"),
    ],
)
def test_what_is_wrong_is_named(given: Any, code: str, match: str) -> None:
    with pytest.raises(RunError, match=match) as caught:
        splitter().given(given)
    assert caught.value.diagnostics[0].code == code

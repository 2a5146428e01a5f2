"""Slices of a batch join to the batch, count each label once, and know their places in the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.config import CrossEntropyConfig
from sley_core.data.batches import Slices, sliced_info
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import PlanError, RunError
from sley_core.losses.cross_entropy import CrossEntropy

TOKENS = {"tokens": Field("int64", 0, 1), "labels": Field("int64", 0, 1)}
PACKED = {**TOKENS, "positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}


def a_batch() -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12)
    return {"tokens": tokens, "labels": torch.where(tokens % 5 == 0, -100, tokens + 1)}


def a_packed_batch() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    return a_batch() | {"positions": positions, "cu_seqlens": torch.tensor([[0, 5, 12], [0, 5, 12]])}


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_packed_positions_are_the_data_s_own(num_slices: int) -> None:
    """Positions go with their tokens; boundaries are those of the whole sequence in every slice."""
    batch = a_packed_batch()
    parts = [Slices(PACKED, num_slices, index)(batch) for index in range(num_slices)]
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    assert all(part["cu_seqlens"] is batch["cu_seqlens"] for part in parts)


@pytest.mark.parametrize("num_slices", [2, 3])
def test_positions_that_the_data_lacks_are_places_in_the_whole(num_slices: int) -> None:
    parts = [Slices(TOKENS, num_slices, index)(a_batch()) for index in range(num_slices)]
    positions = torch.cat([part["positions"] for part in parts], dim=1)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, torch.arange(12).repeat(2, 1))


def test_one_slice_is_the_batch_itself() -> None:
    batch = a_batch()
    assert Slices(TOKENS, 1, 0)(batch) is batch
    info = DataInfo(TOKENS, sequence=7)
    assert sliced_info(info, 1) is info


def test_a_model_is_told_of_positions_and_of_the_whole_sequence() -> None:
    info = sliced_info(DataInfo(TOKENS, vocab_size=9, sequence=12), 2)
    assert info == DataInfo({**TOKENS, "positions": Field("int64", 0, 1)}, vocab_size=9, sequence=12)
    assert sliced_info(DataInfo(PACKED), 2).fields == PACKED


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tokens": Field("int64"), "labels": Field("int64")}, "no field"),
        ({**TOKENS, "positions": Field("int64")}, "not the field `positions`"),
    ],
)
def test_data_that_does_not_say_where_sequences_lie(fields: dict[str, Field], what: str) -> None:
    with pytest.raises(PlanError, match=what) as caught:
        sliced_info(DataInfo(fields), 2)
    assert caught.value.diagnostics[0].code == "sequence-field"


def test_a_sequence_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match="sequence = sp x slice fails: 10 is no multiple of 4"):
        sliced_info(DataInfo(TOKENS, sequence=10), 4)
    with pytest.raises(RunError, match="does not divide into 5 along dim 1"):
        Slices(TOKENS, 5, 0)(a_batch())


def test_slices_weigh_what_the_whole_weighs() -> None:
    """Each label counts once, so the weights of the slices add up."""
    loss = CrossEntropy(CrossEntropyConfig())
    parts = [Slices(TOKENS, 3, index, loss)(a_batch()) for index in range(3)]
    assert sum(loss.weight(part) for part in parts) == loss.weight(a_batch()) == 19


class PerSample:
    """A loss of one label per sample: no slice can know it alone."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(len(batch["label"]))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("never asked")


def test_a_loss_that_counts_once_per_slice_is_refused() -> None:
    fields = {"tokens": Field("int64", 0, 1), "label": Field("int64")}
    slices = Slices(fields, 2, 0, PerSample())
    with pytest.raises(RunError, match=r"is 2, but its slices weigh 2 \+ 2 = 4") as caught:
        slices({"tokens": torch.zeros(2, 4, dtype=torch.int64), "label": torch.zeros(2, dtype=torch.int64)})
    assert caught.value.diagnostics[0].code == "loss-not-additive"

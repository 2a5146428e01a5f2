"""Slices of a batch join to the batch, count each label once, and know their places in the whole sequence."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.data.batches import SequenceSlicer, add_positions, check_tokens, count_microbatches, narrow_batch
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import PlanError, RunError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plugin import CrossEntropyConfig

FIELDS = {
    "tokens": Field("int64", 0, 1),
    "cu_seqlens": Field("int32", 0, None),
    "time_major": Field("float32", batch_dim=1, sequence_dim=0),
}


def a_batch() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(24).view(4, 6),
        "cu_seqlens": torch.arange(8, dtype=torch.int32).view(4, 2),
        "time_major": torch.arange(72.0).view(6, 4, 3),
    }


@pytest.mark.parametrize("dim", ["batch", "sequence"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_parts_join_to_the_batch_along_each_fields_own_dim(dim: str, num_parts: int) -> None:
    batch = a_batch()
    parts = [narrow_batch(batch, FIELDS, index, num_parts, dim) for index in range(num_parts)]
    for name, field in FIELDS.items():
        along = field.batch_dim if dim == "batch" else field.sequence_dim
        pieces = [part[name] for part in parts]
        if along is None:
            assert all(piece is batch[name] for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, along), batch[name])


@pytest.mark.parametrize(("dim", "num_parts"), [("batch", 3), ("sequence", 4)])
def test_what_does_not_divide_is_an_error(dim: str, num_parts: int) -> None:
    with pytest.raises(RunError, match="`tokens` of shape \\(4, 6\\) cannot be split into"):
        narrow_batch(a_batch(), FIELDS, 0, num_parts, dim)


def test_micro_batches_are_counted_along_each_fields_own_dim() -> None:
    assert [count_microbatches(a_batch(), FIELDS, size) for size in (1, 2, 4)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("changes", "micro_size", "match"),
    [
        ({}, 3, "samples of this rank must be a multiple of \\[batch\\] micro_size = 3, but is 4"),
        ({}, 8, "samples of this rank must be a multiple"),
        ({"time_major": torch.zeros(4, 6, 3)}, 2, "`time_major` has 6 samples, but `tokens` has 4"),
        ({"time_major": torch.zeros(4)}, 2, "`time_major` of shape \\(4,\\) has no dim 1"),
        ({"tokens": [[1], [2], [3], [4]]}, 2, "`tokens` must be a tensor, but is a list"),
        ({"extra": torch.zeros(4)}, 2, "'extra'"),
    ],
)
def test_what_makes_no_micro_batches_is_an_error(changes: dict[str, Any], micro_size: int, match: str) -> None:
    with pytest.raises(RunError, match=match):
        count_microbatches(a_batch() | changes, FIELDS, micro_size)


TOKENS = {"tokens": Field("int64", 0, 1), "labels": Field("int64", 0, 1)}
PACKED = {**TOKENS, "positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}


def tokens_and_labels() -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12)
    return {"tokens": tokens, "labels": torch.where(tokens % 5 == 0, -100, tokens + 1)}


def a_packed_batch() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    return tokens_and_labels() | {"positions": positions, "cu_seqlens": torch.tensor([[0, 5, 12], [0, 5, 12]])}


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_packed_positions_are_the_data_s_own(num_slices: int) -> None:
    """Positions go with their tokens; boundaries are those of the whole sequence in every slice."""
    batch = a_packed_batch()
    parts = [SequenceSlicer(PACKED, num_slices, index)(batch) for index in range(num_slices)]
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    assert all(part["cu_seqlens"] is batch["cu_seqlens"] for part in parts)


@pytest.mark.parametrize("num_slices", [2, 3])
def test_positions_that_the_data_lacks_are_places_in_the_whole(num_slices: int) -> None:
    parts = [SequenceSlicer(TOKENS, num_slices, index)(tokens_and_labels()) for index in range(num_slices)]
    positions = torch.cat([part["positions"] for part in parts], dim=1)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, torch.arange(12).repeat(2, 1))


def test_a_model_is_told_of_positions_and_of_the_whole_sequence() -> None:
    info = add_positions(DataInfo(TOKENS, vocab_size=9, sequence=12), 2)
    assert info == DataInfo({**TOKENS, "positions": Field("int64", 0, 1)}, vocab_size=9, sequence=12)
    assert add_positions(DataInfo(PACKED), 2).fields == PACKED


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": Field("int64"), "labels": Field("int64")}, "sequence-field.*no field"),
        ({**TOKENS, "positions": Field("int64")}, "sequence-field.*the field `positions` does not declare"),
        (TOKENS, "sequence-does-not-divide.* sp = 2, but is 7"),
    ],
)
def test_data_that_does_not_say_where_sequences_lie(fields: dict[str, Field], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        add_positions(DataInfo(fields, sequence=7), 2)


def test_slices_weigh_what_the_whole_weighs() -> None:
    """Each label counts once, so the weights of the slices add up."""
    loss = CrossEntropy(CrossEntropyConfig())
    parts = [SequenceSlicer(TOKENS, 3, index, loss)(tokens_and_labels()) for index in range(3)]
    assert sum(loss.weight(part) for part in parts) == loss.weight(tokens_and_labels()) == 19


class PerSample:
    """A loss of one label per sample: no slice can know it alone."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(len(batch["label"]))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("never asked")


def test_a_loss_that_counts_once_per_slice_is_refused() -> None:
    fields = {"tokens": Field("int64", 0, 1), "label": Field("int64")}
    slices = SequenceSlicer(fields, 2, 0, PerSample())
    with pytest.raises(
        RunError, match=r"the 2 slices must add up to the loss weight of the batch, 2, but their sum is 2 \+ 2 = 4"
    ) as caught:
        slices({"tokens": torch.zeros(2, 4, dtype=torch.int64), "label": torch.zeros(2, dtype=torch.int64)})
    assert caught.value.diagnostics[0].code == "loss-not-additive"


INFO = DataInfo(
    {
        "tokens": Field("int64", 0, 1, ids="token"),
        "labels": Field("int64", 0, 1, ids="label"),
        "positions": Field("int64", 0, 1),
    },
    vocab_size=10,
)


def within_the_vocabulary() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[0, 1, 2], [3, 4, 9]]),
        "labels": torch.tensor([[1, 2, -100], [4, 9, -1]]),
        "positions": torch.full((2, 3), 1000),
    }


@pytest.mark.parametrize(("name", "value"), [("tokens", 10), ("tokens", -1), ("tokens", -100), ("labels", 10)])
def test_the_error_names_field_value_sample_and_position(name: str, value: int) -> None:
    batch = within_the_vocabulary()
    batch[name][1, 2] = value
    with pytest.raises(RunError, match=f"`{name}` has the token id {value} in sample 77 at position 2") as caught:
        check_tokens(batch, INFO, samples=(5, 77))
    assert caught.value.diagnostics[0].code == "token-out-of-range"
    with pytest.raises(RunError, match="row 1 of the batch"):
        check_tokens(batch, INFO)


def test_only_fields_that_are_there_are_checked() -> None:
    with pytest.raises(RunError, match="`labels`"):
        check_tokens({"labels": torch.tensor([[10]]), "more": torch.tensor([[10]])}, INFO)

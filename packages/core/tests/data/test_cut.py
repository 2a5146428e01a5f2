from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_core.data.batches import count_micros, cut
from sley_core.data.dataset import Field
from sley_core.errors import RunError

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
    parts = [cut(batch, FIELDS, index, num_parts, dim) for index in range(num_parts)]
    for name, field in FIELDS.items():
        along = field.batch_dim if dim == "batch" else field.sequence_dim
        pieces = [part[name] for part in parts]
        if along is None:
            assert all(piece is batch[name] for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, along), batch[name])


def test_a_part_is_a_view() -> None:
    batch = a_batch()
    cut(batch, FIELDS, 1, 2)["tokens"].zero_()
    assert batch["tokens"][2:].eq(0).all()
    assert batch["tokens"][1].ne(0).all()


@pytest.mark.parametrize(("dim", "num_parts"), [("batch", 3), ("sequence", 4)])
def test_what_does_not_divide_is_an_error(dim: str, num_parts: int) -> None:
    with pytest.raises(RunError, match="`tokens` of shape \\(4, 6\\) does not divide"):
        cut(a_batch(), FIELDS, 0, num_parts, dim)


def test_fields_are_the_declared_ones() -> None:
    batch = a_batch()
    batch["lables"] = batch.pop("cu_seqlens")
    with pytest.raises(RunError, match="lables"):
        cut(batch, FIELDS, 0, 2)


def test_micro_batches_are_counted_along_each_fields_own_dim() -> None:
    assert [count_micros(a_batch(), FIELDS, size) for size in (1, 2, 4)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("changes", "micro_size", "match"),
    [
        ({}, 3, "4 samples of this rank are no multiple of \\[batch\\] micro_size = 3"),
        ({}, 8, "4 samples of this rank are no multiple"),
        ({"time_major": torch.zeros(4, 6, 3)}, 2, "`time_major` has 6 samples, and `tokens` has 4"),
        ({"time_major": torch.zeros(4)}, 2, "`time_major` of shape \\(4,\\) has no dim 1"),
        ({"tokens": [[1], [2], [3], [4]]}, 2, "`tokens` is a list, not a tensor"),
        ({"extra": torch.zeros(4)}, 2, "'extra'"),
    ],
)
def test_what_makes_no_micro_batches_is_an_error(changes: dict[str, Any], micro_size: int, match: str) -> None:
    with pytest.raises(RunError, match=match):
        count_micros(a_batch() | changes, FIELDS, micro_size)

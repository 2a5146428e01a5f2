from __future__ import annotations

import pytest
import torch

from sley_core.data.batches import check_tokens
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import RunError

INFO = DataInfo(
    {
        "tokens": Field("int64", 0, 1, ids="token"),
        "labels": Field("int64", 0, 1, ids="label"),
        "positions": Field("int64", 0, 1),
    },
    vocab_size=10,
)


def a_batch() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[0, 1, 2], [3, 4, 9]]),
        "labels": torch.tensor([[1, 2, -100], [4, 9, -1]]),
        "positions": torch.full((2, 3), 1000),
    }


def test_a_batch_within_the_vocabulary_passes() -> None:
    check_tokens(a_batch(), INFO)


@pytest.mark.parametrize(("name", "value"), [("tokens", 10), ("tokens", -1), ("tokens", -100), ("labels", 10)])
def test_the_error_names_field_value_sample_and_position(name: str, value: int) -> None:
    batch = a_batch()
    batch[name][1, 2] = value
    with pytest.raises(RunError, match=f"`{name}` has the token id {value} in sample 77 at position 2") as caught:
        check_tokens(batch, INFO, samples=(5, 77))
    assert caught.value.diagnostics[0].code == "token-out-of-range"
    with pytest.raises(RunError, match="row 1 of the batch"):
        check_tokens(batch, INFO)


def test_the_row_is_that_of_the_fields_batch_dim() -> None:
    info = DataInfo({"tokens": Field("int64", batch_dim=1, sequence_dim=0, ids="token")}, vocab_size=10)
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    tokens[2, 1] = 11
    with pytest.raises(RunError, match="sample 8 at position 2"):
        check_tokens({"tokens": tokens}, info, samples=(7, 8))


def test_only_fields_that_are_there_are_checked() -> None:
    with pytest.raises(RunError, match="`labels`"):
        check_tokens({"labels": torch.tensor([[10]]), "more": torch.tensor([[10]])}, INFO)


def test_without_a_vocabulary_nothing_is_checked() -> None:
    check_tokens({"tokens": torch.tensor([[10**9]])}, DataInfo({"tokens": INFO.fields["tokens"]}))

"""Labels that are the tokens of their own places are refused in the first batch, where it is certain that they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sley_core.config import CrossEntropyConfig
from sley_core.errors import RunError
from sley_core.losses.cross_entropy import CrossEntropy

IDS = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(1))
REPEATED = torch.full((4, 8), 7)
MASKED = torch.where(torch.arange(8) < 3, -100, IDS[:, :-1])


def weight(batch: dict[str, Tensor], **table: bool) -> float:
    return CrossEntropy(CrossEntropyConfig(**table)).weight(batch)


@pytest.mark.parametrize("labels", [IDS[:, :-1], MASKED], ids=["all", "with a prompt that does not count"])
@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_tokens_as_labels_are_refused(labels: Tensor, name: str) -> None:
    batch = {name: IDS[:, :-1], "labels": labels}
    with pytest.raises(RunError, match=f"`labels` equals `{name}`") as caught:
        weight(batch)
    assert caught.value.diagnostics[0].code == "labels-not-shifted"
    assert weight(batch, copying=True) == float((labels != -100).sum())


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": IDS[:, :-1], "labels": IDS[:, 1:]},
        {"tokens": REPEATED, "labels": REPEATED},
        {"tokens": IDS[:, :-1], "labels": torch.full((4, 8), -100)},
        {"tokens": IDS[:, 0], "labels": IDS[:, 0]},
        {"positions": IDS[:, :-1], "labels": IDS[:, :-1]},
        {"tokens": IDS[:, :-1].float(), "labels": IDS[:, :-1]},
    ],
    ids=["shifted", "repeated", "ignored", "a class per sample", "positions", "numbers"],
)
def test_what_may_be_right_is_left_alone(batch: dict[str, Tensor]) -> None:
    assert weight(batch) == float((batch["labels"] != -100).sum())


def test_only_the_first_batch_is_looked_at() -> None:
    loss = CrossEntropy(CrossEntropyConfig())
    loss.weight({"tokens": IDS[:, :-1], "labels": IDS[:, 1:]})
    assert loss.weight({"tokens": IDS, "labels": IDS}) == 36.0

"""A model whose first layer writes on a field of the batch, itself or by way of a view that it passes on."""

from __future__ import annotations

from pp_parts import Embed, Head
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo


class Marks(Embed):
    """Labels that shall not count."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        labels.masked_fill_(tokens % 3 != 0, -100)
        return super().forward(tokens)


class Passes(Embed):
    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens), labels[:, :2]


class MarksLater(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        hidden, view = given
        view.fill_(-100)
        return hidden


def model(data: DataInfo, how: str, hidden: int = 8) -> list[tuple[str, nn.Module]]:
    assert data.vocab_size is not None
    blocks = [(f"blocks.{at}", nn.Linear(hidden, hidden)) for at in range(4)]
    head = ("head", Head(hidden, data.vocab_size))
    if how == "passed on":
        return [("embed", Passes(data.vocab_size, hidden)), ("marks", MarksLater()), *blocks, head]
    return [("embed", Marks(data.vocab_size, hidden)), *blocks, head]

"""A dataset whose samples name themselves: for mixtures."""

import random
from typing import Any

import torch
from torch import Tensor


class Numbered:
    """`count` samples with the ids `first`, `first` + 1, ...; with `draws` also a random number each, drawn as it is read.

    epochs: those that it was told of.
    """

    def __init__(self, count: int, first: int = 0, draws: bool = False, context: Any = None) -> None:
        self.count, self.first, self.draws = count, first, draws
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        more = {"drawn": torch.tensor(random.random())} if self.draws else {}
        return {"id": torch.tensor(self.first + index), **more}


def stream(**_: Any) -> Any:
    """A stream, which has no numbers."""

    class TokenStream:
        def __iter__(self) -> Any:
            return iter([{"id": torch.tensor(0)}])

    return TokenStream()

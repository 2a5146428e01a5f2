"""Losses of one's own: `factory = "own_losses:Mean"`. Not all of them can be trained with."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def summed(output, batch, reduction="sum"):
    return F.cross_entropy(output.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100, reduction=reduction)


class Sum:
    """What the hint of a mean loss says."""

    def weight(self, batch):
        return (batch["labels"] != -100).sum().item()

    def loss(self, output, batch):
        return summed(output, batch)


class Mean(Sum):
    """Everybody's first loss."""

    def weight(self, batch):
        return 1.0

    def loss(self, output, batch):
        return summed(output, batch, "mean")


class Counted(Sum):
    """Says in each row how many of the batch's labels the model had right."""

    def attach(self, parts):
        self.correct = 0
        parts.numbers.add("own/correct", self._taken)

    def _taken(self):
        correct, self.correct = self.correct, 0
        return correct

    def loss(self, output, batch):
        if output.requires_grad:  # not in an evaluation
            self.correct += (output.argmax(-1) == batch["labels"]).sum()
        return summed(output, batch)


class Tempered(nn.Module, Sum):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0), requires_grad=trained)

    def loss(self, output, batch):
        return summed(output / self.temperature, batch)


class Centres(Sum):
    """Holds modules where torch would not find them."""

    def __init__(self) -> None:
        self.parts = {"all": [nn.Linear(2, 2)]}


class Closed(Sum):
    def __init__(self) -> None:
        scale = torch.ones((), requires_grad=True)
        self.loss = partial(lambda output, batch, power: summed(output * scale**power, batch), power=2)


class InPlace(Sum):
    """Writes in place on what the model gave out."""

    def loss(self, output, batch):
        total = summed(output.clone(), batch)
        with torch.no_grad():
            output.fill_(7.0)
        return total


class OfFirst(Sum):
    """Reads the first of several outputs."""

    def loss(self, output, batch):
        return summed(output[0], batch)

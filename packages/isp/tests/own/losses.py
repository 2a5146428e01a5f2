"""Losses of one's own over positions: one that is a sum over them, and some that look from one to another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Batch = Mapping[str, Tensor]


class Sum:
    """Cross-entropy, each position by itself."""

    fields: tuple[str, ...] = ("labels",)

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] != -100).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


class Counting(Sum):
    """Begins with a tenth, as one that is warmed up: how often it was called is part of what it is."""

    calls = 0

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return super().loss(output, batch) * min(1.0, self.calls / 10)


class Half(Sum):
    """Rounds what it is given, and its sum."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output.bfloat16(), batch).float()


class Weighted(Sum):
    """By classes, in fp32 as torch has class weights."""

    def __init__(self) -> None:
        self.classes = torch.linspace(0.1, 1.7, 256)

    def weight(self, batch: Batch) -> float:
        return float(self.classes[batch["labels"]].sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        weight = self.classes.to(output.dtype)
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), weight, reduction="sum")


class Smooth(Sum):
    """Also wants neighbours to be alike; those at the end of a slice have none."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) + (output[:, 1:] - output[:, :-1]).square().sum()


class Shifted(Sum):
    """Shifts its labels itself, as transformers' losses do, and counts them all the same."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output[:, :-1], {"labels": batch["labels"][:, 1:]})


class Pooled(Sum):
    """Looks at the mean over the sequence."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) + output.mean(1).square().sum() * output.shape[1]


class Drawn(Sum):
    """Draws random numbers, but each position by itself."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output + torch.randn_like(output), batch)


class Contrastive:
    """Tells each sample of a micro-batch from the others by the mean of its sequence; weighs a sample once, however long it is.
    draws: how much noise it adds, which it draws itself.
    """

    def __init__(self, draws: float = 0.0) -> None:
        self.draws = draws

    def weight(self, batch: Batch) -> float:
        return float(len(batch["labels"]))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        drawn = torch.randn(output.shape[-1], dtype=output.dtype) * self.draws
        pooled = F.normalize(output.mean(1) + drawn, dim=-1)
        first = F.normalize(output[:, 0], dim=-1)
        return F.cross_entropy(pooled @ first.T * 5, torch.arange(len(output)), reduction="sum")

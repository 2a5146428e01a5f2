"""Losses: one that holds its contract, and some that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import Tensor


class Naive:
    """Squared errors of the elements that are not masked, summed in fp32 at least."""

    fields = ("y", "mask")

    def weight(self, batch) -> float:
        return float(batch["mask"].sum())

    def loss(self, output: Tensor, batch) -> Tensor:
        wide = output if output.dtype == torch.float64 else output.float()
        return ((wide - batch["y"]).square() * batch["mask"]).sum()


class Mean(Naive):
    """Divides by what it sums."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return super().loss(output, batch) / self.weight(batch)


class Calls(Naive):
    """Weighs each call as one."""

    def weight(self, batch) -> float:
        return 1.0


class Narrow(Naive):
    """Sums in the dtype of the model."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return ((output - batch["y"].to(output.dtype)).square() * batch["mask"].to(output.dtype)).sum()


class Doubled(torch.autograd.Function):
    """A sum whose backward is twice its derivative."""

    @staticmethod
    def forward(ctx, terms: Tensor) -> Tensor:
        ctx.save_for_backward(terms)
        return terms.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (terms,) = ctx.saved_tensors
        return 2 * gradient * torch.ones_like(terms)


class Twice(Naive):
    """Has a backward of its own, which forgets a factor."""

    def loss(self, output: Tensor, batch) -> Tensor:
        wide = output if output.dtype == torch.float64 else output.float()
        return Doubled.apply((wide - batch["y"]).square() * batch["mask"])


class Keeps(Naive):
    """Keeps the last output, to report it."""

    def loss(self, output: Tensor, batch) -> Tensor:
        self.last = output
        return super().loss(output, batch)


class Running(Naive):
    """Takes the mean of all batches so far from the labels."""

    total = 0.0

    def loss(self, output: Tensor, batch) -> Tensor:
        self.total += float(batch["y"].mean())
        return super().loss(output, {**batch, "y": batch["y"] - self.total})


class Writes(Naive):
    """Masks the model's output where it lies."""

    def loss(self, output: Tensor, batch) -> Tensor:
        with torch.no_grad():
            output.mul_(batch["mask"])
        return super().loss(output, batch)


class Fields(Naive):
    """Reads a field that it does not name."""

    fields = ("y",)


class Detached(Naive):
    """Returns a number."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return super().loss(output.detach(), batch)


class Each(Naive):
    """Returns the loss of each sample."""

    def loss(self, output: Tensor, batch) -> Tensor:
        wide = output if output.dtype == torch.float64 else output.float()
        return ((wide - batch["y"]).square() * batch["mask"]).sum(1)


class Empty(Naive):
    """Counts one too many, so as not to divide by 0."""

    def weight(self, batch) -> float:
        return max(1.0, super().weight(batch))

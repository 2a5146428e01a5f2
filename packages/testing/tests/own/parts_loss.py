"""Losses: a correct one, and some with one bug each."""

import torch
from torch import Tensor


class Naive:
    """Sums the squared errors of unmasked elements in at least fp32."""

    fields = ("y", "mask")

    def weight(self, batch) -> float:
        return float(batch["mask"].sum())

    def loss(self, output: Tensor, batch) -> Tensor:
        wide = output if output.dtype == torch.float64 else output.float()
        return ((wide - batch["y"]).square() * batch["mask"]).sum()


class Mean(Naive):
    """Returns a mean."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return super().loss(output, batch) / self.weight(batch)


class Calls(Naive):
    """Returns the weight 1 for every batch."""

    def weight(self, batch) -> float:
        return 1.0


class Narrow(Naive):
    """Sums in the dtype of the output."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return ((output - batch["y"].to(output.dtype)).square() * batch["mask"].to(output.dtype)).sum()


class Twice(Naive):
    """Returns the correct value with twice its gradient."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return super().loss(2 * output - output.detach(), batch)


class Keeps(Naive):
    """Keeps the last output."""

    def loss(self, output: Tensor, batch) -> Tensor:
        self.last = output
        return super().loss(output, batch)


class Running(Naive):
    """Subtracts the mean of earlier batches from the labels."""

    total = 0.0

    def loss(self, output: Tensor, batch) -> Tensor:
        self.total += float(batch["y"].mean())
        return super().loss(output, {**batch, "y": batch["y"] - self.total})


class Writes(Naive):
    """Masks the model's output in place."""

    def loss(self, output: Tensor, batch) -> Tensor:
        with torch.no_grad():
            output.mul_(batch["mask"])
        return super().loss(output, batch)


class Fields(Naive):
    """Does not name a field that it reads."""

    fields = ("y",)


class Detached(Naive):
    """Detaches the output."""

    def loss(self, output: Tensor, batch) -> Tensor:
        return super().loss(output.detach(), batch)


class Empty(Naive):
    """Returns a weight of at least 1."""

    def weight(self, batch) -> float:
        return max(1.0, super().weight(batch))

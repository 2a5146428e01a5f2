"""A step's totals, equal on all ranks, and their way to the host: read at once on CPU, a step later on CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.comm.compare import Exchanges
from sley_core.comm.device import Device


class Votes(NamedTuple):
    """Holds what this rank asks of all ranks. stop: to stop after the step. save: to save a checkpoint after it."""

    stop: bool = False
    save: bool = False


LOSS, NORM, WEIGHT, STOPS, SAVES, DIFFERS = range(6)
"""The index of each of a step's totals. In fp16 the number of ranks with an overflow follows, then plugins' numbers."""

USUAL = [1.0, 1e9, 1.0, 0.0, 0.0, 0.0]
"""Totals of a normal step whose gradients are clipped, for a device whose tensors have no values."""


@dataclass(frozen=True)
class StepTotals:
    """Holds what ranks sum at the end of a step.

    values: float64 [6 or more] on the device, the same on all ranks: the sum of the loss over the global batch, the gradient
    norm, the batch's weight, how many ranks ask to stop, how many for a checkpoint, and 0 if all ranks' unmarked exchanges were
    the same; then, in fp16, how many ranks found a gradient that is not finite, and the sums of the numbers that plugins add.
    own_loss, own_exchanges: this rank's share of the loss, a scalar, and its exchanges, to explain a failure. loss_scale: of
    this step, only in fp16.
    """

    values: Tensor
    own_loss: Tensor
    own_exchanges: Exchanges
    loss_scale: float | None = None

    def read(self, device: Device) -> list[float]:
        """Returns the values on the host; waits for the device."""
        return device.read(self.values, [*USUAL, *[0.0] * (self.values.numel() - len(USUAL))])

    @property
    def allow_a_step(self) -> Tensor:
        """Bool tensor on the device: the function `allow_a_step`, without waiting for the device."""
        is_number = torch.isfinite(self.values[:WEIGHT]).all()
        return is_number & (self.values[WEIGHT] > 0) & (self.values[DIFFERS] == 0)


def allow_a_step(values: Sequence[float]) -> bool:
    """Returns whether loss and norm are finite, the batch has weight, and all ranks exchanged the same."""
    is_number = math.isfinite(values[LOSS]) and math.isfinite(values[NORM])
    return is_number and values[WEIGHT] > 0 and values[DIFFERS] == 0


@dataclass(frozen=True)
class StepResult:
    """Holds a step's totals on the host. loss: the mean over the global batch. weight: of the global batch.

    ranks_differ: whether some ranks exchanged other things than the others. numbers: the sums of what plugins add to the row.
    skipped: no rank's weights changed, because some rank's gradients overflowed in fp16.
    """

    loss: float
    grad_norm: float
    weight: float
    wants_stop: bool
    wants_save: bool
    ranks_differ: bool
    numbers: list[float]
    loss_scale: float | None = None
    skipped: bool = False

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class PendingTotals:
    """Holds totals that are being copied to the host. own_loss: this rank's, on the device. own_exchanges: this rank's unmarked
    exchanges. ended: the end of the step in the device's work.
    """

    def __init__(self, totals: StepTotals, device: Device) -> None:
        self._device = device
        self.own_loss = totals.own_loss
        self.own_exchanges = totals.own_exchanges
        self._totals = replace(totals, values=device.fetch(totals.values))
        self.ended = device.moment()

    def read(self) -> StepResult:
        """Returns the totals on the host; waits for their copy, and for nothing later on the device."""
        self._device.wait_until(self.ended)
        scale = self._totals.loss_scale
        loss, grad_norm, weight, stops, saves, differs, *more = self._totals.read(self._device)
        skipped, numbers = (False, more) if scale is None else (more[0] > 0, more[1:])
        mean = loss / weight if weight else 0.0
        return StepResult(mean, grad_norm, weight, stops > 0, saves > 0, differs != 0, numbers, scale, skipped)

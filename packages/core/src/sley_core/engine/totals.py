"""A step's totals, equal on all ranks, and how they reach the host: at once on CPU, a step later on CUDA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.comm.compare import Exchanges
from sley_core.comm.device import Device


class Votes(NamedTuple):
    """What this rank asks all for. stop: after the step. save: a checkpoint after it."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepTotals:
    """Float64 scalars on the device, equal on all ranks except `own_loss` and `own_exchanges`.

    loss: the sum over the global batch. weight: its divisor. stops, saves: how many ranks ask to stop, and for a
    checkpoint. own_loss, own_exchanges: this rank's share of the sum and its exchanges, to explain a failure. differs: 0 if all
    ranks' unmarked exchanges were the same. numbers: [n], the sums of the numbers that plugins add to the row. loss_scale: of
    this step, and overflows: how many ranks found a gradient that is not finite; only in fp16.
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor
    stops: Tensor
    saves: Tensor
    own_loss: Tensor
    differs: Tensor
    own_exchanges: Exchanges
    numbers: Tensor
    loss_scale: float | None = None
    overflows: Tensor | None = None

    @property
    def allow_a_step(self) -> Tensor:
        """Bool tensor on the device: loss and norm are finite, the batch has weight, and all ranks exchanged the same."""
        is_number = torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)
        return is_number & (self.weight > 0) & (self.differs == 0)


@dataclass(frozen=True)
class StepResult:
    """A step's totals on the host. loss: the mean over the global batch. weight: of the global batch.

    ranks_differ: some have exchanged other things. numbers: the sums of what plugins add to the row. skipped: nobody's weights
    moved, because some rank's gradients overflowed in fp16.
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
    """Totals on their way to the host. own_loss: this rank's, on the device. own_exchanges: this rank's, without marks."""

    def __init__(self, totals: StepTotals, device: Device) -> None:
        overflows = [] if totals.overflows is None else [totals.overflows]
        scalars = [totals.loss, totals.grad_norm, totals.stops, totals.saves, totals.weight, totals.differs, *overflows]
        values = torch.cat([torch.stack(scalars), totals.numbers])
        self._num_overflows = len(overflows)
        self._device = device
        self.own_loss = totals.own_loss
        self.own_exchanges = totals.own_exchanges
        self._loss_scale = totals.loss_scale
        self._event: torch.cuda.Event | None = None
        if device.is_async:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record()
        else:
            self._values = values

    def read(self) -> StepResult:
        """Returns the totals on the host; waits for their copy, and for nothing later on the device."""
        if self._event is not None:
            self._event.synchronize()
        usual = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, *[0.0] * (self._values.numel() - 6)]
        loss, grad_norm, stops, saves, weight, differs, *more = self._device.read(self._values, usual)
        overflows, numbers = more[: self._num_overflows], more[self._num_overflows :]
        mean = loss / weight if weight else 0.0
        votes, skipped = (stops > 0, saves > 0), any(overflows)
        return StepResult(mean, grad_norm, weight, *votes, differs != 0, numbers, self._loss_scale, skipped)

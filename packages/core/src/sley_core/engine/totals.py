"""What all ranks know after a step, and how it reaches the host: at once on CPU, a step later on CUDA."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sley_core.comm.compare import Exchanges
from sley_core.comm.device import Device


@dataclass(frozen=True)
class StepTotals:
    """Float64 scalars on the device, equal on all ranks.

    loss: the sum over the global batch. weight: by which it is divided. stops: how many ranks ask to stop.
    own_loss: this rank's part of the sum, and own_exchanges, by which only a failure is explained. differs: 0 if ranks that
    exchange without marks have exchanged the same.
    numbers: [n], the sums of what plugins add to the row.
    loss_scale: of this step, and overflows: how many ranks found a gradient that is not finite; only in fp16.
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor
    stops: Tensor
    own_loss: Tensor
    differs: Tensor
    own_exchanges: Exchanges
    numbers: Tensor
    loss_scale: float | None = None
    overflows: Tensor | None = None

    @property
    def allow_a_step(self) -> Tensor:
        """A bool on the device: loss and norm are numbers of the same exchanges, and something in the batch counts."""
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
    ranks_differ: bool
    numbers: list[float]
    loss_scale: float | None = None
    skipped: bool = False

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class PendingTotals:
    """Totals on their way to the host; `read` waits for them, and only for them. own_loss: this rank's, on the device.

    own_exchanges: this rank's, without marks.
    """

    def __init__(self, totals: StepTotals, device: Device) -> None:
        overflows = [] if totals.overflows is None else [totals.overflows]
        scalars = torch.stack([totals.loss, totals.grad_norm, totals.stops, totals.weight, totals.differs, *overflows])
        values = torch.cat([scalars, totals.numbers])
        self._num_overflows = len(overflows)
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
        if self._event is not None:
            self._event.synchronize()
        loss, grad_norm, stops, weight, differs, *more = self._values.tolist()
        overflows, numbers = more[: self._num_overflows], more[self._num_overflows :]
        mean = loss / weight if weight else 0.0
        return StepResult(mean, grad_norm, weight, stops > 0, differs != 0, numbers, self._loss_scale, any(overflows))

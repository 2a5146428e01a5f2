"""Reads a step's totals, which are equal on all ranks, adjusts fp16's loss scale, and skips or refuses steps.

On a CPU, totals are read at once; on CUDA, one step later.

The loss scale lifts gradients above fp16's smallest numbers, and is lowered when they exceed its largest:

    `growth_interval` steps in a row without overflow ──> scale x growth_factor
    an overflow on any rank of the world              ──> nobody steps; scale x backoff_factor, but not below min_scale
    an overflow at min_scale                          ──> RunError: the scale is not the cause

The rule comes from torch.amp.GradScaler, which has no minimum and could skip steps forever. All ranks see the same totals, so
they have the same scale.

With `on_nan = "skip"` a step whose loss or gradient norm is not finite changes no weight and no optimizer state, and the
learning-rate schedule does not count it. On CUDA the optimizer's kernels skip the update. The host learns of the skip after it
has queued the next step's forward and backward, before it sets the next learning rate:

    step n: update, totals ──> copy to the host ──┐
    step n + 1: forward, backward ────────────────┴─> settle: was n skipped? ──> its learning rate, update
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sley_core.comm.device import Device, Moment
from sley_core.engine.agreement import Exchanges, exchange_mismatch_error
from sley_core.engine.parts import Parts
from sley_core.errors import RunError
from sley_core.plan.tables import LossScaleTable


class Votes(NamedTuple):
    """This rank's requests at the end of a step. stop: whether to stop the run. save: whether to save a checkpoint."""

    stop: bool = False
    save: bool = False


LOSS, NORM, WEIGHT, STOPS, SAVES, DIFFERS = range(6)
"""The indices of a step's totals. The plugins' numbers follow."""

TYPICAL_TOTALS = [1.0, 1e9, 1.0, 0.0, 0.0, 0.0]
"""The totals of a normal step, in which gradients are clipped. `StepTotals.read` returns them on a simulated device."""


@dataclass(eq=False)
class StepTotals:
    """The sums over all ranks at the end of a step. values: float64 [6 or more], the same on all ranks, on the device until
    `fetch`: loss, gradient norm and weight of the global batch; the numbers of ranks that request a stop and a checkpoint; 0 if
    all ranks logged the same exchanges; the plugins' numbers; the loss terms of each data source (`SourceSums`). local_loss:
    this rank's share of the loss, a scalar, for errors. local_exchanges: this rank's exchanges, for errors. loss_scale: the
    loss scale in fp16, else None. end: the moment at which the step ends on the device, valid after `fetch`.
    """

    values: torch.Tensor
    local_loss: torch.Tensor
    local_exchanges: Exchanges
    device: Device
    loss_scale: float | None = None
    end: Moment = field(default=0.0, init=False)

    def fetch(self) -> None:
        """Starts to copy `values` to the host. Must be called once, at the end of the step."""
        self.values = self.device.copy_to_host(self.values)
        self.end = self.device.moment()

    def read(self) -> "StepResult":
        """Waits for the copy that `fetch` started, but for no later work on the device, and returns the result of the step."""
        self.device.wait_until(self.end)
        typical_values = [*TYPICAL_TOTALS, *[0.0] * (self.values.numel() - len(TYPICAL_TOTALS))]
        loss, grad_norm, weight, stops, saves, differs, *numbers = self.device.read_values(self.values, typical_values)
        is_skipped = self.loss_scale is not None and not math.isfinite(grad_norm)
        mean = loss / weight if weight else 0.0
        return StepResult(mean, grad_norm, weight, stops > 0, saves > 0, differs != 0, numbers, self.loss_scale, is_skipped)

    @property
    def allows_update_on_device(self) -> torch.Tensor:
        """Returns `StepResult.allows_update` as a bool scalar on the device, without a wait for the device."""
        is_number = torch.isfinite(self.values[:WEIGHT]).all()
        return is_number & (self.values[WEIGHT] > 0) & (self.values[DIFFERS] == 0)


@dataclass(frozen=True)
class StepResult:
    """A step's totals on the host. loss: the mean over the global batch; 0 if its weight is 0. weight: the global batch's loss
    weight. wants_stop, wants_save: whether a rank requests a stop or a checkpoint. ranks_differ: whether ranks made different
    exchanges. numbers: the sums of the plugins' numbers and of the loss terms of each data source. loss_scale: the loss scale
    in fp16, else None. is_skipped: whether no weight changed because a rank's gradients overflowed in fp16.
    """

    loss: float
    grad_norm: float
    weight: float
    wants_stop: bool
    wants_save: bool
    ranks_differ: bool
    numbers: list[float]
    loss_scale: float | None = None
    is_skipped: bool = False

    @property
    def is_finite(self) -> bool:
        """Returns whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def allows_update(self) -> bool:
        """Returns whether the update may be applied: the loss and the norm are finite, the batch's weight is positive, and all
        ranks made the same exchanges.
        """
        return self.is_finite and self.weight > 0 and not self.ranks_differ

    @property
    def is_refused(self) -> bool:
        """Returns whether an error prevented the step. A skip by the fp16 loss scale is not an error."""
        return self.ranks_differ or not (self.is_skipped or self.allows_update)

    @property
    def is_skippable(self) -> bool:
        """Returns whether only a non-finite loss or norm prevented the step, so that `on_nan = "skip"` skips it."""
        return not self.is_finite and not (self.ranks_differ or self.is_skipped) and self.weight > 0


FP32_MAX = torch.finfo(torch.float32).max
"""The largest fp32 number. It bounds the loss scale, since a backward starts from scale / weight in the dtype of the loss."""


class LossScale:
    """The loss scale of fp16. value: the factor of the next step's loss. num_skipped: how many steps have been skipped."""

    def __init__(self, config: LossScaleTable) -> None:
        self.config = config
        self.value = config.init_scale
        self.num_skipped = 0
        self._num_good = 0

    def update(self, step: int, *, overflowed: bool) -> None:
        """Adjusts the scale after `step` (from 0). Raises RunError `loss-scale-exhausted` for an overflow at the minimum."""
        config = self.config
        if overflowed:
            if self.value <= config.min_scale:
                message = (
                    f"the gradients of step {step + 1} overflow even at the smallest loss scale, {self.value:g}; "
                    f"{self.num_skipped} steps have already been skipped"
                )
                hint = 'lower the learning rate, check the data of this step, or compute in "bf16"'
                raise RunError("loss-scale-exhausted", message, hint=hint)
            self.value = max(self.value * config.backoff_factor, config.min_scale)
            self.num_skipped += 1
            self._num_good = 0
            return
        self._num_good = (self._num_good + 1) % config.growth_interval
        if not self._num_good and self.value * config.growth_factor <= FP32_MAX:
            self.value *= config.growth_factor

    def state(self) -> dict[str, float | int]:
        """Returns the values to save in a checkpoint, which `restore` reads."""
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Restores the values that the method `state` returned earlier."""
        self.value = float(state["value"])
        self._num_good = int(state["num_good"])
        self.num_skipped = int(state["num_skipped"])


class Skips:
    """Counts skipped steps. max_in_a_row: the limit of consecutive skips. num_skipped: the number of all skips. num_in_a_row:
    the number of consecutive skips up to the last settled step.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self.max_in_a_row = max_in_a_row
        self.num_skipped = 0
        self.num_in_a_row = 0
        self._unread: StepTotals | None = None

    def record(self, totals: StepTotals) -> None:
        """Records the totals of the last step. Asserts that the previous totals have been counted."""
        assert self._unread is None, "a step was launched before the previous step was counted"
        self._unread = totals

    def settle(self, totals: StepTotals | None = None) -> None:
        """Waits for the totals of the last step, and counts the step if it was skipped. Does nothing if the step is settled
        already, or if `totals` are not None and belong to another step.
        """
        if self._unread is None or (totals is not None and totals is not self._unread):
            return
        read, self._unread = self._unread, None
        is_skipped = read.read().is_skippable
        self.num_skipped += is_skipped
        self.num_in_a_row = self.num_in_a_row + 1 if is_skipped else 0

    def state(self) -> dict[str, int]:
        """Settles the last step, and returns the values to save in a checkpoint, which `restore` reads."""
        self.settle()
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restores the values that the method `state` returned earlier, and discards totals that have not been settled."""
        self.num_skipped, self.num_in_a_row = int(state["num_skipped"]), int(state["num_in_a_row"])
        self._unread = None


MAX_SHOWN = 16
"""The maximum number of samples that an error names."""


class RankReport(NamedTuple):
    """One rank's report of a refused step. loss: this rank's share of the loss. bad: the index and name of the first parameter
    whose gradient is not finite here, or None. samples: the numbers of the first samples of this rank.
    """

    loss: float
    bad: tuple[int, str] | None
    samples: tuple[int, ...]


def build_refusal(
    parts: Parts,
    step_number: int,
    result: StepResult,
    totals: StepTotals,
    samples: Sequence[int],
    *,
    is_latest: bool,
    num_skipped: int = 0,
) -> RunError:
    """Returns the same RunError on all ranks, for the refused step `step_number`. A blocking collective on `control`. The
    error's code is "ranks-differ" if ranks made different exchanges, else "not-finite" if the loss or the norm is not finite,
    else "nothing-counts", since the global batch has the loss weight 0. samples: the numbers of this rank's samples in the
    step; empty if the program passed the batch. is_latest: whether the store still has the step's gradients. num_skipped: the
    number of consecutive skipped steps just before it.
    """
    if result.ranks_differ:
        return exchange_mismatch_error(f"step {step_number}", totals.local_exchanges, parts.groups["control"])
    bad = None
    if is_latest:
        order = enumerate(parts.store.params)
        bad = next(((index, param.name) for index, param in order if not parts.store.part(param).isfinite().all()), None)
    report = RankReport(float(totals.local_loss), bad, tuple(samples[: MAX_SHOWN + 1]))
    # All ranks have the same totals, so all get here, in the same step. Reports travel as JSON.
    gathered = parts.groups["control"].gather_objects(report, label="losses that are not finite")
    reports = [RankReport(*fields) for fields in gathered]
    if result.is_finite:
        message = f"step {step_number}: the loss weight of the batch is {result.weight:g}, so its mean loss is undefined"
        message += _describe_samples(range(len(reports)), reports)
        return RunError("nothing-counts", message, hint="check the data of this step: all labels are ignored")
    message = f"step {step_number}: loss {result.loss}, gradient norm {result.grad_norm}"
    message += f"; the {num_skipped} steps before were skipped" if num_skipped else ""
    message += _describe_nonfinite(parts, reports)
    hint = "lower the learning rate, set [optimizer] clip_norm, or check the data of this step; no weight was changed"
    return RunError("not-finite", message, hint=hint)


def _describe_nonfinite(parts: Parts, reports: Sequence[RankReport]) -> str:
    """Returns a text with the ranks whose loss is not finite, one non-finite gradient, and samples. reports: one per rank."""
    bad = [rank for rank, report in enumerate(reports) if not math.isfinite(report.loss)]
    text = ""
    if bad and len(reports) > 1:
        ranks_text = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
        values_text = " or ".join(dict.fromkeys("NaN" if math.isnan(reports[rank].loss) else "infinite" for rank in bad))
        text = f"; the loss of {ranks_text} is {values_text}"
    size = parts.topology.ranks_per_stage
    for stage in reversed(range(parts.topology.pp)):
        # each rank of a stage may have its own part of every gradient
        if bad_gradients := [report.bad for report in reports[stage * size : (stage + 1) * size] if report.bad is not None]:
            _, name = min(map(tuple, bad_gradients))
            text += f"; the gradient of {name!r}" + (f" (stage {stage})" if parts.topology.pp > 1 else "") + " is not finite"
            break
    return text + _describe_samples(bad or range(len(reports)), reports)


def _describe_samples(ranks: Sequence[int], reports: Sequence[RankReport]) -> str:
    """Returns a text with up to MAX_SHOWN samples from the reports of `ranks`; "" if they have none."""
    numbers = list(dict.fromkeys(number for rank in ranks for number in reports[rank].samples))
    if not numbers:
        return ""
    suffix = ", ..." if len(numbers) > MAX_SHOWN else ""
    return f"; samples {', '.join(map(str, numbers[:MAX_SHOWN]))}{suffix}"

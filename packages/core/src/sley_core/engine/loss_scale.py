"""The loss scale of fp16: it lifts gradients above fp16's smallest numbers, and is lowered when they exceed its largest.

    `growth_interval` steps in a row without overflow ──> scale x growth_factor
    an overflow on any rank of the world              ──> nobody steps; scale x backoff_factor, but not below min_scale
    an overflow at min_scale                          ──> RunError: the scale is not the cause

The rule is that of torch.amp.GradScaler, which has no minimum and would skip for ever (Micikevicius et al., 2018, Mixed
Precision Training, section 3.2). All ranks see the same votes, so all have the same scale without sending it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.plan.tables import LossScaleTable

LARGEST = 3.4028234663852886e38
"""The largest fp32 number: the gradient of the loss starts as scale / weight in the loss's own type."""


class LossScale:
    """Holds the loss scale of the next step. value: the factor of its loss. num_skipped: steps skipped so far."""

    def __init__(self, config: LossScaleTable) -> None:
        self.config = config
        self.value = config.init_scale
        self.num_skipped = 0
        self._num_good = 0

    def update(self, step: int, *, overflowed: bool) -> None:
        """Adjusts the scale after the vote on step number `step`, counted from 0.

        Raises RunError `loss-scale-exhausted`, on all ranks alike, for an overflow at the smallest scale.
        """
        config = self.config
        if overflowed:
            if self.value <= config.min_scale:
                raise RunError(
                    "loss-scale-exhausted",
                    f"the gradients of step {step + 1} overflow although the loss scale is at its smallest, {self.value:g}; "
                    f"{self.num_skipped} steps were skipped before",
                    hint='lower the learning rate, look at the data of this step, or compute in "bf16"',
                )
            self.value = max(self.value * config.backoff_factor, config.min_scale)
            self.num_skipped += 1
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == config.growth_interval:
            self._num_good = 0
            if self.value * config.growth_factor <= LARGEST:
                self.value *= config.growth_factor

    def state(self) -> dict[str, float | int]:
        """Returns what a checkpoint keeps, the same on every rank."""
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Restores the state that `state` returned."""
        self.value = float(state["value"])
        self._num_good = int(state["num_good"])
        self.num_skipped = int(state["num_skipped"])

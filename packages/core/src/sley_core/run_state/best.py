"""Tracks the best evaluation of a run for `[evaluation] keep_best` and `patience`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.plan.tables import BestTable


class Best:
    """Tracks one metric of the evaluations, which is the same on all ranks. Checkpoints save the state.

    patience: the number of consecutive evaluations without improvement that ends the run; None for no limit. value, step: the
    best value and its step; None and 0 before the first. num_since: the number of evaluations since the best.
    """

    def __init__(self, table: BestTable, patience: int | None) -> None:
        self.table = table
        self.patience = patience
        self.value: float | None = None
        self.step = 0
        self.num_since = 0

    def add(self, step: int, row: Mapping[str, float]) -> bool:
        """Adds the results of the evaluation after `step`; returns whether its value is finite and the best so far.

        Raises RunError "keep-best" on all ranks if the results do not have the metric.
        """
        name = self.table.metric
        if name not in row:
            message = f"`keep_best` is `{name}`, but the evaluation has only {', '.join(row)}"
            raise RunError("keep-best", message, path=("evaluation", "keep_best"), hint="use one of these metrics")
        value = row[name]
        is_better = self.value is None or (value > self.value if self.table.is_max else value < self.value)
        if math.isfinite(value) and is_better:
            self.value, self.step, self.num_since = value, step, 0
            return True
        self.num_since += 1
        return False

    @property
    def stop_reason(self) -> str:
        """The reason why the run ends, or "" as long as `patience` allows more steps."""
        if self.patience is None or self.num_since < self.patience:
            return ""
        best = "" if self.value is None else f"; the best, {self.value:.6g}, is of step {self.step}"
        return f"{self.table.metric} has not improved in {self.num_since} evaluation{'s' if self.num_since > 1 else ''}{best}"

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        metric = {"metric": self.table.metric, "is_max": self.table.is_max}
        return {**metric, "value": self.value, "step": self.step, "num_since": self.num_since}

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restores a result of `state`. Returns "", or a note for the user if the metric has changed."""
        if (state["metric"], state["is_max"]) != (self.table.metric, self.table.is_max):
            return f"`keep_best` was `{state['metric']}` in the checkpoint, so the best evaluation is not restored"
        self.value, self.step, self.num_since = state["value"], int(state["step"]), int(state["num_since"])
        return ""

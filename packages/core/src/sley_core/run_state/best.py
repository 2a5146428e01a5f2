"""The best evaluation of a run so far, by `[evaluation] keep_best`, and how long ago it was, by `patience`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.plan.tables import BestTable


class Best:
    """Follows one number of the evaluations, which is the same on all ranks; checkpoints have its state.

    patience: how many evaluations in a row may bring nothing better; None for any number. value, step: the best so far, None
    and 0 before the first. num_since: evaluations since.
    """

    def __init__(self, table: BestTable, patience: int | None) -> None:
        self.table = table
        self.patience = patience
        self.value: float | None = None
        self.step = 0
        self.num_since = 0

    def add(self, step: int, row: Mapping[str, float]) -> bool:
        """Takes the numbers of the evaluation after `step`; returns whether it is the best so far. It must be finite.

        Raises RunError "keep-best" on all ranks alike if the evaluation gives no such number.
        """
        name = self.table.metric
        if name not in row:
            message = f"`keep_best` follows `{name}`, and the evaluation gives {', '.join(row)}"
            raise RunError("keep-best", message, path=("evaluation", "keep_best"), hint="name one of these")
        value = row[name]
        is_better = self.value is None or (value > self.value if self.table.is_max else value < self.value)
        if math.isfinite(value) and is_better:
            self.value, self.step, self.num_since = value, step, 0
            return True
        self.num_since += 1
        return False

    @property
    def why_over(self) -> str:
        """Why no further step is taken, in words: patience is at its end. "" if it is not."""
        if self.patience is None or self.num_since < self.patience:
            return ""
        best = "" if self.value is None else f"; the best, {self.value:.6g}, is of step {self.step}"
        return f"{self.table.metric} has not improved in {self.num_since} evaluation{'s' if self.num_since > 1 else ''}{best}"

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        followed = {"metric": self.table.metric, "is_max": self.table.is_max}
        return {**followed, "value": self.value, "step": self.step, "num_since": self.num_since}

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restores what `state` returned, unless it is of another number; returns a note for the user then, else ""."""
        if (state["metric"], state["is_max"]) != (self.table.metric, self.table.is_max):
            return f"`keep_best` follows another number than in the checkpoint, `{state['metric']}`: it begins anew"
        self.value, self.step, self.num_since = state["value"], int(state["step"]), int(state["num_since"])
        return ""

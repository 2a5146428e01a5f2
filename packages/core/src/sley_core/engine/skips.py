"""Counts steps that are skipped because their loss or gradient norm is not finite, if the plan says `on_nan = "skip"`.

    step n: update, totals ──> copy to the host ──┐
    step n + 1: forward, backward ────────────────┴─> settle: was n skipped? ──> its learning rate, update

Such a step changes neither weights nor masters nor optimizer states, and the learning-rate schedule does not count it. On CUDA
the optimizer's kernels skip it, and the host learns of it before it sets the next learning rate: meanwhile the device has a
whole forward and backward to do, so it does not wait for the host. All ranks have the same totals, so all skip alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sley_core.engine.not_finite import is_no_number

if TYPE_CHECKING:
    from sley_core.engine.totals import PendingTotals


class Skips:
    """Counts skipped steps. most: how many in a row are allowed. num_skipped: all so far. num_in_a_row: up to the last one
    settled.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_skipped = 0
        self.num_in_a_row = 0
        self._unread: PendingTotals | None = None

    def follow(self, totals: PendingTotals) -> None:
        """Remembers the totals of the step that was launched last; the previous one must be settled."""
        assert self._unread is None, "a step was launched before the one before it was counted"
        self._unread = totals

    def settle(self, totals: PendingTotals | None = None) -> None:
        """Counts the step that was launched last, once; waits for its totals, and for nothing later on the device.

        totals: counts only if that step's totals are these.
        """
        if self._unread is None or (totals is not None and totals is not self._unread):
            return
        read, self._unread = self._unread, None
        if is_no_number(read.read()):
            self.num_skipped += 1
            self.num_in_a_row += 1
        else:
            self.num_in_a_row = 0

    @property
    def are_too_many(self) -> bool:
        """Whether more steps in a row were skipped than the plan allows."""
        return self.num_in_a_row > self.most

    def state(self) -> dict[str, int]:
        """Returns what a checkpoint keeps, the same on every rank."""
        self.settle()
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restores the state that `state` returned."""
        self.num_skipped, self.num_in_a_row = int(state["num_skipped"]), int(state["num_in_a_row"])
        self._unread = None

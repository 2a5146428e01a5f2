"""Tells a ledger where the step of a fake run is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_estimate.bytes.ledger import StepPlace

if TYPE_CHECKING:
    from sley_core.run import Run


class RunStanding:
    """Tells where a run's step is, once it follows a run."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._at: object = None
        self._place = StepPlace(0, "the start of the run", "")

    def follow(self, run: Run) -> None:
        """Makes `place` tell where `run` is, from now on."""
        self._run = run

    def place(self) -> StepPlace:
        """Returns step, entry and layer that the run is at; step 0, "the start of the run", before there is one to follow."""
        if self._run is None:
            return self._place
        standing = self._run.groups.progress.standing
        at = standing.step, standing.pending, standing.layer
        if at != self._at:  # much memory comes and goes in one place
            self._at, self._place = at, StepPlace(standing.step, str(standing.pending), standing.layer)
        return self._place

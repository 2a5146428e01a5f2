"""Going on with a run: in which folder, from which step, and what the user is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.metrics.jsonl import rows
from sley_core.metrics.summary import RunTotals
from train_cli.run_folder import run_folder

if TYPE_CHECKING:
    from sley_core.checkpoint.loading import Restored
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

AUTO = "auto"
"""The newest checkpoint of the run itself; none of a run that has not written one."""


def goes_on(plan: Plan, resume: str | None) -> bool:
    """Returns whether the run goes on in its own folder, and does not begin in a new one from another run's checkpoint."""
    if resume is None or resume == AUTO:
        return resume == AUTO
    return Path(resume).resolve().is_relative_to(run_folder(plan).resolve())


def load(run: Run, resume: str | None) -> list[str]:
    """Brings `run` to where `resume` says, None for the beginning; returns lines for the user. All ranks call it."""
    if resume is None:
        return []
    found = run.load_checkpoint(resume)
    return ["no checkpoint yet: it begins at the first step"] if found is None else list(_lines(run, found))


def totals(run: Run, folder: Path, resume: str | None) -> RunTotals:
    """Returns the totals of the steps that are done, from the rows in the folder of the run."""
    return RunTotals(rows(folder)) if resume else RunTotals()


def _lines(run: Run, found: Restored) -> list[str]:
    passed = (f"passed over {path}: {', '.join(map(str, damages))}" for path, damages in found.passed_over)
    return [*passed, f"going on after step {found.step} of {run.plan.run.steps}, from {found.path}", *found.notes]

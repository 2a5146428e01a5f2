"""The weights that a run has left in its folder, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import UsageError
from sley_core.plan.load import load_plan
from sley_core.weight_files.read import WeightFiles

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.weight_files.read import Tensors

PLAN = "plan.toml"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
"""In a run's folder: its plan, its final weights, and its checkpoints, where the plan names no other folder for them."""


def weights_of_run(folder: Path) -> tuple[Plan, Tensors]:
    """Returns the resolved plan of the run in `folder`, and its final weights by names of the book.

    Raises UsageError "no-run" or "no-weights", RunError "weight-files", and what the plan's loading raises.
    """
    if not (folder / PLAN).is_file():
        raise UsageError("no-run", f"`{folder}` is not the folder of a run: it has no `{PLAN}`")
    plan = load_plan(folder / PLAN)
    if not (folder / WEIGHTS).is_dir():
        why = (
            'its plan says `final_weights = "none"`'
            if plan.run.final_weights == "none"
            else "it has not ended, or failed"
        )
        hint = f"{why}; a checkpoint of it can be exported by its own folder"
        raise UsageError("no-weights", f"the run in `{folder}` has left no weights", hint=hint)
    return plan, WeightFiles(folder / WEIGHTS)

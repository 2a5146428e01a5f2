"""Resumes a run: finds the folder and the step, and says which to the user.

--resume PATH ──> begins at PATH, and notes it in the folder ──> checkpoints of its own
                       └── started again, or --resume auto ─────> the newest of these, or PATH where there is none yet
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import RunError
from sley_core.metrics.json_text import write_whole
from sley_core.metrics.jsonl import rows
from sley_core.metrics.summary import RunTotals
from sley_core.plan.factory import cause
from train_cli.run_folder import run_folder
from train_cli.saved import ORIGIN

if TYPE_CHECKING:
    from sley_core.checkpoint.choosing import RunOrigin
    from sley_core.checkpoint.loading import Restored
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

AUTO = "auto"
"""The newest checkpoint of the run itself; none of a run that has not written one."""


def is_again() -> bool:
    """Returns whether torchrun or SLURM has started this run again."""
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count != "0" for count in restarts)


def goes_on(plan: Plan, resume: str | None) -> bool:
    """Returns whether the run continues in its own folder, rather than begin in a new one from another run's checkpoint."""
    if resume is None or resume == AUTO:
        return resume == AUTO
    return is_again() or Path(resume).resolve().is_relative_to(run_folder(plan).resolve())


def load(run: Run, folder: Path, resume: str | None) -> list[str]:
    """Loads the checkpoint that `resume` names into `run`, none if it is None; returns lines for the user. All ranks call it.

    A run that is started again continues from its own newest checkpoint, not from the one at which it began.
    """
    if resume is None:
        return []
    is_first = run.world.rank == 0
    if resume == AUTO or is_again():
        found = run.load_checkpoint(AUTO, _origin(folder, resume) if is_first else None)
    else:
        with _without_origin(folder) if is_first else nullcontext():
            found = run.load_checkpoint(resume)
    if found is None:
        return ["no checkpoint yet: it begins at the first step"]
    if is_first and resume != AUTO and found.origin is not None:
        noted = {"given": resume, "path": found.origin.path, "before": sorted(found.origin.before or ())}
        write_whole(folder / ORIGIN, json.dumps(noted))
    return list(_lines(run, found))


@contextmanager
def _without_origin(folder: Path) -> Iterator[None]:
    """Removes the record of where the run in `folder` began, and restores it if the block fails, as for a path without
    checkpoint.
    """
    path = folder / ORIGIN
    before = path.read_text("utf-8") if path.exists() else None
    path.unlink(missing_ok=True)
    try:
        yield
    except Exception:
        if before is not None:
            write_whole(path, before)
        raise


def _origin(folder: Path, resume: str) -> RunOrigin | None:
    """Returns where the run in `folder` began, if it began at a checkpoint. resume: as the user has given it."""
    from sley_core.checkpoint.choosing import RunOrigin

    path = folder / ORIGIN
    try:
        noted = json.loads(path.read_text("utf-8"))
        if resume in (AUTO, noted["given"]):
            return RunOrigin(noted["path"], frozenset(noted["before"]))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        hint = "name the checkpoint to go on from"
        raise RunError("origin", f"`{path}` does not say where the run began: {cause(error)}", hint=hint) from error
    # It was ended before it had loaded what the user has named, and so before it could save anything.
    return None if resume == AUTO else RunOrigin(resume, None)


def totals(run: Run, folder: Path, resume: str | None) -> RunTotals:
    """Returns the totals of the steps that are done, from the rows in the run's folder."""
    return RunTotals(rows(folder)) if resume else RunTotals()


def _lines(run: Run, found: Restored) -> list[str]:
    passed = (f"passed over {path}: {', '.join(map(str, damages))}" for path, damages in found.passed_over)
    return [*passed, f"going on after step {found.step} of {run.plan.run.steps}, from {found.path}", *found.notes]

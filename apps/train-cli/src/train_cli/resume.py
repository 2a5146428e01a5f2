"""Resumes a run: finds the folder and the step, and says which to the user. `attempt.json` in the run's folder says which
checkpoints are its own.

--resume PATH ──> begins at PATH, as the folder then says ──> checkpoints of its own
                       └── started again, or --resume auto ─────> the newest of these, or PATH where there is none yet
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attempt import PLAN, WEIGHTS, job, read_attempt, torchrun
from sley_core.metrics.jsonl import rows
from train_cli.run_folder import run_folder
from train_cli.saved import finished_steps, wrote
from train_cli.summary import RunTotals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sley_core.plan.plan import Plan
    from sley_core.protocols import Restored
    from sley_core.run import Run

AUTO = "auto"
"""The newest checkpoint that the run itself wrote; none for a run that has taken no step."""


def is_again() -> bool:
    """Returns whether torchrun or SLURM has started this run again."""
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count != "0" for count in restarts)


def goes_on(plan: Plan, given: str | None) -> bool:
    """Returns whether the run continues in its own folder, rather than begin in a new one, perhaps from another run's
    checkpoint. given: what the user has said after `--resume`.

    A job that SLURM has started again continues the runs that it has begun, but not those of other jobs.
    """
    folder = run_folder(plan)
    if given == AUTO:
        return True
    if is_again():
        attempt = read_attempt(folder)
        return given is not None or attempt is None or attempt.job == job()
    if given is None:
        return False
    # Not resolved too, since the folder of checkpoints may be a link.
    paths = {Path(given).resolve(), Path(os.path.abspath(given))}  # noqa: PTH100  # it leaves links as they are
    return any(path.is_relative_to(base) for path in paths for base in (folder.resolve(), folder.absolute())) or wrote(
        plan, folder, given
    )


def is_finished(run: Run, folder: Path) -> bool:
    """Returns whether the run in `folder` has finished with all of the plan's steps and has its final weights, so that nothing
    is left to do. All ranks call it.

    Raises PlanError "resume-differs" if it is the folder of a run with other numbers.
    """
    from sley_core.comm.collectives import gather_objects

    said = ""
    steps = finished_steps(folder) if run.world.rank == 0 else None
    if steps is not None and steps >= run.plan.run.steps and (folder / PLAN).is_file():
        has_weights = run.plan.run.final_weights == "none" or (folder / WEIGHTS).is_dir()
        said = (folder / PLAN).read_text("utf-8") if has_weights else ""
    # All ranks: what rank 0 sees counts, whose folder it is.
    before: str = gather_objects(said, run.groups["control"], what="whether the run has finished")[0]
    if before:
        from sley_core.plan.write import changes, refuse_changes

        refuse_changes(changes(before, run.resolved_plan.to_toml()))
    return bool(before)


def load(run: Run, folder: Path, resume: str | None) -> list[str]:
    """Loads the checkpoint that `resume` names into `run`, none if it is None; returns lines for the user. All ranks call it.

    A run that is started again continues from its own newest checkpoint, not from the one at which it began.
    """
    if resume is None:
        return []
    if resume != AUTO and is_again():
        from sley_core.comm.collectives import gather_objects

        is_begun = run.world.rank == 0 and _has_begun_at(folder, resume)
        # All ranks: they have the same command and environment.
        if gather_objects(is_begun, run.groups["control"], what="where the run has begun")[0]:
            resume = AUTO
    found = run.load_checkpoint(resume, anew=run.world.rank == 0 and _is_started_again(folder))
    return ["there is no checkpoint yet: the run begins at step 1"] if found is None else list(_lines(run, found))


def _is_started_again(folder: Path) -> bool:
    """Returns whether the torchrun that has started this process began the attempt in `folder`: it was told to start the run
    again, even if that is at the first step.
    """
    attempt = read_attempt(folder)
    return is_again() and attempt is not None and attempt.torchrun == torchrun() != ""


def _has_begun_at(folder: Path, given: str) -> bool:
    """Returns whether the attempt in `folder` began at the checkpoint that the user has named so."""
    attempt = read_attempt(folder)
    return attempt is not None and attempt.given == given


def totals(run: Run, folder: Path, resume: str | None) -> RunTotals:
    """Returns the totals of the steps that are done, from the rows in the run's folder."""
    return RunTotals(rows(folder)) if resume else RunTotals()


def _lines(run: Run, found: Restored) -> Iterator[str]:
    for path, damages in found.passed_over:
        yield f"passed over {path}: {', '.join(map(str, damages))}"
    yield f"going on after step {found.step} of {run.plan.run.steps}, from {found.path}"
    yield from found.notes

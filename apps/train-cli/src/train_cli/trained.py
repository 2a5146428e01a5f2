"""Loads a run that has ended, or has saved a checkpoint, into one process with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import UsageError
from sley_core.export.run_weights import CHECKPOINTS, PLAN, WEIGHTS
from sley_core.loader import Loader
from sley_core.plan.read import read_file
from sley_core.plan.resolve import resolve
from train_cli.one_process import of_trained

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

_EITHER = (("source", "files"), ("held_out", "held_out_files"), ("separator", "field"))
"""Keys of `[data]` that exclude each other: one that is given takes the place of the run's other one."""


def plan_of(folder: Path, data: Sequence[str] = ()) -> Plan:
    """Returns the plan of the run in `folder`, with each `key=VALUE` of `data` set in `[data]`.

    Raises UsageError "no-run", and what the plan's loading raises.
    """
    if not (folder / PLAN).is_file():
        raise UsageError("no-run", f"`{folder}` is not the folder of a run: it has no `{PLAN}`")
    document = read_file(folder / PLAN, [f"data.{change}" for change in data])
    given = {str(override.path[1]) for override in document.overrides}
    if given:
        gone = {"samples_per_epoch"}  # that of the run's own data
        for pair in _EITHER:
            gone |= set(pair) if given & set(pair) else set()
        table = {key: value for key, value in document.tables["data"].items() if key in given or key not in gone}
        document = replace(document, tables={**document.tables, "data": table})
    return resolve(document, Loader())


@contextmanager
def trained_run(
    folder: Path, plan: Plan, *, evaluates: bool = False, batches: int | None = None
) -> Iterator[tuple[Run, str]]:
    """Yields a run in one process with the final weights of the run in `folder`, or those of its newest checkpoint, and in
    words which.

    plan: the run's, as `plan_of` returns it. evaluates, batches: as of `of_trained`. Raises UsageError "no-weights" if there
    are neither.
    """
    from sley_core.assemble import assemble
    from sley_core.comm.world import World
    from sley_core.weight_files.read import WeightFiles

    checkpoints = plan.checkpoint.folder if plan.checkpoint else None
    saved = str(checkpoints or folder / CHECKPOINTS)
    alone = of_trained(plan, evaluates=evaluates, batches=batches)
    with assemble(alone, World.alone(alone.run.device)) as run:
        if (folder / WEIGHTS).is_dir():
            files = WeightFiles(folder / WEIGHTS)
            run.load_weights((name, files.tensor(name)) for name in files.names)
            yield run, f"the weights in {folder / WEIGHTS}"
        elif "://" in saved or Path(saved).is_dir():
            run.load_checkpoint(saved)
            yield run, f"the checkpoint of step {run.num_steps_done} in {saved}"
        else:
            hint = "it has not ended, or failed, or its plan wants none; `[checkpoint]` saves a run on its way"
            raise UsageError("no-weights", f"the run in `{folder}` has left no weights and no checkpoint", hint=hint)

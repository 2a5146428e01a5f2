"""Loads a run that has ended, or has saved a checkpoint, into one process with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.plan.load import resolve
from sley_core.plan.loader import Loader
from train_cli.one_process import of_trained, without_data
from train_cli.run_files import document_of_run, newest_weights
from train_cli.saved import files_of

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

_EITHER = (("source", "files"), ("held_out", "held_out_files"), ("separator", "field"))
"""Keys of `[data]` that exclude each other: one that is given takes the place of the run's other one."""


def plan_of(folder: Path, data: Sequence[str] = ()) -> Plan:
    """Returns the plan of the run in `folder`, with each `key=VALUE` of `data` set in `[data]`.

    Raises UsageError "no-run", and what the plan's loading raises.
    """
    document = document_of_run(folder, [f"data.{change}" for change in data])
    given = {str(override.path[1]) for override in document.overrides}
    if given:
        gone = {"samples_per_epoch"}  # that of the run's own data
        for pair in _EITHER:
            gone |= set(pair) if given & set(pair) else set()
        table = {key: value for key, value in document.tables["data"].items() if key in given or key not in gone}
        document = replace(document, tables={**document.tables, "data": table})
    return resolve(document, Loader())


@contextmanager
def trained_run(folder: Path, plan: Plan, *, evaluates: bool = False, batches: int | None = None) -> Iterator[tuple[Run, str]]:
    """Yields a run in one process with the newest weights of the run in `folder`, and in words which.

    plan: the run's, as `plan_of` returns it. evaluates, batches: as of `of_trained`; its data are not looked for unless it
    evaluates. Raises UsageError "no-weights" if there are none.
    """
    from sley_core.assemble import assemble
    from sley_core.comm.world import World
    from sley_core.run_state.tensors import plan_and_weights
    from sley_core.weight_files.read import WeightFiles

    path, step = newest_weights(folder, plan)
    alone = of_trained(plan, evaluates=evaluates, batches=batches)
    with ExitStack() as stack:
        if not evaluates:
            alone = without_data(alone)
        run = stack.enter_context(assemble(alone, World.alone(alone.run.device)))
        if isinstance(path, Path):
            files = WeightFiles(path)
            run.load_weights((name, files.tensor(name)) for name in files.names)
            yield run, f"the weights{'' if step is None else f' of step {step}'} in {path}"
        else:
            found = files_of(plan).open(path)
            assert found is not None, path
            _, weights = plan_and_weights(found)
            run.load_weights((name, weights.tensor(name)) for name in weights.names)
            yield run, f"the checkpoint of step {step} in {path}"

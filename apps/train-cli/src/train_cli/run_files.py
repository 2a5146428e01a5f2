"""What a run has left in its folder: its plan, files that it needs again, and its newest weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attempt import KEPT, PLAN, WEIGHTS, with_kept
from sley_core.errors import UsageError
from sley_core.plan.load import resolve
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_file
from train_cli.saved import about_or_none, checkpoints_of, files_of, is_remote, paths_in

if TYPE_CHECKING:
    from sley_core.plan.document import Document
    from sley_core.plan.plan import Plan

MODEL = ("config.json", "generation_config.json")
"""What `save_pretrained` of a model writes besides its weights."""


def keep_files(plan: Plan, folder: Path) -> None:
    """Copies into the run's folder what its export and its samples need: the tokenizer, and the small files beside the weights
    from which it started. Raises OSError.
    """
    for (table, key), name in KEPT.items():
        source = getattr(getattr(plan, table).config, key, None)
        if not isinstance(source, Path) or source.resolve().is_relative_to(folder.resolve()):
            continue
        from sley_core.weight_files.read import TOKENIZER

        (folder / name).mkdir(exist_ok=True)
        files = [(source, TOKENIZER[0])] if source.is_file() else [(source / one, one) for one in (*TOKENIZER, *MODEL)]
        for file, own in files:
            if file.is_file():
                shutil.copyfile(file, folder / name / own)


def plan_of_run(folder: Path) -> Plan:
    """Returns the resolved plan of the run in `folder`, which may have been moved since.

    Raises UsageError "no-run", and what the plan's loading raises.
    """
    return resolve(document_of_run(folder), Loader())


def document_of_run(folder: Path, changes: Sequence[str] = ()) -> Document:
    """Returns the plan of the run in `folder` with `changes`, before it is resolved. Raises as `plan_of_run`."""
    if not (folder / PLAN).is_file():
        raise UsageError("no-run", f"`{folder}` is not the folder of a run: it has no `{PLAN}`")
    return with_kept(read_file(folder / PLAN, changes), folder)


def newest_weights(folder: Path, plan: Plan) -> tuple[Path | str, int | None]:
    """Returns the folder of the newest weights of the run in `folder`, and after which step they are, None if that is not
    known: its final weights, or a whole checkpoint that it wrote. Of the same step, the final weights.

    Weights and checkpoints of steps that the run has not taken (it went back, or was begun anew) do not count. Raises
    UsageError "no-weights" if there are neither.
    """
    from sley_core.attempt import read_attempt
    from sley_core.weight_files.read import step_of

    attempt = read_attempt(folder)
    final: tuple[Path, int | None] | None = None
    if (folder / WEIGHTS).is_dir():
        writer, step = step_of(folder / WEIGHTS)
        if attempt is None or step is None or attempt.took(writer, step):
            final = folder / WEIGHTS, step
    for path, step in _checkpoints(plan, folder):
        if final is not None and (final[1] is None or final[1] >= step):
            break
        return path, step
    if final is None:
        hint = "it has not ended, or failed, or its plan wants none; `[checkpoint]` saves a run on its way"
        raise UsageError("no-weights", f"the run in `{folder}` has left no weights and no checkpoint", hint=hint)
    return final


def _checkpoints(plan: Plan, folder: Path) -> Iterator[tuple[str, int]]:
    """Yields path and step of the whole checkpoints that led to the steps of the run in `folder`, the newest first."""
    from sley_core.attempt import read_attempt

    own = checkpoints_of(plan, folder)
    if not is_remote(own) and not Path(own).is_dir():
        return
    files, attempt = files_of(plan), read_attempt(folder)
    found = [(about, path) for path in paths_in(files, own) if (about := about_or_none(files, path)) is not None]
    for about, path in sorted(found, key=lambda one: one[0].step, reverse=True):
        is_own = attempt is None or attempt.has_taken(about.lineage, about.step)
        if is_own and files.is_whole(path):
            yield path, about.step

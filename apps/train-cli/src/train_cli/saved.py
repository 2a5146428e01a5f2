"""Finds the checkpoints in a folder by their files alone. Whether one is whole is checked when it is loaded. URLs are not
looked at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attempt import CHECKPOINTS, read_attempt
from sley_core.errors import SleyError, UsageError
from sley_core.plan.loader import Loader
from train_cli.summary import NAME as SUMMARY

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.protocols import CheckpointFiles
    from sley_core.run_state.pieces import SavedRun

_SHOWN = 4


def is_remote(path: str) -> bool:
    """Returns whether `path` is a URL."""
    return "://" in path


def checkpoints_of(plan: Plan, folder: Path) -> str:
    """Returns path or URL of the folder of checkpoints of a run of `plan` in `folder`."""
    return (plan.checkpoint.config.folder if plan.checkpoint else None) or str(folder.absolute() / CHECKPOINTS)


def files_of(plan: Plan | None) -> CheckpointFiles:
    """Returns what reads the checkpoints of a run of `plan`, or those of the default checkpointer. It imports torch.

    Raises PluginError "plugin-missing" where that is not installed, UsageError "no-checkpoint-files" where only a run can read
    them.
    """
    files = _files_or_none(plan)
    if files is None:
        name = plan.checkpoint.name if plan and plan.checkpoint else ""
        hint = "give `train-cli run` the checkpoint with `--resume PATH`, and use the weights at the end of that run"
        raise UsageError("no-checkpoint-files", f"checkpoints of `{name}` can be read by a run alone", hint=hint)
    return files


def _files_or_none(plan: Plan | None) -> CheckpointFiles | None:
    from sley_core.run_state.state import checkpoint_files

    return checkpoint_files(Loader() if plan is None else plan.loader, plan)


def paths_in(files: CheckpointFiles, folder: str) -> list[str]:
    """Returns paths or URLs of the complete checkpoints in `folder`, the newest first."""
    return [f"{folder.rstrip('/')}/{name}" for name in files.names(folder)]


def about_or_none(files: CheckpointFiles, path: str) -> SavedRun | None:
    """Returns the description of the checkpoint at `path`; None if there is none, or it is damaged."""
    try:
        return files.describe(path)
    except Exception:  # whatever a file system raises
        return None


def can_go_on(plan: Plan, folder: Path) -> bool:
    """Returns whether a run of `plan` in `folder` may find a checkpoint to resume from: its own, or that at which it began."""
    own, attempt = checkpoints_of(plan, folder), read_attempt(folder)
    if is_remote(own) or (attempt is not None and attempt.origin):
        return True
    try:
        return Path(own).is_dir() and bool(files_of(plan).names(own))
    except SleyError:  # nothing here reads them
        return False


def wrote(plan: Plan, folder: Path, given: str) -> bool:
    """Returns whether an attempt of the run in `folder` wrote the checkpoint at `given`, or the newest of several there."""
    attempt = read_attempt(folder)
    if attempt is None or (files := _files_or_none(plan)) is None:
        return False
    found = about_or_none(files, given) or next((about_or_none(files, path) for path in paths_in(files, given)), None)
    return found is not None and attempt.wrote(found.lineage)


def finished_steps(folder: Path) -> int | None:
    """Returns how many steps the run in `folder` has taken, if it has finished; None if it has not, or if that is not known."""
    try:
        said = json.loads((folder / SUMMARY).read_text("utf-8"))
        return int(said["steps"]) if said["outcome"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_given(plan: Plan, path: str) -> None:
    """Raises UsageError "no-checkpoint" if `path` is neither a checkpoint nor a folder of some; it says where there are
    some.
    """
    if is_remote(path) or (files := _files_or_none(plan)) is None:
        return
    given = Path(path)

    def names_in(folder: Path) -> list[str]:
        return files.names(str(folder))

    try:
        has_some = files.describe(path) is not None
    except SleyError:  # a damaged one, which the load names
        has_some = True
    if has_some or names_in(given):
        return
    if names_in(given / CHECKPOINTS):
        hint = f"those of that run are in `{given / CHECKPOINTS}`"
    elif beside := names_in(given.parent):
        more = f" and {len(beside) - _SHOWN} more" if len(beside) > _SHOWN else ""
        hint = f"beside it there are {', '.join(f'`{name}`' for name in beside[:_SHOWN])}{more}"
    else:
        hint = "give the folder of a checkpoint, or of several, such as `runs/NAME/checkpoints`"
    raise UsageError("no-checkpoint", f"there is no checkpoint in `{path}`", hint=hint)

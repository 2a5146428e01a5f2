"""Finds the checkpoints in a folder by their files alone. Whether one is complete is checked when it is loaded. URLs are not
looked at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attempt import read_attempt
from sley_core.errors import UsageError
from sley_core.metrics.summary import NAME as SUMMARY
from sley_core.run_files import CHECKPOINTS

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

_SHOWN = 4


def is_remote(path: str) -> bool:
    """Returns whether `path` is a URL."""
    return "://" in path


def names_in(path: Path) -> list[str]:
    """Returns the names of the checkpoints in the folder `path`, the newest first; none if there is no such folder."""
    if not path.is_dir():
        return []
    # Imported where there is a folder to look into: they import torch.
    from sley_core.checkpoint.verify import ready
    from sley_core.files.folders import open_folder

    return ready(open_folder(path))


def can_go_on(plan: Plan, folder: Path) -> bool:
    """Returns whether a run of `plan` in `folder` may find a checkpoint to resume from: its own, or that at which it began."""
    own = (plan.checkpoint.folder if plan.checkpoint else None) or str(folder / CHECKPOINTS)
    return is_remote(own) or bool(names_in(Path(own))) or bool((attempt := read_attempt(folder)) and attempt.origin)


def wrote(folder: Path, given: str) -> bool:
    """Returns whether an attempt of the run in `folder` wrote the checkpoint at `given`, or the newest of several there."""
    attempt = read_attempt(folder)
    if attempt is None:
        return False
    from sley_core.checkpoint.choosing import index_or_none
    from sley_core.checkpoint.verify import ready
    from sley_core.files.folders import open_folder

    where = open_folder(given)
    found = index_or_none(where) or next((index_or_none(where.child(name)) for name in ready(where)), None)
    return found is not None and attempt.wrote(found.lineage)


def finished_steps(folder: Path) -> int | None:
    """Returns how many steps the run in `folder` has taken, if it has finished; None if it has not, or if that is not known."""
    try:
        said = json.loads((folder / SUMMARY).read_text("utf-8"))
        return int(said["steps"]) if said["outcome"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_given(path: str) -> None:
    """Raises UsageError "no-checkpoint" if `path` is neither a checkpoint nor a folder of some; it says where there are
    some.
    """
    from sley_core.checkpoint.index import INDEX

    given = Path(path)
    if is_remote(path) or (given / INDEX).is_file() or names_in(given):
        return
    if names_in(given / CHECKPOINTS):
        hint = f"those of that run are in `{given / CHECKPOINTS}`"
    elif beside := names_in(given.parent):
        more = f" and {len(beside) - _SHOWN} more" if len(beside) > _SHOWN else ""
        hint = f"beside it there are {', '.join(f'`{name}`' for name in beside[:_SHOWN])}{more}"
    else:
        hint = "give the folder of a checkpoint, or of several, such as `runs/NAME/checkpoints`"
    raise UsageError("no-checkpoint", f"there is no checkpoint in `{path}`", hint=hint)

"""The folder of a run, `runs/<name>/`: made once, before any rank starts, and never overwritten unasked.

It holds `plan.toml` as resolved, and what the run writes: `metrics.jsonl`, `summary.json`, traces.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import tomli

from sley_core.errors import PlanError, SleyError
from sley_core.metrics.jsonl import NAME as METRICS
from sley_core.plan.plan import Plan

PLAN = "plan.toml"


def run_folder(plan: Plan) -> Path:
    """Where a run of `plan` writes; a relative `[run] folder` starts at the current folder."""
    return Path(plan.run.folder, plan.run.name)


def check_run_folder(plan: Plan, *, overwrite: bool) -> None:
    """Changes nothing.

    Raises PlanError "run-folder" if there is one and `overwrite` is not given, if what is there is no run's folder, or
    if none could be made.
    """
    folder = run_folder(plan)
    try:
        if _is_taken(folder):
            if not overwrite:
                hint = "`--overwrite` replaces it, `--set run.name=...` makes another"
                raise _refused(plan, f"`{folder}` exists already, and a run is never overwritten unasked", hint)
            if not _is_ours(folder):
                hint = "choose another `run.name` or `run.folder`"
                raise _refused(plan, f"`{folder}` is not the folder of a run, so it is not replaced", hint)
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise _unwritable(plan, folder, error) from error
    if not nearest.is_dir():
        raise _unwritable(plan, folder, NotADirectoryError(0, "it is a file", str(nearest)))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(plan, folder, PermissionError(0, "permission denied", str(nearest)))


def make_run_folder(plan: Plan, *, overwrite: bool) -> Path:
    """The new folder of a run of `plan`, with its `plan.toml`. Raises as `check_run_folder` does."""
    check_run_folder(plan, overwrite=overwrite)
    folder = run_folder(plan)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_plan(plan, folder)
    except OSError as error:
        raise _unwritable(plan, folder, error) from error
    return folder


def drop_unused(folder: Path) -> None:
    """Removes the folder of a run that failed before its first step, as there is nothing in it to keep."""
    files = {path.name: path.stat().st_size for path in folder.glob("*")}
    if files.keys() <= {PLAN, METRICS} and not files.get(METRICS):
        shutil.rmtree(folder, ignore_errors=True)


def write_plan(plan: Plan, folder: Path) -> None:
    """Puts the resolved plan into `folder`, whole or not at all."""
    draft = folder / f".{PLAN}"
    draft.write_text(plan.to_toml(), "utf-8")
    draft.replace(folder / PLAN)


def _is_taken(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _is_ours(folder: Path) -> bool:
    """Whether a run made `folder`: only a resolved plan says which folder it came from, and a person's plan does not."""
    try:
        written = tomli.loads((folder / PLAN).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return "source_folder" in written


def _unwritable(plan: Plan, folder: Path, error: OSError) -> SleyError:
    message = f"cannot write `{error.filename or folder}`: {error.strerror or error}"
    return _refused(plan, message, "choose another `run.folder`", key="folder")


def _refused(plan: Plan, message: str, hint: str, key: str = "name") -> SleyError:
    return plan.located(PlanError("run-folder", message, path=("run", key), hint=hint))

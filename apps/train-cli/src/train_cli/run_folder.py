"""Creates and locks the run folder `runs/<name>/` before any rank starts, and loads the recorder of sley-doctor.

The folder contains the resolved `plan.toml`, `start.json`, and the run's output: `metrics.jsonl`, `summary.json`, traces, the
final weights, `faults` if the run failed, and `attempt.json`, which lists the checkpoints from which it may resume.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from errno import ELOOP
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import tomli

from sley_core.errors import Diagnostic, PlanError, SleyError
from sley_core.files import PLAN_FILE, write_atomically
from sley_core.plan.plan import Plan
from sley_core.run_folder import ATTEMPT_FILE, METRICS_FILE, torchrun_id
from train_cli.environment import START_FILE
from train_cli.saved_run import can_resume, run_folder

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts

FAULTS = "faults"
WORK = "work"
"""The subfolders of a run folder that the recorder writes: failure reports, and a record of each rank's work."""

_LOCK = ".lock"  # the name of the lock file in a run folder


class RunRecorder:
    """The interface of sley-doctor's recorder, and a recorder that records nothing. `folder` is always the run folder."""

    def record_steps(self, parts: "Parts", feed: "Feed | None", folder: Path, notes: list[str]) -> AbstractContextManager[None]:
        """Returns a context manager that records this rank's steps. A recorder that cannot write adds a note to `notes`. feed:
        the feed for which the steps wait, or None.
        """
        return nullcontext()

    def report_failure(self, folder: Path, world: "World", diagnostic: Diagnostic, error: BaseException) -> None:
        """Reports that this rank failed with `error`, before cleanup. diagnostic: the error as the user sees it."""

    def report_hang(self, folder: Path, world: "World", diagnostic: Diagnostic) -> None:
        """Reports where this rank hangs. Called in a thread other than the main thread, after the signal that `diagnostic`
        describes.
        """

    def report_launch(
        self, folder: Path, world_size: int, exit_codes: Mapping[int, int], killed_states: Mapping[int, str], first_failed: int
    ) -> None:
        """Reports how the ranks of a local launch ended. exit_codes: the exit code of each failed rank, negative for a signal.
        killed_states: the process state of each rank that had to be killed. first_failed: the rank that failed first.
        """

    def delete_reports(self, folder: Path) -> None:
        """Deletes the failure reports of earlier attempts from the run folder, before a run starts."""


@cache
def load_recorder() -> RunRecorder:
    """Returns the recorder of sley-doctor if that package is installed, else a recorder that records nothing."""
    if find_spec("sley_doctor") is None:
        return RunRecorder()
    recorder: RunRecorder = import_module("sley_doctor.fault_report").DoctorRecorder()
    return recorder


class FolderInUseError(Exception):
    """Raised if another process has locked a run folder. pid: the id of that process, or "" if the id is not known."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


class FolderLock:
    """A lock on the run folder `folder`, from the creation of the object until `release`. Creates the folder if it is missing.
    Raises FolderInUseError if another process holds the lock, and OSError if the lock file cannot be written. The lock is an
    flock(2) on this file, which the kernel releases when the process ends. On file systems without flock, nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                _lock_or_raise(self._descriptor)
                if self._is_file_in_folder():  # else its previous owner has just deleted it
                    break
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"pid": os.getpid(), "starter": torchrun_id()}).encode())

    def release(self) -> None:
        """Unlocks the folder. Keeps the lock file if torchrun may restart this rank, as a sign that the run owns the folder."""
        restarts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
        if self._is_file_in_folder() and int(restarts[0]) >= int(restarts[1]):
            self._path.unlink()
        os.close(self._descriptor)

    def _is_file_in_folder(self) -> bool:
        """Returns whether the folder still contains the lock file that this object has opened."""
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
        except OSError:
            return False


def check_unlocked(folder: Path) -> None:
    """Raises FolderInUseError if another process has locked `folder`. Changes nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _lock_or_raise(descriptor)
        finally:
            os.close(descriptor)


def _lock_or_raise(descriptor: int) -> None:
    """Locks an open file. Raises FolderInUseError if another process has locked it. Ignores file systems without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            pid = str(json.loads(os.pread(descriptor, 1000, 0))["pid"])
        except (ValueError, KeyError, TypeError):
            pid = ""
        raise FolderInUseError(pid) from None
    except OSError:
        return  # the file system has no locks


def is_folder_of_restarted_run(folder: Path) -> bool:
    """Returns whether torchrun has restarted the run that created `folder`, so that the run may use the folder again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return bool(json.loads((folder / _LOCK).read_text("utf-8"))["starter"] == torchrun_id())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_run_folder(plan: Plan, *, overwrite: bool, resume: bool = False) -> None:
    """Raises PlanError "run-folder" if `locked_run_folder` could not create or continue the folder of `plan`: because it exists
    and neither `overwrite` nor `resume` is set, because it is not a run folder, because an active run uses it, or because it
    cannot be written. Changes nothing.
    """
    folder = run_folder(plan)
    with _folder_errors(plan, folder):
        check_unlocked(folder)
        if _has_protected_files(folder):
            if not overwrite and not resume:
                resume_hint = "`--resume auto` to continue it, " if can_resume(plan, folder) else ""
                hint = f"use {resume_hint}`--overwrite` to replace it, or `--set run.name=NAME` for a new one"
                raise _refusal_error(plan, f"`{folder}` already exists", hint)
            if not _is_run_folder(folder):
                hint = "choose another `run.name` or `run.folder`"
                raise _refusal_error(plan, f"`{folder}` is not a run folder, so it is not replaced", hint)
        ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not ancestor.is_dir():
            raise NotADirectoryError(0, "it is a file", str(ancestor))
        if not os.access(ancestor, os.W_OK | os.X_OK):
            raise PermissionError(0, "permission denied", str(ancestor))


@contextmanager
def locked_run_folder(plan: Plan, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Creates the run folder of `plan` with its `plan.toml`, and locks it until the block ends. Yields the folder. overwrite:
    whether to replace an existing run folder. resume: whether to keep its files. Even without `overwrite`, replaces a folder
    that has failure reports but no results, or that has only work records. Raises the errors of `check_run_folder`. At the end
    of the block, deletes the folder if it has neither results nor failure reports.
    """
    check_run_folder(plan, overwrite=overwrite, resume=resume)
    folder = run_folder(plan)
    keeps_reports = is_folder_of_restarted_run(folder)  # the reports of this torchrun's earlier attempts
    with _folder_errors(plan, folder):
        if folder.is_symlink():
            raise OSError(ELOOP, "it is a link", str(folder))
        lock = FolderLock(folder)
    try:
        if not (resume and _is_run_folder(folder)):
            with _folder_errors(plan, folder):
                _replace_files(plan, folder, overwrite=overwrite)
        if not keeps_reports:
            load_recorder().delete_reports(folder)
        yield folder
    finally:
        if _is_unused(folder) and not (folder / FAULTS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _replace_files(plan: Plan, folder: Path, *, overwrite: bool) -> None:
    """Deletes the files in a locked run folder, except failure reports, and writes the plan. Raises PlanError "run-folder"."""
    if _has_protected_files(folder) and not (overwrite and _is_run_folder(folder)):
        raise _refusal_error(plan, f"another run has just created `{folder}`", "choose another `run.name`")
    for path in folder.iterdir():
        if path.name == FAULTS:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
    write_plan(plan, folder)


def write_plan(plan: Plan, folder: Path) -> None:
    """Writes the resolved plan `plan` into `folder` as `plan.toml`, completely or not at all."""
    write_atomically(folder / PLAN_FILE, plan.to_toml())


def _is_unused(folder: Path) -> bool:
    """Returns whether `folder` has no results, either because it is empty or because its run failed before the first step."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*")}
    return sizes.keys() <= {PLAN_FILE, METRICS_FILE, _LOCK, FAULTS, ATTEMPT_FILE, START_FILE} and not sizes.get(METRICS_FILE)


def _has_protected_files(folder: Path) -> bool:
    """Returns whether the folder has files that a run must not replace without `--overwrite`."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    names = {path.name for path in folder.iterdir()}
    work = folder / WORK
    if names <= {_LOCK, FAULTS, WORK} and WORK in names:
        # On hosts without rank 0, a run leaves only records of ranks.
        is_folder = work.is_dir() and not work.is_symlink()
        return not is_folder or not all(path.match("rank-*.jsonl") and not path.is_dir() for path in work.iterdir())
    return bool(names - {_LOCK}) and not ((folder / FAULTS).is_dir() and _is_unused(folder))


def _is_run_folder(folder: Path) -> bool:
    """Returns whether a run created `folder`. Its plan has `source_folder`, unlike a plan that a user has written."""
    try:
        return "source_folder" in tomli.loads((folder / PLAN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False


@contextmanager
def _folder_errors(plan: Plan, folder: Path) -> Iterator[None]:
    """Turns a FolderInUseError or OSError of the block into PlanError "run-folder"."""
    try:
        yield
    except FolderInUseError as error:
        process = f", process {error.pid}" if error.pid else ""
        hint = "wait until it ends, or choose another `run.name`"
        raise _refusal_error(plan, f"`{folder}` is used by an active run{process}", hint) from None
    except OSError as error:
        message = f"cannot write `{error.filename or folder}`: {error.strerror or error}"
        raise _refusal_error(plan, message, "choose another `run.folder`", key="folder") from error


def _refusal_error(plan: Plan, message: str, hint: str, key: str = "name") -> SleyError:
    return plan.add_locations(PlanError("run-folder", message, path=("run", key), hint=hint))

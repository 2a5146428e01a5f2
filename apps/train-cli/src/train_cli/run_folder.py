"""Makes and locks the folder of a run, `runs/<name>/`, once before any rank starts, for one run at a time; and finds the
recorder that an installed package brings.

The folder holds `plan.toml` as resolved, `start.json`, and what the run wrote: `metrics.jsonl`, `summary.json`, traces, the
final weights, `faults` if it failed, and `attempt.json`, which says from which checkpoints it may resume.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from errno import ELOOP
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import tomli

from sley_core.attempt import NAME as ATTEMPT
from sley_core.attempt import PLAN, torchrun
from sley_core.errors import PlanError, PluginError, SleyError
from sley_core.metrics.jsonl import NAME as METRICS
from sley_core.plan.plan import Plan
from sley_core.whole_files import write_whole
from train_cli.saved import can_go_on, run_folder
from train_cli.surroundings import START

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts
    from sley_core.errors import Diagnostic

LOCK = ".lock"
GROUP = "sley.recorders"
"""Entry points of a package's recorder, a subclass of `RunRecorder`; sley-doctor brings one."""

FAULTS = "faults"
WORK = "work"
"""The folders in a run's folder that a recorder writes: reports of failures, and what ranks worked at."""


class RunRecorder:
    """Records nothing; a package's recorder overrides what it records. `folder` is always the folder of the run."""

    def working(self, parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> AbstractContextManager[None]:
        """Returns a context manager in which this rank's steps are recorded. No rank waits for another in it.

        feed: of the run's samples. notes: of the run; a recorder that cannot write adds one, and ends nothing else.
        """
        return nullcontext()

    def failed(self, folder: Path, world: World, what: Diagnostic, error: BaseException) -> None:
        """Reports that this rank failed with `error`, before anything is torn down. what: the error as the user sees it."""

    def stuck(self, folder: Path, world: World, what: Diagnostic) -> None:
        """Reports what this rank is doing, when it was asked to end and has not; called in a thread beside the main one."""

    def launched(
        self, folder: Path, world: int, codes: Mapping[int, int], silent: Mapping[int, str], first: int | None
    ) -> None:
        """Reports how the `world` ranks of a local launch ended, if one failed.

        codes: exit codes by rank, negative for signals. silent: the states, in words, of ranks that had to be killed.
        first: the rank that ended first.
        """

    def forget(self, folder: Path) -> None:
        """Removes the reports of an earlier attempt, before a run begins."""


@cache
def recorder() -> RunRecorder:
    """Returns the recorder of the package that is installed, or one that records nothing.

    Raises PluginError "recorder-import" if it cannot be imported, "recorder-ambiguous" if there are several.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: point.value)
    if not points:
        return RunRecorder()
    if len(points) > 1:
        names = " and ".join(f"`{point.value}`" for point in points)
        raise PluginError("recorder-ambiguous", f"several packages record runs: {names}", hint="uninstall all but one")
    try:
        recorder_of_package: RunRecorder = points[0].load()()
    except Exception as error:
        message = f"the recorder `{points[0].value}` cannot be imported: {type(error).__name__}: {error}"
        raise PluginError("recorder-import", message, hint="reinstall its package, or uninstall it") from error
    return recorder_of_package


class TakenError(Exception):
    """Raised where another process has locked the folder; `pid` as that process wrote it, or empty."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


class FolderLock:
    """Makes `folder` if it is missing, and locks it. Raises TakenError, and OSError if it cannot be written.

    It is a lock of the system (flock(2)) on a file, not the file's existence: a file left by a killed run keeps nobody out. On
    file systems without such locks, and on systems without fcntl, nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                _lock_or_taken(self._file)
                if self._is_there():  # else its former holder has removed it meanwhile, perhaps with its folder
                    break
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)
        os.ftruncate(self._file, 0)
        os.write(self._file, json.dumps({"pid": os.getpid(), "starter": torchrun()}).encode())

    def release(self) -> None:
        """Unlocks the folder and removes the file, unless torchrun may restart this rank, which must recognise its folder."""
        restarts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
        if self._is_there() and int(restarts[0]) >= int(restarts[1]):
            self._path.unlink()
        os.close(self._file)

    def _is_there(self) -> bool:
        """Returns whether the locked file is still the one in the folder."""
        try:
            found = os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 - beside fstat
        except OSError:
            return False
        own = os.fstat(self._file)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def check_free(folder: Path) -> None:
    """Raises TakenError if a run has locked `folder` now; changes nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        file = os.open(folder / LOCK, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            _lock_or_taken(file)
        finally:
            os.close(file)


def lock(file: int) -> None:
    """Locks an open file or folder for this process and its forks. Raises BlockingIOError if another process has it."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_or_taken(file: int) -> None:
    """Locks `file`, or raises TakenError; does nothing on file systems without locks."""
    try:
        lock(file)
    except BlockingIOError:
        try:
            pid = str(json.loads(os.pread(file, 1000, 0))["pid"])
        except (ValueError, KeyError, TypeError):
            pid = ""
        raise TakenError(pid) from None
    except OSError:
        return  # no locks here


def is_restart(folder: Path) -> bool:
    """Returns whether torchrun restarted this rank within the run that made `folder`, so that it may reuse the folder."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return bool(json.loads((folder / LOCK).read_text("utf-8"))["starter"] == torchrun())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_run_folder(plan: Plan, *, overwrite: bool, resume: bool = False) -> None:
    """Raises PlanError "run-folder" if `held_run_folder` could not make the folder, or go on in it; changes nothing.

    Reasons: it exists and neither `overwrite` nor `resume` is given, it is not the folder of a run, a run that has not ended
    uses it, or it cannot be written.
    """
    folder = run_folder(plan)
    try:
        check_free(folder)
        if _is_taken(folder):
            if not overwrite and not resume:
                goes_on = "`--resume auto` goes on, " if can_go_on(plan, folder) else ""
                hint = f"{goes_on}`--overwrite` replaces it, `--set run.name=...` makes another"
                raise _refused(plan, f"`{folder}` exists already, and a run is never overwritten unasked", hint)
            if not _is_ours(folder):
                hint = "choose another `run.name` or `run.folder`"
                raise _refused(plan, f"`{folder}` is not the folder of a run, so it is not replaced", hint)
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except TakenError as error:
        raise _in_use(plan, folder, error) from None
    except OSError as error:
        raise _unwritable(plan, folder, error) from error
    if not nearest.is_dir():
        raise _unwritable(plan, folder, NotADirectoryError(0, "it is a file", str(nearest)))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(plan, folder, PermissionError(0, "permission denied", str(nearest)))


@contextmanager
def held_run_folder(plan: Plan, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Makes the folder of a run of `plan` with its `plan.toml`, and locks it against other runs until the block ends.

    resume: its files stay. A run that failed before its first step leaves no folder, or one with nothing but reports of its
    ranks, and on hosts other than rank 0's a run leaves records of ranks: the next run may take these. Raises as
    `check_run_folder` does.
    """
    check_run_folder(plan, overwrite=overwrite, resume=resume)
    folder = run_folder(plan)
    again = is_restart(folder)
    try:
        if folder.is_symlink():
            raise OSError(ELOOP, "it is a link", str(folder))
        lock = FolderLock(folder)
    except TakenError as error:
        raise _in_use(plan, folder, error) from None
    except OSError as error:
        raise _unwritable(plan, folder, error) from error
    try:
        if not (resume and _is_ours(folder)):
            _fill(plan, folder, overwrite=overwrite)
        if not again:  # else what ranks said of torchrun's first attempt stays
            recorder().forget(folder)
        yield folder
    finally:
        if _is_unused(folder) and not (folder / FAULTS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _fill(plan: Plan, folder: Path, *, overwrite: bool) -> None:
    """Empties the folder, which this process has locked, of all but reports, and writes the plan."""
    if _is_taken(folder) and not (overwrite and _is_ours(folder)):
        raise _refused(plan, f"`{folder}` was made by another run just now", "choose another `run.name`")
    try:
        for path in folder.iterdir():
            if path.name == FAULTS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        write_plan(plan, folder)
    except OSError as error:
        raise _unwritable(plan, folder, error) from error


def write_plan(plan: Plan, folder: Path) -> None:
    """Writes the resolved plan into `folder`, in full or not at all."""
    write_whole(folder / PLAN, plan.to_toml())


def _is_unused(folder: Path) -> bool:
    """Returns whether `folder` has no results: nothing, or what a run has that failed before its first step."""
    files = {path.name: path.stat().st_size for path in folder.glob("*")}
    return files.keys() <= {PLAN, METRICS, LOCK, FAULTS, ATTEMPT, START} and not files.get(METRICS)


def _is_taken(folder: Path) -> bool:
    """Returns whether the folder has something that a run must not replace unasked."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    names = {path.name for path in folder.iterdir()}
    work = folder / WORK
    if names <= {LOCK, FAULTS, WORK} and WORK in names:
        # Records of ranks are all that ranks other than 0 leave on hosts of their own.
        is_record = work.is_dir() and not work.is_symlink()
        return not is_record or not all(path.match("rank-*.jsonl") and not path.is_dir() for path in work.iterdir())
    return bool(names - {LOCK}) and not ((folder / FAULTS).is_dir() and _is_unused(folder))


def _is_ours(folder: Path) -> bool:
    """Returns whether a run made `folder`: only a resolved plan has `source_folder`, a hand-written one does not."""
    try:
        written = tomli.loads((folder / PLAN).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return "source_folder" in written


def _in_use(plan: Plan, folder: Path, error: TakenError) -> SleyError:
    who = f", process {error.pid}" if error.pid else ""
    hint = "wait for its end, or choose another `run.name`"
    return _refused(plan, f"`{folder}` belongs to a run that has not ended{who}", hint)


def _unwritable(plan: Plan, folder: Path, error: OSError) -> SleyError:
    message = f"cannot write `{error.filename or folder}`: {error.strerror or error}"
    return _refused(plan, message, "choose another `run.folder`", key="folder")


def _refused(plan: Plan, message: str, hint: str, key: str = "name") -> SleyError:
    return plan.located(PlanError("run-folder", message, path=("run", key), hint=hint))

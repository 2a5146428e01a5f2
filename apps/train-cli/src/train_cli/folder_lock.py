"""Locks the folder of a run, so that one run at a time uses it; the lock ends with the process that holds it.

It is a lock of the system (flock(2)) on a file, not the file's existence: a file left by a killed run keeps nobody out. On file
systems without such locks, and on systems without fcntl, nothing is locked.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from sley_core.attempt import torchrun

NAME = ".lock"


class TakenError(Exception):
    """Raised where another process has locked the folder; `pid` as that process wrote it, or empty."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


class FolderLock:
    """Makes `folder` if it is missing, and locks it. Raises TakenError, and OSError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
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
        file = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            _lock_or_taken(file)
        finally:
            os.close(file)


def is_restart(folder: Path) -> bool:
    """Returns whether torchrun restarted this rank within the run that made `folder`, so that it may reuse the folder."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return bool(json.loads((folder / NAME).read_text("utf-8"))["starter"] == torchrun())
    except (OSError, ValueError, KeyError, TypeError):
        return False


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

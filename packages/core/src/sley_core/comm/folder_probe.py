"""Checks before the first step that all ranks can write in one shared folder."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sley_core.errors import RunError, format_cause

if TYPE_CHECKING:
    from sley_core.comm.group import Group

PATIENCE_S = 10.0
"""The time in which a network file system must show one host's files on another host."""

_POLL_S = 0.05


class Scratch(Protocol):
    """Makes probe folders in the folder `text`, a path or URL. token: the name of a probe folder."""

    @property
    def text(self) -> str: ...

    def write(self, token: str, name: str) -> None:
        """Writes a small file, under its name once it is complete."""

    def names(self, token: str) -> list[str]:
        """Returns the names of the files in the probe folder."""
        ...

    def remove(self, token: str) -> None:
        """Deletes the probe folder, and its parent if that is empty."""


class LocalScratch:
    """Makes probe folders in the local folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = str(path)

    def write(self, token: str, name: str) -> None:
        self._path(token).mkdir(parents=True, exist_ok=True)
        (self._path(token) / name).write_bytes(b"probe")

    def names(self, token: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [file.name for file in self._path(token).iterdir()]
        return []

    def remove(self, token: str) -> None:
        shutil.rmtree(self._path(token), ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _path(self, token: str) -> Path:
        return self.path / f".probe-{token}"


def probe(
    scratch: Scratch, control: Group, timeout_s: float, problem: Callable[[], str] = lambda: "", *, writes: bool = True
) -> None:
    """Raises RunError "checkpoint-folder" on all ranks unless all of them can write in the one folder of `scratch`.

    All ranks of `control` call it, and it leaves no files. timeout_s: the limit of an exchange between ranks. problem: returns
    the reason why rank 0 refuses the folder, or "". writes: whether this rank will write there, as rank 0 always does.
    """
    # Half, so that a rank reports a missing file before the others stop waiting for it.
    patience_s = min(PATIENCE_S, timeout_s / 2)
    is_first, file_name = control.coord == 0, f"rank-{control.coord:05}"
    token, first_failure = "", ""

    def run_steps(*steps: Callable[[], str | None]) -> str:
        """Returns the first text that a step returns, or its error, since the other ranks wait for an answer."""
        try:
            return next((text for step in steps if (text := step())), "")
        except Exception as error:  # whatever a file system raises
            return format_cause(error)

    def wait_for_files(names: Iterable[str], label: str) -> str:
        """Waits until files with these `names` exist. Returns a text if they do not appear in time."""
        expected, deadline = set(names), time.monotonic() + patience_s
        while not expected <= set(scratch.names(token)):
            if time.monotonic() > deadline:
                return f"it cannot see {label}"
            time.sleep(_POLL_S)
        return ""

    # Three collectives, even after a failure: rank 0 has written; the others see that and have written; rank 0 sees it.
    if is_first:
        token = secrets.token_hex(8)
        first_failure = run_steps(problem, lambda: scratch.write(token, file_name))
    token, first_failure = control.gather_objects([token, first_failure], label="the location of the checkpoints")[0]
    failure = first_failure if is_first else ""
    if writes and not is_first and not first_failure:
        failure = run_steps(
            lambda: wait_for_files(["rank-00000"], "the file of rank 0"), lambda: scratch.write(token, file_name)
        )
    reports = control.gather_objects([failure, writes], label="the ranks that write checkpoints")
    if is_first:
        if not any(reason for reason, _ in reports):
            names = [f"rank-{coord:05}" for coord, (_, is_writer) in enumerate(reports) if is_writer]
            first_failure = run_steps(lambda: wait_for_files(names, "the files of the other ranks"))
        run_steps(lambda: scratch.remove(token))
    first_failure = control.gather_objects(first_failure, label="the files that rank 0 sees")[0]
    for rank, reason in [
        (0, first_failure),
        *((rank, reason) for rank, (reason, _) in zip(control.ranks, reports, strict=True)),
    ]:
        if reason:
            hint = "all ranks write checkpoints and weights into one folder; use a folder that every host can read and write"
            raise RunError("checkpoint-folder", f"rank {rank} cannot save in {scratch.text}: {reason}", hint=hint)

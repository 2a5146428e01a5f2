"""Tries, before the first step, whether all ranks can write in one folder that each of them sees."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sley_core.errors import RunError, cause

if TYPE_CHECKING:
    from sley_core.comm.group import Group

PATIENCE_S = 10.0
"""How long a network file system may take to show one host what another one has written."""

_POLL_S = 0.05


class Scratch(Protocol):
    """Makes folders for a probe in the folder `text`, a path or URL. token: names one of them."""

    @property
    def text(self) -> str: ...

    def write(self, token: str, name: str) -> None:
        """Writes a small file, under its name once it is complete."""

    def names(self, token: str) -> list[str]:
        """Returns the names of the files that there are."""
        ...

    def remove(self, token: str) -> None:
        """Deletes all of it; and the folder, if it is empty then."""


class LocalScratch:
    """Makes them in the local folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = str(path)

    def write(self, token: str, name: str) -> None:
        self._at(token).mkdir(parents=True, exist_ok=True)
        (self._at(token) / name).write_bytes(b"probe")

    def names(self, token: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [file.name for file in self._at(token).iterdir()]
        return []

    def remove(self, token: str) -> None:
        shutil.rmtree(self._at(token), ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _at(self, token: str) -> Path:
        return self.path / f".probe-{token}"


def probe(
    scratch: Scratch, control: Group, timeout_s: float, problem: Callable[[], str] = lambda: "", *, writes: bool = True
) -> None:
    """Raises RunError "checkpoint-folder" on all ranks alike unless each rank can write in the folder of `scratch`, and all see
    the same one. All ranks of `control` call it; nothing stays there.

    timeout_s: of an exchange between ranks. problem: returns why rank 0 refuses the folder. writes: whether this rank will
    write there; rank 0 always does.
    """
    # Half, so that a rank says what it does not see before the others stop waiting for it.
    patience_s = min(PATIENCE_S, timeout_s / 2)
    is_first, own = control.coord == 0, f"rank-{control.coord:05}"
    token, failed = "", ""

    def check(*steps: Callable[[], str | None]) -> str:
        """Returns the text of the first of `steps` that has one, or of its error: the other ranks wait for an answer."""
        try:
            return next((text for step in steps if (text := step())), "")
        except Exception as error:  # whatever a file system raises
            return cause(error)

    def see(names: Iterable[str], what: str) -> str:
        """Waits until there are files with these `names`; returns a text if they do not appear in time."""
        wanted, deadline = set(names), time.monotonic() + patience_s
        while not wanted <= set(scratch.names(token)):
            if time.monotonic() > deadline:
                return f"it does not see {what} there"
            time.sleep(_POLL_S)
        return ""

    # All ranks, three times, whatever failed: rank 0 has written; the others have, where they see that; rank 0 sees them.
    if is_first:
        token = secrets.token_hex(8)
        failed = check(problem, lambda: scratch.write(token, own))
    token, failed = control.gather_objects([token, failed], what="where checkpoints are written")[0]
    mine = failed if is_first else ""
    if writes and not is_first and not failed:
        mine = check(lambda: see(["rank-00000"], "what rank 0 writes"), lambda: scratch.write(token, own))
    everyone = control.gather_objects([mine, writes], what="who can write checkpoints")
    if is_first:
        if not any(why for why, _ in everyone):
            names = [f"rank-{coord:05}" for coord, (_, is_writer) in enumerate(everyone) if is_writer]
            failed = check(lambda: see(names, "what the other ranks write"))
        check(lambda: scratch.remove(token))
    failed = control.gather_objects(failed, what="what rank 0 sees of the checkpoints' folder")[0]
    for rank, why in [(0, failed), *((rank, why) for rank, (why, _) in zip(control.ranks, everyone, strict=True))]:
        if why:
            hint = "all ranks write checkpoints and weights into one folder: name one that every host can write and see"
            raise RunError("checkpoint-folder", f"rank {rank} cannot save in {scratch.text}: {why}", hint=hint)

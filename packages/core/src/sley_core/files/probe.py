"""Tries, before the first step, whether all ranks can write in one folder that each of them sees."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sley_core.comm.collectives import gather_objects
from sley_core.errors import RunError
from sley_core.files.folders import GONE, STAGING, Folder, LocalFolder, open_folder, said

if TYPE_CHECKING:
    from sley_core.comm.groups import Group

PATIENCE_S = 10.0
"""How long a network file system may take to show one host what another one has written."""

_POLL_S = 0.05


def probe(
    path: str, control: Group, timeout_s: float, problem: Callable[[], str] = lambda: "", *, writes: bool = True
) -> None:
    """Raises RunError "checkpoint-folder" on all ranks alike unless each rank can write in the folder at `path`, a URL or a
    path, and all see the same one. All ranks of `control` call it; nothing stays there.

    timeout_s: of an exchange between ranks. problem: returns why rank 0 refuses the folder. writes: whether this rank will
    write there; rank 0 always does.
    """
    # Half, so that a rank says what it does not see before the others stop waiting for it.
    patience_s = min(PATIENCE_S, timeout_s / 2)
    is_first = control.coord == 0
    token = secrets.token_hex(8) if is_first else ""
    failed = _attempt(lambda: problem() or _write(path, token, 0)) if is_first else ""
    # All ranks, three times, whatever failed: rank 0 has written; the others have, where they see that; rank 0 sees them.
    token, failed = gather_objects([token, failed], control, what="where checkpoints are written")[0]
    mine = "" if is_first or failed or not writes else _attempt(lambda: _beside(path, token, control.coord, patience_s))
    everyone = gather_objects([mine, writes], control, what="who can write checkpoints")
    reasons = [(0, failed)] + [(rank, why) for rank, (why, _) in zip(control.ranks, everyone, strict=True)]
    if is_first:
        if not any(why for _, why in reasons):
            writers = [coord for coord, (_, is_writer) in enumerate(everyone) if is_writer]
            failed = _attempt(
                lambda: _seen(_scratch(path, token), map(_name, writers), "what the other ranks write", patience_s)
            )
        _attempt(lambda: _remove(path, token))
    failed = gather_objects(failed, control, what="what rank 0 sees of the checkpoints' folder")[0]
    for rank, why in [(0, failed), *reasons[1:]]:
        if why:
            hint = "all ranks write checkpoints and weights into one folder: name one that every host can write and see"
            raise RunError("checkpoint-folder", f"rank {rank} cannot save in {path}: {why}", hint=hint)


def _attempt(work: Callable[[], str]) -> str:
    """Returns the text of `work()`, or of its error: the other ranks wait for an answer."""
    try:
        return work()
    except Exception as error:  # whatever a file system raises
        return said(error)


def _scratch(path: str, token: str) -> Folder:
    return open_folder(path).child(f"{STAGING}probe-{token}-{GONE}")


def _name(coord: int) -> str:
    return f"rank-{coord:05}"


def _write(path: str, token: str, coord: int) -> str:
    _scratch(path, token).write(_name(coord), [b"probe"])
    return ""


def _beside(path: str, token: str, coord: int, patience_s: float) -> str:
    """Writes beside the file of rank 0, once that is seen; returns why not."""
    return _seen(_scratch(path, token), [_name(0)], "what rank 0 writes", patience_s) or _write(path, token, coord)


def _seen(folder: Folder, names: Iterable[str], what: str, patience_s: float) -> str:
    """Waits until `folder` has `names`; returns a text if it has not in time."""
    wanted, deadline = set(names), time.monotonic() + patience_s
    while not wanted <= set(folder.names()):
        if time.monotonic() > deadline:
            return f"it does not see {what} there"
        time.sleep(_POLL_S)
    return ""


def _remove(path: str, token: str) -> str:
    """Deletes the probe, and the folder if it is empty now."""
    _scratch(path, token).remove()
    folder = open_folder(path)
    if isinstance(folder, LocalFolder) and not folder.names():
        folder.path.rmdir()
    return ""

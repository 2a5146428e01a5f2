"""Verifies that a checkpoint is as it was written, and finds the newest intact one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sley_core.checkpoint.index import INDEX, CheckpointIndex, FileFacts, read_index
from sley_core.checkpoint.reader import read_header
from sley_core.checkpoint.timed import StalledError
from sley_core.errors import RunError
from sley_core.factory import cause
from sley_core.files.folders import STAGING, ReadableFolder, open_folder

_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Damage(NamedTuple):
    """Names a damaged file, and says how it differs from what was written."""

    file: str
    how: str

    def __str__(self) -> str:
        return f"{self.file} {self.how}"


class Newest(NamedTuple):
    """Holds the newest intact checkpoint of a folder, None if there is none; and newer ones that are damaged, each with its
    damages.
    """

    path: str | None
    passed_over: list[tuple[str, list[Damage]]]


def verify(path: str | Path) -> list[Damage]:
    """Returns the damaged files of the checkpoint in the folder `path`; [] if it is as it was written.

    Reads all of it. Raises RunError `no-checkpoint` for a folder that has nothing of one.
    """
    folder = open_folder(path)
    if not folder.names():
        raise RunError("no-checkpoint", f"there is no checkpoint in {folder.text}")
    return damages(folder)


def newest(path: str | Path) -> Newest:
    """Returns the newest intact checkpoint in the folder `path`, which has several; reads their files."""
    folder = open_folder(path)
    passed_over: list[tuple[str, list[Damage]]] = []
    for name in ready(folder):
        found = damages(folder.child(name))
        if not found:
            return Newest(folder.child(name).text, passed_over)
        passed_over.append((folder.child(name).text, found))
    return Newest(None, passed_over)


def ready(folder: ReadableFolder) -> list[str]:
    """Returns the names of the complete checkpoints in a folder of several, the newest first."""
    names = [name for name in folder.names() if _STEP.fullmatch(name) and not folder.is_unfinished(name, INDEX)]
    return sorted(names, key=_age, reverse=True)


def is_ours(name: str) -> bool:
    """Returns whether a folder with this name is a checkpoint of a run, or the unfinished save of one."""
    return name.startswith(STAGING) or _STEP.fullmatch(name) is not None


def step_name(step: int, taken: Iterable[str]) -> str:
    """Returns an unused name for the checkpoint after `step`, which sorts as the newest of all.

    If a run has been resumed from an older checkpoint, or saves the same step again, a number is added after the step from then
    on.
    """
    ages = [_age(name) for name in taken if _STEP.fullmatch(name)]
    times_back, last = max(ages, default=(0, -1))
    times_back += step <= last
    return f"step-{step:08}-{times_back}" if times_back else f"step-{step:08}"


def damages(folder: ReadableFolder) -> list[Damage]:
    """Returns the damages of the checkpoint in `folder`; reads all of it."""
    return examined(folder)[1]


def examined(folder: ReadableFolder, rank: int = 0, num_ranks: int = 1) -> tuple[CheckpointIndex | None, list[Damage]]:
    """Returns the index, None if it cannot be read, and the damages that one of `num_ranks` ranks finds. Each rank reads
    different files, and all read the index. Raises StalledError.
    """
    try:
        if INDEX not in folder.names():
            return None, [Damage(INDEX, "is missing")]
        index = read_index(folder)
    except StalledError:
        raise
    except RunError as error:
        return None, [Damage(INDEX, f"is damaged: {error.diagnostics[0].message.rpartition(' is damaged: ')[2]}")]
    except Exception as error:  # whatever a file system raises
        return None, [Damage(INDEX, f"cannot be read: {cause(error)}")]
    found = (_damage(folder, name, index) for name in sorted(index.files)[rank::num_ranks])
    return index, [one for one in found if one is not None]


def _damage(folder: ReadableFolder, name: str, index: CheckpointIndex) -> Damage | None:
    """Returns what is wrong with a file of a checkpoint, None if nothing is; reads all of it."""
    facts = index.files[name]
    try:
        num_bytes = folder.num_bytes(name)
        if num_bytes == facts.num_bytes and folder.crc(name) == facts.crc:
            return None
        return Damage(name, _whose(folder, name, index, facts) or _how(num_bytes, facts))
    except FileNotFoundError:
        return Damage(name, "is missing")
    except StalledError:
        raise
    except Exception as error:  # whatever a file system raises
        return Damage(name, f"cannot be read: {cause(error)}")


def _how(num_bytes: int, facts: FileFacts) -> str:
    """Returns in words how a file's size or content differs from what was written."""
    if num_bytes < facts.num_bytes:
        return f"is cut short: it has {num_bytes} bytes of {facts.num_bytes}"
    if num_bytes > facts.num_bytes:
        return f"is too long: it has {num_bytes} bytes, not {facts.num_bytes}"
    return "has other bytes than were written"


def _whose(folder: ReadableFolder, name: str, index: CheckpointIndex, facts: FileFacts) -> str:
    """Returns a text if the file says that it belongs to another checkpoint or rank; else ""."""
    try:
        _, found = read_header(folder, name)
    except StalledError:
        raise
    except RunError:
        return ""
    if (found.get("run"), found.get("step")) != (index.run, index.step):
        return f"is of step {found.get('step')} of the run {found.get('run')!r}"
    if found.get("token") != index.token:
        return f"is of another checkpoint of step {index.step}"
    if found.get("rank") != facts.rank:
        return f"is the file of rank {found.get('rank')}"
    return ""


def _age(name: str) -> tuple[int, int]:
    """Returns a sort key that grows from each save of a run to the next: how often it went back, and its steps."""
    match = _STEP.fullmatch(name)
    assert match is not None, name
    return int(match[2] or 0), int(match[1])

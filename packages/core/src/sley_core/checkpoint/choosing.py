"""Chooses the checkpoint to load: the newest intact one, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sley_core.checkpoint.folders import ReadableFolder, open_folder
from sley_core.checkpoint.index import INDEX, CheckpointIndex
from sley_core.checkpoint.reader import Checkpoint
from sley_core.checkpoint.timed import StalledError, TimedFolder, TimedReads
from sley_core.checkpoint.verify import Damage, examined, ready
from sley_core.comm.collectives import gather_objects
from sley_core.errors import RunError
from sley_core.plan.factory import cause

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts

SHOWN = 4

PassedOver = tuple[str, list[Damage]]
"""A damaged checkpoint, and what of it is."""


class RunOrigin(NamedTuple):
    """Names the checkpoint at which a run began. path: of that one. before: names of the run's own checkpoints that existed by
    then, None for all that exist now; they are of another attempt, and the run does not resume from them.
    """

    path: str
    before: frozenset[str] | None


class Wanted(NamedTuple):
    """Says which checkpoint a run asks for. path: of a checkpoint or of a folder of several; None for the newest of its own.
    own: the folder of these, if it has one. origin: what is loaded if it has written none since; rank 0's counts.
    """

    path: str | Path | None
    own: str | None
    origin: RunOrigin | None


class Chosen(NamedTuple):
    """Holds what all ranks load. found: None if there is none. passed_over: newer ones that are damaged. origin: of the run."""

    found: Checkpoint | None
    passed_over: list[PassedOver]
    origin: RunOrigin | None


def choose(wanted: Wanted, parts: Parts, reads: TimedReads) -> Chosen:
    """Returns the checkpoint to load. All ranks call it, and share the reading, by `reads`.

    Raises RunError on all ranks alike: `checkpoint-damaged` if the only one, or all of several, are damaged, `no-checkpoint`,
    and `checkpoint-load` for a folder that cannot be read, or does not answer.
    """
    world, control = parts.world, parts.groups["control"]
    # All ranks: which there are is what rank 0 sees.
    said = _candidates(wanted, reads) if world.rank == 0 else []
    paths, begun, before, problem = gather_objects(said, control, what="which checkpoints there are")[0]
    if problem:
        raise RunError("checkpoint-load", problem)
    origin = RunOrigin(begun, frozenset(before)) if begun else None
    passed_over: list[PassedOver] = []
    for path in paths:
        candidate = TimedFolder(open_folder(path), reads)
        index, said = _seen(candidate, world.rank, world.size)
        # All ranks: they look at the same candidates in one order. Nobody reads the index again, which may be gone by then.
        everyone = gather_objects(said, control, what="what is damaged of a checkpoint")
        found = [Damage(*one) for one in dict.fromkeys(tuple(one) for damages, _, _ in everyone for one in damages)]
        for rank, (_, _, stalled) in zip(control.ranks, everyone, strict=True):
            if stalled:
                raise RunError("checkpoint-load", f"rank {rank} could not load the checkpoint: {stalled}")
        if index is not None and not found:
            _check_one([token for _, token, _ in everyone], candidate)
            chosen = origin if wanted.path is None else RunOrigin(candidate.text, frozenset(before))
            return Chosen(Checkpoint(candidate, index), passed_over, chosen)
        passed_over.append((candidate.text, found))
    if passed_over:
        path, found = passed_over[0]
        message = f"the checkpoint {path} is damaged: {', '.join(map(str, found[:SHOWN]))}"
        raise RunError("checkpoint-damaged", message, hint="there is no older one that is whole")
    if wanted.path is not None:
        raise RunError("no-checkpoint", f"there is no checkpoint in {open_folder(wanted.path).text}")
    return Chosen(None, [], origin)


def _seen(folder: TimedFolder, rank: int, num_ranks: int) -> tuple[CheckpointIndex | None, list[Any]]:
    """Returns the index, and what this rank tells: damages, whose index it is, and what has not gone on."""
    try:
        index, mine = examined(folder, rank, num_ranks)
        return index, [mine, None if index is None else index.token, ""]
    except StalledError as error:
        return None, [[], None, error.diagnostics[0].message]


def _candidates(wanted: Wanted, reads: TimedReads) -> list[Any]:
    """Returns what may be loaded, in the order in which it is tried, where the run began and which own ones are of before, and
    words for why that cannot be said.
    """
    folder = TimedFolder(open_folder(wanted.own or "" if wanted.path is None else wanted.path), reads)
    try:
        own = [] if wanted.own is None else ready(TimedFolder(open_folder(wanted.own), reads))
        if wanted.path is not None:
            is_one = INDEX in folder.names()
            return [[folder.text] if is_one else _paths(folder, ready(folder)), "", own, ""]
        if wanted.origin is None:
            return [_paths(folder, own), "", [], ""]
        begun = open_folder(wanted.origin.path).text
        before = own if wanted.origin.before is None else sorted(wanted.origin.before)
        since = [name for name in own if name not in before]
        return [[*_paths(folder, since), begun], begun, before, ""]
    except StalledError as error:
        return [[], "", [], f"rank 0 could not load the checkpoint: {error.diagnostics[0].message}"]
    except Exception as error:  # whatever a file system raises: the other ranks wait for an answer
        return [[], "", [], f"{folder.text} cannot be read: {cause(error)}"]


def _paths(folder: ReadableFolder, names: list[str]) -> list[str]:
    return [folder.child(name).text for name in names]


def _check_one(tokens: list[str], folder: ReadableFolder) -> None:
    """Raises RunError on all ranks alike if they have read different checkpoints at one path."""
    if len(set(tokens)) > 1:
        message = f"ranks see different checkpoints in {folder.text}"
        raise RunError("checkpoint-load", message, hint="all ranks must see the same folder")

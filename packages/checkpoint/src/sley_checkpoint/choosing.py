"""Chooses the checkpoint to load: the newest intact one, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sley_checkpoint.folders import ReadableFolder, StalledError, TimedFolder, TimedReads, open_folder
from sley_checkpoint.format import INDEX, CheckpointIndex, read_index
from sley_checkpoint.reader import Checkpoint, Damage, examined, ready
from sley_core.api.comm import gather_objects, one_line
from sley_core.api.state import TrainingState, shortened
from sley_core.errors import RunError, SleyError, UsageError

SHOWN = 4

PassedOver = tuple[str, list[Damage]]
"""A damaged checkpoint, and its damages."""


class Chosen(NamedTuple):
    """Names the checkpoint that all ranks load. checkpoint: None if there is none. passed_over: newer ones that are damaged.
    origin: the checkpoint at which the attempt began. notes: for the user.
    """

    checkpoint: Checkpoint | None
    passed_over: list[PassedOver]
    origin: str
    notes: list[str]


def choose(state: TrainingState, path: str | None, reads: TimedReads, *, anew: bool) -> Chosen:
    """Returns the checkpoint to load. All ranks call it, and share the reading, by `reads`.

    path: of a checkpoint or of a folder of several; None for the newest that the run itself wrote. anew: whether a run that has
    saved no checkpoint may take its steps again. Those of rank 0 count.

    Raises on all ranks alike: UsageError `never-anew` if the run's own work would begin again, RunError `checkpoint-damaged` if
    the only one, or all of several, are damaged, `no-checkpoint`, and `checkpoint-load` for a folder that cannot be read, or
    does not answer.
    """
    world, control = state.parts.world, state.parts.groups["control"]
    # All ranks: rank 0 lists the checkpoints.
    mine = _candidates(state, path, reads, anew=anew) if world.rank == 0 else {}
    seen = gather_objects(mine, control, what="which checkpoints there are")[0]
    if seen["problem"]:
        code, message, hint = seen["problem"]
        kind = UsageError if code == "never-anew" else RunError
        raise kind(code, message, hint=hint)
    names, origin, notes = seen["paths"], seen["origin"], seen["notes"]
    passed_over: list[PassedOver] = []
    for name in names:
        candidate = TimedFolder(open_folder(name), reads)
        index, report = _seen(candidate, world.rank, world.size)
        # All ranks: they look at the same candidates in one order. Nobody reads the index again, which may be gone by then.
        everyone = gather_objects(report, control, what="what is damaged of a checkpoint")
        damages = [Damage(*one) for one in dict.fromkeys(tuple(one) for own, _, _ in everyone for one in own)]
        for rank, (_, _, stalled) in zip(control.ranks, everyone, strict=True):
            if stalled:
                raise RunError("checkpoint-load", f"rank {rank} could not load the checkpoint: {stalled}")
        if index is not None and not damages:
            _check_one([token for _, token, _ in everyone], candidate)
            return Chosen(Checkpoint(candidate, index), passed_over, origin, notes)
        passed_over.append((candidate.text, damages))
    if passed_over:
        first, damages = passed_over[0]
        message = f"the checkpoint {first} is damaged: {', '.join(map(str, damages[:SHOWN]))}"
        raise RunError("checkpoint-damaged", message, hint="there is no older one that is whole")
    if path is not None:
        raise RunError("no-checkpoint", f"there is no checkpoint in {open_folder(path).text}")
    return Chosen(None, [], origin, notes)


def _seen(folder: TimedFolder, rank: int, num_ranks: int) -> tuple[CheckpointIndex | None, list[Any]]:
    """Returns the index, and for the other ranks: damages, the token of the index, and the read that has stalled."""
    try:
        index, mine = examined(folder, rank, num_ranks)
        return index, [mine, None if index is None else index.token, ""]
    except StalledError as error:
        return None, [[], None, error.diagnostics[0].message]


def _candidates(state: TrainingState, path: str | None, reads: TimedReads, *, anew: bool) -> dict[str, Any]:
    """Returns the checkpoints in the order in which they are tried, notes, the checkpoint at which the attempt began, and, as
    code, message and hint, why none may be loaded.
    """
    where = open_folder(state.folder or "" if path is None else path)
    folder = TimedFolder(where, reads)
    try:
        if path is None:
            return _of_this_run(state, folder, anew=anew)
        paths = [folder.text] if INDEX in folder.names() else _paths(folder, ready(folder))
        return _seen_by_rank_0(paths)
    except StalledError as error:
        message = f"rank 0 could not load the checkpoint: {error.diagnostics[0].message}"
        return _seen_by_rank_0(problem=("checkpoint-load", message, None))
    except SleyError as error:
        first = error.diagnostics[0]
        return _seen_by_rank_0(problem=(first.code, first.message, first.hint))
    except Exception as error:  # whatever a file system raises: the other ranks wait for an answer
        return _seen_by_rank_0(problem=("checkpoint-load", f"{folder.text} cannot be read: {one_line(error)}", None))


def _seen_by_rank_0(
    paths: Sequence[str] = (), origin: str = "", notes: Sequence[str] = (), problem: tuple[str, str, str | None] | None = None
) -> dict[str, Any]:
    return {"paths": list(paths), "origin": origin, "notes": list(notes), "problem": problem}


def _of_this_run(state: TrainingState, folder: TimedFolder, *, anew: bool) -> dict[str, Any]:
    """Returns the checkpoints on the line of the run's own steps, the newest first, then the one at which its attempt began.

    Raises UsageError "never-anew" if there is none although the run has taken steps, or if there are only those of an attempt
    of which the run's folder does not know.
    """
    names = ready(folder)
    if state.attempt.folder is None:  # nothing says which attempts are this run's, and there are no rows
        return _seen_by_rank_0(_paths(folder, names))
    attempt = state.attempt.known
    mine: list[str] = []
    others: list[str] = []
    for name in names:
        index = index_or_none(folder.child(name))
        # One that cannot be read is tried, and its damage named.
        is_mine = index is None or (attempt is not None and attempt.has_taken(index.lineage, index.step))
        (mine if is_mine else others).append(name)
    paths = _paths(folder, mine)
    origin = attempt.origin if attempt is not None else ""
    if origin and attempt is not None and attempt.saved < 0 and origin not in paths:
        paths.append(origin)
    if not paths and not (anew and attempt is not None and attempt.saved < 0):
        state.attempt.refuse_to_begin_anew(folder.text, others)
    notes = [f"not used, since other attempts wrote them: {shortened(others)} in {folder.text}"] if others else []
    return _seen_by_rank_0(paths, origin, notes)


def index_or_none(folder: ReadableFolder) -> CheckpointIndex | None:
    """Returns the index of a checkpoint; None if it is damaged, or gone. Raises StalledError."""
    try:
        return read_index(folder)
    except StalledError:
        raise
    except Exception:  # whatever a file system raises
        return None


def _paths(folder: ReadableFolder, names: list[str]) -> list[str]:
    return [folder.child(name).text for name in names]


def _check_one(tokens: list[str], folder: ReadableFolder) -> None:
    """Raises RunError on all ranks alike if they have read different checkpoints at one path."""
    if len(set(tokens)) > 1:
        message = f"ranks see different checkpoints in {folder.text}"
        raise RunError("checkpoint-load", message, hint="all ranks must see the same folder")

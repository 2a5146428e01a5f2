"""Chooses the checkpoint to load: the newest intact one, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sley_core.attempt import Attempt, read_attempt
from sley_core.checkpoint.index import INDEX, CheckpointIndex, read_index
from sley_core.checkpoint.reader import Checkpoint
from sley_core.checkpoint.timed import StalledError, TimedFolder, TimedReads
from sley_core.checkpoint.verify import Damage, examined, ready
from sley_core.comm.collectives import gather_objects
from sley_core.errors import RunError, SleyError, UsageError
from sley_core.factory import cause
from sley_core.files.folders import ReadableFolder, open_folder
from sley_core.metrics.jsonl import rows
from sley_core.run_files import WEIGHTS

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts

SHOWN = 4
REFUSED = "never-anew"
"""The code of a load that would begin work again which has been done."""

PassedOver = tuple[str, list[Damage]]
"""A damaged checkpoint, and what of it is."""


class Wanted(NamedTuple):
    """Says which checkpoint a run asks for. path: of a checkpoint or of a folder of several; None for the newest that the run
    itself wrote. own: the folder of these, if it has one. folder: the run's, if it has one. attempt: of this process, if it has
    taken steps; left out, the one that `folder` names. anew: whether a run that has saved no checkpoint may take its steps
    again. Those of rank 0 count.
    """

    path: str | Path | None
    own: str | None
    folder: Path | None = None
    attempt: Attempt | None = None
    anew: bool = False


class Chosen(NamedTuple):
    """Holds what all ranks load. found: None if there is none. passed_over: newer ones that are damaged. origin: the checkpoint
    at which the attempt began. notes: for the user.
    """

    found: Checkpoint | None
    passed_over: list[PassedOver]
    origin: str
    notes: list[str]


def choose(wanted: Wanted, parts: Parts, reads: TimedReads) -> Chosen:
    """Returns the checkpoint to load. All ranks call it, and share the reading, by `reads`.

    Raises on all ranks alike: UsageError `never-anew` if the run's own work would begin again, RunError `checkpoint-damaged` if
    the only one, or all of several, are damaged, `no-checkpoint`, and `checkpoint-load` for a folder that cannot be read, or
    does not answer.
    """
    world, control = parts.world, parts.groups["control"]
    # All ranks: which there are is what rank 0 sees.
    mine = _candidates(wanted, reads) if world.rank == 0 else {}
    seen = gather_objects(mine, control, what="which checkpoints there are")[0]
    if seen["problem"]:
        code, message, hint = seen["problem"]
        kind = UsageError if code == REFUSED else RunError
        raise kind(code, message, hint=hint)
    paths, origin, notes = seen["paths"], seen["origin"], seen["notes"]
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
            return Chosen(Checkpoint(candidate, index), passed_over, origin, notes)
        passed_over.append((candidate.text, found))
    if passed_over:
        path, found = passed_over[0]
        message = f"the checkpoint {path} is damaged: {', '.join(map(str, found[:SHOWN]))}"
        raise RunError("checkpoint-damaged", message, hint="there is no older one that is whole")
    if wanted.path is not None:
        raise RunError("no-checkpoint", f"there is no checkpoint in {open_folder(wanted.path).text}")
    return Chosen(None, [], origin, notes)


def _seen(folder: TimedFolder, rank: int, num_ranks: int) -> tuple[CheckpointIndex | None, list[Any]]:
    """Returns the index, and what this rank tells: damages, whose index it is, and what has not gone on."""
    try:
        index, mine = examined(folder, rank, num_ranks)
        return index, [mine, None if index is None else index.token, ""]
    except StalledError as error:
        return None, [[], None, error.diagnostics[0].message]


def _candidates(wanted: Wanted, reads: TimedReads) -> dict[str, Any]:
    """Returns what may be loaded, in the order in which it is tried, notes, where the attempt began, and, as code, message and
    hint, why nothing may be.
    """
    where = open_folder(wanted.own or "" if wanted.path is None else wanted.path)
    folder = TimedFolder(where, reads)
    try:
        if wanted.path is None:
            return _of_this_run(wanted, folder)
        paths = [folder.text] if INDEX in folder.names() else _paths(folder, ready(folder))
        return _seen_by_rank_0(paths)
    except StalledError as error:
        said = f"rank 0 could not load the checkpoint: {error.diagnostics[0].message}"
        return _seen_by_rank_0(problem=("checkpoint-load", said, None))
    except SleyError as error:
        first = error.diagnostics[0]
        return _seen_by_rank_0(problem=(first.code, first.message, first.hint))
    except Exception as error:  # whatever a file system raises: the other ranks wait for an answer
        return _seen_by_rank_0(problem=("checkpoint-load", f"{folder.text} cannot be read: {cause(error)}", None))


def _seen_by_rank_0(
    paths: Sequence[str] = (),
    origin: str = "",
    notes: Sequence[str] = (),
    problem: tuple[str, str, str | None] | None = None,
) -> dict[str, Any]:
    return {"paths": list(paths), "origin": origin, "notes": list(notes), "problem": problem}


def _of_this_run(wanted: Wanted, folder: TimedFolder) -> dict[str, Any]:
    """Returns the checkpoints on the line of the run's own steps, the newest first, then the one at which its attempt began.

    Raises UsageError "never-anew" if there is none although the run has taken steps, or if there are only those of an attempt
    of which the run's folder does not know.
    """
    names = ready(folder)
    if wanted.folder is None:  # nothing says which attempts are this run's, and there are no rows
        return _seen_by_rank_0(_paths(folder, names))
    attempt = wanted.attempt or read_attempt(wanted.folder)
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
    if not paths and not (wanted.anew and attempt is not None and attempt.saved < 0):
        _refuse_to_begin_anew(wanted.folder, folder.text, attempt, others)
    notes = [f"not used, since other attempts wrote them: {_listed(others)} in {folder.text}"] if others else []
    return _seen_by_rank_0(paths, origin, notes)


def _refuse_to_begin_anew(run: Path, own: str, attempt: Attempt | None, others: list[str]) -> None:
    """Raises UsageError "never-anew" if the run has done work that a first step would begin again."""
    steps = max((int(row["step"]) for row in rows(run)), default=0)
    work = [f"rows up to step {steps}"] if steps else []
    work += ["final weights"] if (run / WEIGHTS).is_dir() else []
    saved = -1 if attempt is None else attempt.saved
    if work or saved >= 0:
        has = " and ".join(work) or "an attempt without rows"
        beside = f", only those of other attempts: {_listed(others)}" if others else ""
        lost = f"; the newest was of step {saved}" if saved >= 0 else "; it has saved none"
        hint = "bring the checkpoints back, or name one with `--resume PATH`; `--overwrite` begins anew"
        if saved < 0:
            hint = "`--overwrite` begins anew; `[checkpoint]` saves a run on its way"
        raise UsageError(REFUSED, f"{run} has {has}, but {own} has no checkpoint of it{beside}{lost}", hint=hint)
    if others and attempt is None:
        message = f"{own} has checkpoints ({_listed(others)}), but {run} does not say that this run wrote them"
        hint = "`--resume PATH` takes one of them; without `--resume`, the run begins at the first step"
        raise UsageError(REFUSED, message, hint=hint)


def index_or_none(folder: ReadableFolder) -> CheckpointIndex | None:
    """Returns the index of a checkpoint; None if it is damaged, or gone. Raises StalledError."""
    try:
        return read_index(folder)
    except StalledError:
        raise
    except Exception:  # whatever a file system raises
        return None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _paths(folder: ReadableFolder, names: list[str]) -> list[str]:
    return [folder.child(name).text for name in names]


def _check_one(tokens: list[str], folder: ReadableFolder) -> None:
    """Raises RunError on all ranks alike if they have read different checkpoints at one path."""
    if len(set(tokens)) > 1:
        message = f"ranks see different checkpoints in {folder.text}"
        raise RunError("checkpoint-load", message, hint="all ranks must see the same folder")

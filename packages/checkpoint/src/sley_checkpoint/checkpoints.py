"""Saves and restores a run, on all ranks together, for `run.save_checkpoint`, `run.load_checkpoint` and the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sley_checkpoint.folders import (
    GONE,
    STAGING,
    Folder,
    LocalFolder,
    ReadableFolder,
    StalledError,
    TimedFolder,
    TimedReads,
    open_folder,
)
from sley_checkpoint.format import INDEX, CheckpointIndex
from sley_checkpoint.reader import Checkpoint, Damage, examined, index_or_none, ready
from sley_checkpoint.saving import Destination, Preparation, absolute
from sley_checkpoint.writing import Background, HostCopies, Writing
from sley_core.api.comm import probe
from sley_core.api.state import TrainingState, shortened
from sley_core.errors import RunError, SleyError, UsageError, cause
from sley_core.protocols import Checkpointer, Restored

if TYPE_CHECKING:
    from sley_checkpoint.config import AnyLayoutConfig

AUTO = "auto"
FAILED = "checkpoint-failed"
COUNTS = ("saved", "failed", "seconds_blocked", "seconds_waited")


class AnyLayout(Checkpointer):
    """Saves and loads the checkpoints of a run, on one rank. table: the plan's; None if the run saves only when it is asked."""

    def __init__(self, table: AnyLayoutConfig | None, state: TrainingState) -> None:
        self.table = table
        self.state = state
        self.folder = None if state.folder is None else absolute(state.folder)
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._is_asked = self._is_probed = False
        self._background: Background | None = None
        self._host = HostCopies(state.parts.world.device)
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._is_written = False
        self._preparation = Preparation(state)
        self._control = state.parts.groups["control"]
        state.parts.events.gradients_done.append(self.stage)

    def counts(self) -> Mapping[str, float]:
        """Returns how many saves were written and failed, and the seconds that training waited for them."""
        return dict(self._counts)

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint, and returns its folder once it is complete on all ranks. All ranks call it."""
        self.finish()
        writing = self._prepare(Destination(self._folder(), True) if path is None else Destination(absolute(path), False), step)
        failed = ""
        try:
            writing.run()
        except RunError as error:
            failed = cause(error)
        if path is None:  # the run does not go on from a copy elsewhere
            self._saved_step, self._is_written = step, False
        self._done(failed)
        self._is_written = self._is_written or path is None
        if path is None:
            self.state.attempt.saved(step)
        return writing.target.text

    def probe(self) -> None:
        """Raises RunError "checkpoint-folder" on all ranks alike if the saves to come would fail: the folder cannot be written,
        ranks see different ones, or another run has it. All ranks call it, before the first step.
        """
        if self.table is None or self.folder is None or self._is_probed:
            return
        folder, timeout_s = self.folder, self.state.plan.limits.collective_timeout_s
        probe(FolderScratch(folder), self._control, timeout_s, lambda: self._preparation.problem(folder))
        self._is_probed = True

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`: it is a multiple of the plan's `every_steps`, or ranks have voted for a save by
        the clock, and no save of this step was begun. The same on all ranks.
        """
        table = self.table
        if table is None or step == self._saved_step:
            return False
        return self._is_asked or (table.every_steps is not None and step % table.every_steps == 0)

    def wants_save(self) -> bool:
        """Returns whether a save is due by the clock of rank 0, whose vote decides for all."""
        minutes = self.table.every_minutes if self.table else None
        is_voter = self.state.parts.world.rank == 0
        return is_voter and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def ask(self) -> None:
        self._is_asked = True

    def save_due(self, step: int) -> None:
        """Starts the due save, or completes it, as the plan says. All ranks call it. A failure is noted and counted; the run
        continues.
        """
        assert self.table is not None, "nothing is due"
        with self._goes_on():
            self.finish()
            self._saved_step, self._is_written = step, False
            self._saved_at, self._is_asked = time.monotonic(), False
            if self.table.mode == "sync":
                self.save(None, step)
            else:
                writing = self._prepare(Destination(self._folder(), True), step)
                self._background = Background(writing, self._host)

    def train_done(self, step: int, *, was_stopped: bool) -> None:
        """Ends the save in progress, and saves the run after its last step, or after the step at which it was asked to stop, if
        the plan says so. All ranks call it, after their last step.

        If a run has taken all of its steps, a failure of this save is only a note.
        """
        was_beside = self._background is not None
        self.finish()
        table = self.table
        if table is None:
            return
        if not was_stopped or step == self.state.plan.run.steps:
            if step != self._saved_step or (was_beside and not self._is_written):
                self._save_last(step)  # again, if it failed beside the last steps; not if it failed just now
        elif table.on_interrupt and not self._is_saved(step):
            self.save(None, step)

    def _save_last(self, step: int) -> None:
        """Saves the run after its last step; notes why if there is no folder or the save fails."""
        if self.folder is None:
            self.state.notes.append("the run has no folder, so there is no checkpoint of its last step")
            return
        with self._goes_on("the run ends without it"):
            self.save(None, step)

    @contextmanager
    def _goes_on(self, so: str = "the run goes on without it") -> Iterator[None]:
        """Returns a context manager that turns a failed save into a note, with its consequence `so`, and counts the seconds
        that training waits.
        """
        began = time.perf_counter()
        try:
            yield
        except RunError as error:
            if error.diagnostics[0].code != FAILED:
                raise
            self._note(cause(error), so)
        self._counts["seconds_blocked"] += time.perf_counter() - began

    def stage(self) -> None:
        """Makes the update wait for the copies of a save in progress."""
        if self._background is not None:
            self._background.stage()

    def finish(self) -> None:
        """Waits for the save in progress on all ranks, and reports how it ended. All ranks call it."""
        background, self._background = self._background, None
        if background is None:
            return
        began = time.perf_counter()
        background.wait()
        try:
            self._done(background.failed)
            self._is_written = True
            self.state.attempt.saved(background.writing.index.step)
        except RunError as error:
            self._note(cause(error))
        self._counts["seconds_waited"] += time.perf_counter() - began

    def close(self) -> None:
        """Ends the save in progress, as far as the other ranks still answer. Does not communicate."""
        background, self._background = self._background, None
        if background is not None:
            background.stage()
            background.end()
            self._counts["saved"] += not background.failed
            if not background.failed:
                self.state.attempt.saved(background.writing.index.step)
            if background.failed:
                self._note(background.failed)
        self._host.free()

    def _prepare(self, where: Destination, step: int) -> Writing:
        self.state.agree("saving a checkpoint")
        self.state.attempt.begin(step)
        return self._preparation.prepare(where, step, self.table.keep if self.table else None)

    def _done(self, failed: str) -> None:
        """Raises RunError `checkpoint-failed` on all ranks alike if the checkpoint is not complete."""
        # All ranks: it is there when rank 0 has given it its name, and not if any of them has failed.
        everyone = self._control.gather_objects(failed, what="whether the checkpoint is written")
        if any(everyone):
            raise RunError(FAILED, next(filter(None, everyone)))
        self._counts["saved"] += 1

    def _is_saved(self, step: int) -> bool:
        return self._saved_step == step and self._is_written

    def _note(self, failed: str, so: str = "the run goes on without it") -> None:
        self._counts["failed"] += 1
        self.state.notes.append(f"{failed}; {so}")

    def load(self, path: str | Path, *, anew: bool = False) -> Restored | None:
        """Loads the checkpoint at `path`, or the newest whole one of several there. All ranks call it, and share the reading.

        path: "auto" for the newest that this run wrote; None is returned if there is none.
        """
        self.finish()
        self.state.agree("loading a checkpoint")
        if is_auto := str(path) == AUTO:
            self._folder()
        # Half, so that a rank names the file that it cannot read before the others stop waiting for it.
        with TimedReads(self.state.plan.limits.collective_timeout_s / 2) as reads:
            checkpoint, passed_over, origin, notes = choose(self.state, None if is_auto else absolute(path), reads, anew=anew)
            if checkpoint is None:
                return None
            # The folder of a run says which checkpoints are its own; without one, their run's name does.
            run, own = checkpoint.index.run, self.state.plan.run.name
            if is_auto and self.state.attempt.folder is None and checkpoint.place != origin and run != own:
                message = f"{checkpoint.place} is of the run {run!r}, and this one is {own!r}"
                hint = "name the checkpoint itself to go on from another run's"
                raise RunError("checkpoint-mismatch", message, hint=hint)
            notes += self.state.restore(checkpoint)
        self._saved_step, self._is_written, self._saved_at = checkpoint.step, True, time.monotonic()
        return Restored(checkpoint.place, checkpoint.step, checkpoint.index.lineage, notes, passed_over)

    def _folder(self) -> str:
        if self.folder is None:
            raise UsageError(
                "no-folder",
                "this run has no folder for checkpoints",
                hint="give a path, or a folder to `assemble(plan, world, folder=...)`",
            )
        return self.folder


class FolderScratch:
    """Makes the folders of a probe in the folder at `text`, a path or URL."""

    def __init__(self, text: str) -> None:
        self.text = text

    def write(self, token: str, name: str) -> None:
        self._at(token).write(name, [b"probe"])

    def names(self, token: str) -> list[str]:
        return self._at(token).names()

    def remove(self, token: str) -> None:
        self._at(token).remove()
        folder = open_folder(self.text)
        if isinstance(folder, LocalFolder) and not folder.names():
            folder.path.rmdir()

    def _at(self, token: str) -> Folder:
        return open_folder(self.text).child(f"{STAGING}probe-{token}-{GONE}")


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
    seen = control.gather_objects(mine, what="which checkpoints there are")[0]
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
        everyone = control.gather_objects(report, what="what is damaged of a checkpoint")
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
        return _seen_by_rank_0(problem=("checkpoint-load", f"{folder.text} cannot be read: {cause(error)}", None))


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


def _paths(folder: ReadableFolder, names: list[str]) -> list[str]:
    return [folder.child(name).text for name in names]


def _check_one(tokens: list[str], folder: ReadableFolder) -> None:
    """Raises RunError on all ranks alike if they have read different checkpoints at one path."""
    if len(set(tokens)) > 1:
        message = f"ranks see different checkpoints in {folder.text}"
        raise RunError("checkpoint-load", message, hint="all ranks must see the same folder")

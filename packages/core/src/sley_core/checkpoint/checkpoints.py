"""Saves and loads checkpoints for `run.save_checkpoint` and `run.load_checkpoint`: what all ranks do together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.attempt import (
    Attempt,
    going_on,
    new_attempt,
    read_attempt,
    steps_in_common,
    write_attempt,
)
from sley_core.checkpoint.background import Background
from sley_core.checkpoint.choosing import Wanted
from sley_core.checkpoint.live_bytes import KeptMemory
from sley_core.checkpoint.loading import CheckpointLoader, Restored
from sley_core.checkpoint.run_tensors import RunTensors
from sley_core.checkpoint.saving import Destination, Preparation, absolute
from sley_core.checkpoint.writing import Writing
from sley_core.comm.collectives import gather_objects
from sley_core.engine.agreement import Agreement
from sley_core.errors import RunError, UsageError
from sley_core.files.folders import said
from sley_core.files.probe import probe
from sley_core.json_values import to_json
from sley_core.metrics.jsonl import rows

if TYPE_CHECKING:
    from sley_core.data.feed import Feed
    from sley_core.plan.plan import Plan

AUTO = "auto"
FAILED = "checkpoint-failed"
COUNTS = ("saved", "failed", "seconds_blocked", "seconds_securing", "seconds_waited", "copied_bytes")


class Checkpoints:
    """Saves and loads the checkpoints of a run, on one rank. folder: for those without a path of their own; None if the run has
    none. run_folder: of the run, which keeps the record of its attempts; None if it has none.

    resolved: returns the resolved plan as text; set by the run. is_asked: whether all ranks have agreed that a save is due.
    notes: for the user, about failed saves. counts: saves that were written and that failed, seconds that training waited for
    them (at their beginning, before updates, for the previous one), and bytes that had to be copied.
    """

    def __init__(
        self, plan: Plan, tensors: RunTensors, feed: Feed | None, folder: str | None, run_folder: Path | None
    ) -> None:
        self.plan = plan
        self.tensors = tensors
        self.feed = feed
        self.folder = None if folder is None else absolute(folder)
        self.run_folder = None if run_folder is None else run_folder.absolute()
        self.attempt: Attempt | None = None
        self._is_begun = self._is_probed = False
        self.resolved: Callable[[], str] = plan.to_toml
        self.notes: list[str] = []
        self.is_asked = False
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self._background: Background | None = None
        self._memory = KeptMemory()
        self._is_ahead_of_disk = True
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._is_written = False
        tensors.parts.events.gradients_done.append(self.secure)
        self._preparation = Preparation(plan, tensors)
        self._loader = CheckpointLoader(plan, tensors, feed)
        self._control = tensors.parts.groups["control"]

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint, and returns its folder once it is complete on all ranks. All ranks call it."""
        self.finish()
        writing = self._prepare(
            Destination(self._folder(), True) if path is None else Destination(absolute(path), False), step
        )
        failed = ""
        try:
            writing.run()
        except RunError as error:
            failed = said(error)
        if path is None:  # a copy that a program keeps elsewhere is not what the run goes on from
            self._saved_step, self._is_written = step, False
        self._done(failed)
        self._is_written = self._is_written or path is None
        if path is None:
            self._note_saved(step)
        return writing.target.text

    def probe(self) -> None:
        """Raises RunError "checkpoint-folder" on all ranks alike if the saves to come would fail: the folder cannot be written,
        ranks see different ones, or another run has it. All ranks call it, before the first step.
        """
        if self.plan.checkpoint is None or self.folder is None or self._is_probed:
            return
        timeout_s = self.plan.limits.collective_timeout_s
        probe(self.folder, self._control, timeout_s, partial(self._preparation.problem, self.folder, self.attempt))
        self._is_probed = True

    def begin(self, step: int) -> None:
        """Writes the attempt into the run's folder, before its first step or save. Does nothing the second time, and on ranks
        other than 0. step: how many are done.
        """
        if self._is_begun or self.tensors.parts.world.rank != 0:
            return
        if self.attempt is None and self.run_folder is not None and next(rows(self.run_folder), None) is not None:
            hint = '`load_checkpoint("auto")` resumes it; a run that begins needs an empty folder'
            raise RunError("attempt", f"`{self.run_folder}` has rows of another attempt", hint=hint)
        self.attempt = self.attempt or new_attempt(step)
        if self.run_folder is not None:
            write_attempt(self.run_folder, self.attempt)
        self._is_begun = True

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`: it is a multiple of the plan's `every_steps`, or ranks have voted for a save by
        the clock, and no save of this step was begun. The same on all ranks.
        """
        table = self.plan.checkpoint
        if table is None or step == self._saved_step:
            return False
        return self.is_asked or (table.every_steps is not None and step % table.every_steps == 0)

    @property
    def wants_save(self) -> bool:
        """Whether a save is due by the clock of rank 0, whose vote decides for all."""
        minutes = self.plan.checkpoint.every_minutes if self.plan.checkpoint else None
        is_voter = self.tensors.parts.world.rank == 0
        return is_voter and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def save_due(self, step: int) -> None:
        """Starts the due save, or completes it, as the plan says. All ranks call it. A failure is noted and counted; the run
        continues.
        """
        assert self.plan.checkpoint is not None, "nothing is due"
        with self._goes_on():
            self.finish()
            self._saved_step, self._is_written = step, False
            self._saved_at, self.is_asked = time.monotonic(), False
            if self.plan.checkpoint.mode == "sync":
                self.save(None, step)
            else:
                writing = self._prepare(Destination(self._folder(), True), step)
                device = self.tensors.parts.world.device
                self._background = Background(writing, device, self._memory, copies_ahead=self._is_ahead_of_disk)

    def train_done(self, step: int, *, was_stopped: bool) -> None:
        """Ends the save in progress, and saves the run after its last step, or after the step at which it was asked to stop, if
        the plan says so. All ranks call it, after their last step.

        If a run has taken all of its steps, a failure of this save is only a note.
        """
        was_beside = self._background is not None
        self.finish()
        table = self.plan.checkpoint
        if table is None:
            return
        if not was_stopped or step == self.plan.run.steps:
            if step != self._saved_step or (was_beside and not self._is_written):
                self._save_last(step)  # once more what failed beside the end of training, not what failed just now
        elif table.on_interrupt and not self._is_saved(step):
            self.save(None, step)

    def _save_last(self, step: int) -> None:
        """Saves the run after its last step; notes why if there is no folder or the save fails."""
        if self.folder is None:
            self.notes.append("the run has no folder, so there is no checkpoint of its last step")
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
            self._note(said(error), so)
        self.counts["seconds_blocked"] += time.perf_counter() - began

    def secure(self) -> None:
        """Lets a save in progress copy what it has not read. Must be called before weights, masters or states change or
        move.
        """
        if self._background is not None:
            began = time.perf_counter()
            self._background.secure()
            self.counts["seconds_securing"] += time.perf_counter() - began

    def finish(self) -> None:
        """Waits for the save in progress on all ranks, and reports how it ended. All ranks call it."""
        background, self._background = self._background, None
        if background is None:
            return
        began = time.perf_counter()
        background.wait()
        self._is_ahead_of_disk = background.live.num_unread > 0
        self.counts["copied_bytes"] += background.live.num_copied
        try:
            self._done(background.failed)
            self._is_written = True
            self._note_saved(background.writing.index.step)
        except RunError as error:
            self._note(said(error))
        self.counts["seconds_waited"] += time.perf_counter() - began

    def close(self) -> None:
        """Ends the save in progress, as far as the other ranks still answer. Does not communicate."""
        background, self._background = self._background, None
        if background is not None:
            background.secure()
            background.end()
            self.counts["copied_bytes"] += background.live.num_copied
            self.counts["saved"] += not background.failed
            if not background.failed:
                self._note_saved(background.writing.index.step)
            if background.failed:
                self._note(background.failed)
        self._memory.free()

    def _prepare(self, where: Destination, step: int) -> Writing:
        keep = self.plan.checkpoint.keep if self.plan.checkpoint else None
        Agreement(self.tensors.parts.groups).begin("saving a checkpoint").check()
        self.begin(step)
        return self._preparation.prepare(where, step, self._state(step), self.resolved(), keep, self.attempt)

    def _done(self, failed: str) -> None:
        """Raises RunError `checkpoint-failed` on all ranks alike if the checkpoint is not complete."""
        # All ranks: it is there when rank 0 has given it its name, and not if any of them has failed.
        everyone = gather_objects(failed, self._control, what="whether the checkpoint is written")
        if any(everyone):
            raise RunError(FAILED, next(filter(None, everyone)))
        self.counts["saved"] += 1

    def _note_saved(self, step: int) -> None:
        """Writes into the run's folder that its attempt has saved a checkpoint of `step`; on rank 0."""
        if self.attempt is not None:
            self.attempt = replace(self.attempt, saved=step)
            if self.run_folder is not None:
                with suppress(RunError):  # the checkpoint is there all the same
                    write_attempt(self.run_folder, self.attempt)

    def _is_saved(self, step: int) -> bool:
        return self._saved_step == step and self._is_written

    def _note(self, failed: str, so: str = "the run goes on without it") -> None:
        self.counts["failed"] += 1
        self.notes.append(f"{failed}; {so}")

    def load(self, path: str | Path, *, anew: bool = False) -> tuple[Restored | None, int, int]:
        """Loads the checkpoint at `path`, or the newest intact one of several there. All ranks call it.

        path: "auto" for the newest that this run wrote. anew: as of `Wanted`. Returns what was loaded, None if there is none;
        the steps done; and up to which step the rows in the run's folder are of the steps that led to it, on rank 0.
        """
        self.finish()
        Agreement(self.tensors.parts.groups).begin("loading a checkpoint").check()
        is_auto = str(path) == AUTO
        named, own = (None, self._folder()) if is_auto else (absolute(path), self.folder)
        wanted = Wanted(named, own, self.run_folder, self.attempt, anew)
        found = self._loader.load(wanted, self.resolved())
        if found is None:
            return None, 0, 0
        self._saved_step, self._is_written, self._saved_at = found.step, True, time.monotonic()
        return found, found.step, self._goes_on_from(found, "" if is_auto else str(path))

    def _goes_on_from(self, found: Restored, given: str) -> int:
        """Makes the next step the first of an attempt that goes on from `found`, and returns how many steps the attempts before
        it in the run's folder have in common with that checkpoint; 0 on ranks other than 0.
        """
        if self.tensors.parts.world.rank != 0:
            return 0
        before = self.attempt
        if before is None:
            # Without a folder nothing else says whose it is.
            before = Attempt(found.lineage) if self.run_folder is None else read_attempt(self.run_folder)
        common = 0 if before is None else steps_in_common(before.lineage, found.lineage)
        if before is not None and common < found.step and before.origin != found.path:
            whose = "an earlier attempt of this run" if before.wrote(found.lineage) else "another run"
            found.notes.append(f"{found.path} is of {whose}: rows of other steps than its own are dropped")
        self.attempt, self._is_begun = going_on(before, found.lineage, found.step, given, found.path), False
        return min(found.step, common)

    def _folder(self) -> str:
        if self.folder is None:
            raise UsageError(
                "no-folder",
                "this run has no folder for checkpoints",
                hint="give a path, or a folder to `assemble(plan, world, folder=...)`",
            )
        return self.folder

    def _state(self, step: int) -> dict[str, Any]:
        update = self.tensors.update
        return {
            "steps": step,
            "was_taken": self.tensors.parts.store.state.was_taken,
            "has_modes": update.traits.has_modes,
            "scale": None if update.scale is None else update.scale.state(),
            "skips": None if update.skips is None else update.skips.state(),
            "data": None if self.feed is None else to_json(self.feed.state()),
        }

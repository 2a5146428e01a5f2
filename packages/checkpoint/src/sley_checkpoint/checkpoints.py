"""Saves and restores a run on all ranks, for `run.save_checkpoint`, `run.load_checkpoint` and the training loop."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sley_checkpoint.folders import DELETED_SUFFIX, STAGING_PREFIX, Folder, open_folder
from sley_checkpoint.plugin import AnyLayoutConfig
from sley_checkpoint.reader import (
    INDEX_NAME,
    Checkpoint,
    Damage,
    DamagedCheckpoint,
    list_checkpoints,
    try_read_index,
    verify_share,
)
from sley_checkpoint.saving import BackgroundWriter, HostCopies, RankWriter, SavePreparation
from sley_core.api.comm import probe
from sley_core.api.state import TrainingState, shorten_names
from sley_core.errors import RunError, SleyError, UsageError, format_cause
from sley_core.protocols import Checkpointer, RestoreResult

FAILURE_CODE = "checkpoint-failed"
"""The code of the RunError that reports a failed save."""


class AnyLayoutCheckpointer(Checkpointer):
    """Saves and loads a run's checkpoints on one rank. table: the plan's `[checkpoint]` table, or None if there is none."""

    def __init__(self, table: AnyLayoutConfig | None, state: TrainingState) -> None:
        self.table = table
        self.state = state
        self.folder = None if state.folder is None else open_folder(state.folder).uri
        self._counts = dict.fromkeys(("saved", "failed", "seconds_blocked", "seconds_waited"), 0.0)
        self._is_save_requested = False
        self._background_writer: BackgroundWriter | None = None
        self._host = HostCopies(state.parts.world.device)
        self._saved_step = -1  # the step of the last save that is complete or in progress
        self._save_time = time.monotonic()
        self._preparation = SavePreparation(state)
        self._control = state.parts.groups["control"]
        state.parts.events.gradients_done.append(self.copy_unwritten_state)

    def counts(self) -> Mapping[str, float]:
        """Returns the numbers of complete and of failed saves (`saved`, `failed`), and the time in seconds that training waited
        for saves to start and to finish (`seconds_blocked`, `seconds_waited`).
        """
        return dict(self._counts)

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint at `path`, or in the run's checkpoint folder if `path` is None. Returns its path or URL once all
        ranks have written their parts. All ranks call it. Raises RunError `checkpoint-failed` on all ranks if the save fails.
        """
        self.finish_save()
        writer = self._prepare(path, step)
        failure = ""
        try:
            writer.run()
        except RunError as error:
            failure = format_cause(error)
        self._check_success(failure)
        if path is None:  # a copy at another path does not count as a checkpoint of the run
            self._saved_step = step
            self.state.attempt.record_save(step)
        return writer.target.uri

    def probe(self) -> None:
        """Checks the run's checkpoint folder before the first step. All ranks call it. Raises RunError `checkpoint-folder` on
        all ranks if a rank cannot write to the folder, the ranks see different folders, or another run uses the folder.
        """
        if self.folder is None:
            return
        folder = open_folder(self.folder)
        probe(
            folder.uri,
            lambda token: folder.child(f"{STAGING_PREFIX}probe-{token}-{DELETED_SUFFIX}"),
            self._control,
            self.state.plan.limits.collective_timeout_s,
            lambda: self._preparation.find_problem(folder),
        )

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`: True if `step` is a multiple of the plan's `every_steps` or a save was
        requested, unless a save of this step has started. The result is the same on all ranks.
        """
        if self.table is None or step == self._saved_step:
            return False
        return self._is_save_requested or (self.table.every_steps is not None and step % self.table.every_steps == 0)

    def wants_save(self) -> bool:
        """Returns whether the plan's `every_minutes` have passed since the last save; False on ranks other than 0."""
        minutes = self.table.every_minutes if self.table and self.state.parts.world.rank == 0 else None
        return minutes is not None and time.monotonic() - self._save_time > 60 * minutes

    def request_save(self) -> None:
        """Makes a save due after the current step."""
        self._is_save_requested = True

    def start_save(self, step: int) -> None:
        """Starts the save that is due; with `mode = "sync"`, also completes it. All ranks call this method. If the save fails,
        counts the failure, adds a note, and lets the run continue.
        """
        assert self.table is not None, "no save is due without a table"
        with self._tolerate_failure("seconds_blocked"):
            self.finish_save()
            self._save_time, self._is_save_requested = time.monotonic(), False
            if self.table.mode == "sync":
                self.save(None, step)
            else:
                self._background_writer = BackgroundWriter(self._prepare(None, step), self._host)
                self._saved_step = step

    def finish_training(self, step: int, *, was_stopped: bool) -> None:
        """Finishes the save in progress, and saves the run after its last step or, with `on_interrupt`, after an early stop.
        All ranks call it. If the run has done all its steps, a failed save only adds a note.
        """
        self.finish_save()
        if self.table is None or step == self._saved_step:
            return
        if was_stopped and step != self.state.plan.run.steps:
            if self.table.on_interrupt:
                self.save(None, step)
        elif self.folder is None:
            self.state.notes.append("the run has no folder, so no checkpoint of its last step is saved")
        else:
            with self._tolerate_failure("seconds_blocked"):
                self.save(None, step)

    @contextmanager
    def _tolerate_failure(self, count: str) -> Iterator[None]:
        """Turns the error of a failed save in the block into a note. Adds the duration of the block, in s, to `count`."""
        start = time.perf_counter()
        try:
            yield
        except RunError as error:
            if error.diagnostics[0].code not in (FAILURE_CODE, "checkpoint-ranks"):
                raise
            self._record_failure(format_cause(error))
        self._counts[count] += time.perf_counter() - start

    def copy_unwritten_state(self) -> None:
        """Makes later work on the device, such as the update of the weights, wait for the copies of a save in progress."""
        if self._background_writer is not None:
            self._background_writer.copy_unwritten_state()

    def finish_save(self) -> None:
        """Waits for the save in progress on all ranks, and records its success or failure. All ranks call it."""
        background, self._background_writer = self._background_writer, None
        if background is not None:
            with self._tolerate_failure("seconds_waited"):
                background.wait()
                self._check_success(background.failure)
                self.state.attempt.record_save(background.writer.index.step)

    def close(self) -> None:
        """Finishes the save in progress, or cancels it if the other ranks do not finish their parts. Joins no collective."""
        background, self._background_writer = self._background_writer, None
        if background is not None:
            background.copy_unwritten_state()
            background.wait_or_cancel()
            if background.failure:
                self._record_failure(background.failure)
            else:
                self._counts["saved"] += 1
                self.state.attempt.record_save(background.writer.index.step)
        self._host.free()

    def _prepare(self, path: str | Path | None, step: int) -> RankWriter:
        """Returns the writer of this rank's part of a checkpoint at `path`, or in the run's checkpoint folder for None."""
        folder = open_folder(self._run_folder() if path is None else path)
        self.state.agree("saving a checkpoint")
        self.state.attempt.begin(step)
        keep = self.table.keep if self.table else None
        return self._preparation.prepare(folder, step, keep, is_run_folder=path is None)

    def _check_success(self, failure: str) -> None:
        """Counts a complete save. Raises RunError `checkpoint-failed` on all ranks if the save failed on any rank."""
        # All ranks join: the checkpoint is complete once rank 0 has renamed it and no rank has failed.
        failures = self._control.gather_objects(failure, label="the result of the save")
        if any(failures):
            raise RunError(FAILURE_CODE, next(filter(None, failures)))
        self._counts["saved"] += 1

    def _record_failure(self, failure: str) -> None:
        """Counts a failed save and adds a note, so that the step can be saved again."""
        self._saved_step = -1
        self._counts["failed"] += 1
        self.state.notes.append(f"{failure}; training is not affected")

    def load(self, path: str | Path, *, allow_fresh_start: bool = False) -> RestoreResult | None:
        """Loads the checkpoint at `path`, or the newest intact checkpoint if `path` is a folder of checkpoints. All ranks call
        it. With "auto", loads this run's newest checkpoint, or returns None if the run has no checkpoint. allow_fresh_start:
        whether a run without a checkpoint may repeat its steps. Raises the errors of `list_candidates` and `choose_checkpoint`,
        RunError `no-checkpoint` if there is no checkpoint at `path`, and RunError `checkpoint-mismatch` if "auto" finds a
        checkpoint of another run.
        """
        self.finish_save()
        self.state.agree("loading a checkpoint")
        if is_auto := str(path) == "auto":
            self._run_folder()
        load_path = None if is_auto else open_folder(path).uri
        paths, notes = list_candidates(self.state, load_path, allow_fresh_start=allow_fresh_start)
        checkpoint, damaged_checkpoints = choose_checkpoint(self.state, paths)
        if checkpoint is None and load_path is not None:
            raise RunError("no-checkpoint", f"there is no checkpoint in {open_folder(load_path).uri}")
        if checkpoint is None:
            return None
        # A run folder identifies the run's checkpoints. Without a run folder, the run name must match.
        saved_run, this_run = checkpoint.index.run, self.state.plan.run.name
        if is_auto and self.state.attempt.folder is None and saved_run != this_run:
            message = f"the run of {checkpoint.place} must be {this_run!r}, but is {saved_run!r}"
            hint = "pass the path of the checkpoint to continue from another run"
            raise RunError("checkpoint-mismatch", message, hint=hint)
        notes = [*notes, *self.state.restore(checkpoint)]
        self._saved_step, self._save_time = checkpoint.step, time.monotonic()
        return RestoreResult(checkpoint.place, checkpoint.step, checkpoint.index.lineage, notes, damaged_checkpoints)

    def _run_folder(self) -> str:
        """Returns the run's folder of checkpoints. Raises UsageError `no-folder` if the run has no such folder."""
        if self.folder is None:
            hint = "pass a path, or pass a folder to `assemble(plan, world, folder=...)`"
            raise UsageError("no-folder", "this run has no folder for checkpoints", hint=hint)
        return self.folder


def choose_checkpoint(state: TrainingState, paths: Sequence[str]) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """Returns the first intact checkpoint in `paths`, or None if `paths` is empty, and the damaged checkpoints before it. All
    ranks call it, and each verifies a share of the files. Raises the same RunError on all ranks: `checkpoint-damaged` if all
    checkpoints are damaged, and `checkpoint-load` if the ranks see different checkpoints at a path.
    """
    world, control = state.parts.world, state.parts.groups["control"]
    damaged_checkpoints: list[DamagedCheckpoint] = []
    for path in paths:
        folder = open_folder(path)
        index, rank_damages = verify_share(folder, world.rank, world.size)
        # All ranks join and verify the same candidates in the same order. No rank reads the index again, since another run may
        # delete the checkpoint.
        reports = control.gather_objects([rank_damages, index and index.token], label="the damages of a checkpoint")
        damages = list(dict.fromkeys(Damage(*fields) for rank_damages, _ in reports for fields in rank_damages))
        if index is not None and not damages:
            if len({token for _, token in reports}) > 1:
                message = f"ranks see different checkpoints in {folder.uri}"
                raise RunError("checkpoint-load", message, hint="use a folder that all ranks share")
            return Checkpoint(folder, index), damaged_checkpoints
        damaged_checkpoints.append((folder.uri, damages))
    if damaged_checkpoints:
        newest, damages = damaged_checkpoints[0]
        message = f"the checkpoint {newest} is damaged: {damages[0]}"
        raise RunError("checkpoint-damaged", message, hint="use another folder, since this one has no intact older checkpoint")
    return None, []


def list_candidates(state: TrainingState, path: str | None, *, allow_fresh_start: bool) -> tuple[list[str], list[str]]:
    """Returns the paths of the checkpoints to load, in the order in which to try them, and notes for the user. All ranks call
    it, but only the arguments of rank 0 count. path: a checkpoint or a folder of checkpoints; None for this run's newest
    checkpoint. allow_fresh_start: whether a run without a checkpoint may repeat its steps. Raises the same error on all ranks:
    UsageError `never-anew` if the run would repeat its own work, and RunError `checkpoint-load` if a folder cannot be read.
    """
    paths: list[str] = []
    notes: list[str] = []
    problem = None
    if state.parts.world.rank == 0:
        folder = open_folder(state.folder or "" if path is None else path)
        try:
            if path is None:
                paths, notes = _list_resumable(state, folder, allow_fresh_start=allow_fresh_start)
            else:
                paths = [folder.uri] if INDEX_NAME in folder.names() else _child_paths(folder, list_checkpoints(folder))
        except SleyError as error:
            diagnostic = error.diagnostics[0]
            problem = diagnostic.code, diagnostic.message, diagnostic.hint
        except Exception as error:  # a file system may raise any error, and the other ranks wait for the list
            problem = "checkpoint-load", f"{folder.uri} cannot be read: {format_cause(error)}", None
    # All ranks join the exchange, even if rank 0 has failed.
    reports = state.parts.groups["control"].gather_objects([paths, notes, problem], label="the list of checkpoints")
    paths, notes, problem = reports[0]
    if problem is not None:
        code, message, hint = problem
        raise (UsageError if code == "never-anew" else RunError)(code, message, hint=hint)
    return paths, notes


def _list_resumable(state: TrainingState, folder: Folder, *, allow_fresh_start: bool) -> tuple[list[str], list[str]]:
    """Returns paths and notes for the user. The paths are the checkpoints with steps of this run, from new to old, and then, if
    the present attempt has not saved, the checkpoint from which it started. Raises UsageError `never-anew` if there is no such
    checkpoint although the run has done steps, or if all checkpoints are of attempts that the run's folder does not know.
    """
    names = list_checkpoints(folder)
    if state.attempt.folder is None:  # without a run folder, there is no list of attempts and no rows
        return _child_paths(folder, names), []
    attempt = state.attempt.latest
    own_names: list[str] = []
    foreign_names: list[str] = []
    for name in names:
        index = try_read_index(folder.child(name))
        # An unreadable checkpoint stays a candidate, so that its damage is reported.
        is_own = index is None or (attempt is not None and attempt.shares_steps(index.lineage, index.step))
        (own_names if is_own else foreign_names).append(name)
    paths = _child_paths(folder, own_names)
    if attempt is not None and attempt.saved_step < 0 and attempt.loaded_path not in ("", *paths):
        paths.append(attempt.loaded_path)
    if not paths and not (allow_fresh_start and attempt is not None and attempt.saved_step < 0):
        state.attempt.refuse_fresh_start(folder.uri, foreign_names)
    message = f"ignored checkpoints of other attempts: {shorten_names(foreign_names)} in {folder.uri}"
    return paths, [message] if foreign_names else []


def _child_paths(folder: Folder, names: list[str]) -> list[str]:
    return [folder.child(name).uri for name in names]

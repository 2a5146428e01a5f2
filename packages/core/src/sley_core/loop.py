"""Takes steps, one after the other, and makes a row for each.

launch ──> forward, backward, update, on the device ──> emit: totals on the host ──> row ──> writers ──> listeners next
launch ──> ...                             (CUDA: a row is read while the next step runs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sley_core.comm.progress import BETWEEN, DEVICE
from sley_core.engine.evaluate import Collected
from sley_core.engine.totals import Votes, refusal
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.attach import Outputs, Samples
    from sley_core.attempt import RunAttempt
    from sley_core.comm.device import Moment
    from sley_core.engine.parts import Parts
    from sley_core.engine.step_batch import GivenBatch, StepBatch
    from sley_core.engine.stepper import Stepper
    from sley_core.engine.totals import PendingTotals, StepResult
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Checkpointer

Row = dict[str, float | int]


@dataclass(frozen=True)
class Taken:
    """Holds what the calls of a step have taken so far. count: of tokens or samples (`Meter.unit`), of all ranks. seconds: of
    the calls before the last.
    """

    count: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launched:
    """Holds a step whose totals are not yet on the host."""

    number: int
    totals: PendingTotals
    lr: float
    taken: Taken


@dataclass(eq=False)
class Loop:
    """Takes the steps of a run, and makes a row for each.

    tell: called with each row, on every rank, after the writers. require: called before each step; raises StateError if memory
    that a step needs is offloaded, as a listener may have left it. checkpointer: saves the run when a save is due. attempt: the
    run's.
    num_steps_done: optimizer steps, refused ones included. was_stopped: whether all ranks have agreed to stop.
    """

    plan: Plan
    parts: Parts
    stepper: Stepper
    samples: Samples
    outputs: Outputs
    tell: Callable[[Row], None]
    require: Callable[[], None]
    checkpointer: Checkpointer
    attempt: RunAttempt
    num_steps_done: int = field(default=0, init=False)
    was_stopped: bool = field(default=False, init=False)
    _is_first: bool = field(default=True, init=False)  # of this run object, which a checkpoint may have brought to a later step
    _is_stepping: bool = field(default=False, init=False)
    _is_accumulating: bool = field(default=False, init=False)
    _taken: Taken = field(default_factory=Taken, init=False)
    _is_training: bool = field(default=False, init=False)
    _is_evaluating: bool = field(default=False, init=False)
    _stop_asked: bool = field(default=False, init=False)
    _since: Moment = field(default=0.0, init=False)  # in the device's work, where steps are timed: a row may be read late
    _late: Launched | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._watch = self.samples.watch

    def train(self) -> None:
        """Takes steps until the plan's last one, or until the ranks have agreed to stop."""
        self._restart()
        with self._while("_is_training"), self.parts.weights.settled_on_error():
            self._train()
        self.checkpointer.train_done(self.num_steps_done, was_stopped=self.was_stopped)

    def _train(self) -> None:
        """Launches each step before it emits the previous one, so that on CUDA the device is not idle while the host reads
        totals.
        """
        while self.num_steps_done < self.plan.run.steps and not self.was_stopped:
            before, self._late = self._late, self.launch(None)
            if before is not None:
                self._emit(before)
            is_due = self._evaluates_after(self._late) or self.checkpointer.is_due(self.num_steps_done)
            if is_due or not self.parts.world.device.is_async:
                self._emit_late()
            self._save_if_due()
        self._emit_late()
        self.parts.weights.settle()

    def step(self, given: GivenBatch | None) -> Row:
        """Takes one step and returns its row, as `Run.step` says."""
        return self._step(given)

    def step_with_outputs(self, given: GivenBatch | None, *, join: bool) -> tuple[Row, Any]:
        """Takes one step and returns its row and the model's outputs, as `Run.step` says."""
        collected = Collected()
        row = self._step(given, collected)
        return row, self._in_form(collected, given, join=join)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Returns a context manager within which calls of `step` add up to one step, which the next call after it ends."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @property
    def is_within_step(self) -> bool:
        """Whether calls add up, or have been added up, to a step that has not ended yet."""
        return self._is_accumulating or self.stepper.sums is not None

    def _step(self, given: GivenBatch | None, collected: Collected | None = None) -> Row:
        self._restart()
        if self._is_accumulating:
            return self._add(given, collected)
        with self.parts.weights.settled_on_error():
            launched = self.launch(given, collected)
        self.parts.weights.settle()
        row = self._emit(launched)
        self._save_if_due()
        return row

    def _add(self, given: GivenBatch | None, collected: Collected | None) -> Row:
        """Adds one call to the step, and returns its row: the step's number, and the mean loss of this call's samples."""
        with self._running(), self.parts.weights.settled_on_error():
            batch = self._begin_call(given, collected)
            outputs = None if collected is None else collected.outputs
            loss = self.stepper.add(self.num_steps_done, batch, outputs)
        self._check_buffers()
        device = self.parts.world.device
        seconds = self._taken.seconds + device.seconds_between(self._since, device.moment())
        self._taken = replace(self._taken, seconds=seconds)
        return {"step": self.num_steps_done + 1, "loss": loss}

    def stop(self) -> None:
        """Sets this rank's vote to stop after the step in progress; safe in a signal handler."""
        self._stop_asked = True

    def settle(self) -> None:
        """Emits a step that was in flight when the previous one was refused; called before anything but a step of `train`.

        Raises RunError `step-running` within a step or an evaluation (from a module's hook), and from a listener on CUDA, where
        the weights are already those of the next step.
        """
        if self._is_stepping or self._is_evaluating or (self._is_training and self._late is not None):
            what = "an evaluation" if self._is_evaluating else "a step"
            raise RunError("step-running", f"{what} is under way", hint="do it between two steps")
        self._emit_late()

    def go_on(self, num_steps: int) -> None:
        """Records that a checkpoint has brought the run to the end of step `num_steps`."""
        self.num_steps_done = num_steps
        if self.outputs.timeline is not None:
            self.outputs.timeline.go_on(num_steps, self.plan.run.steps)
        self.weights_loaded()

    def weights_loaded(self) -> None:
        """Tells the buffer watch, after weights were loaded, to take the present buffers as the reference."""
        if self._watch is not None:
            self._watch.look()

    def evaluate(self, given: GivenBatch | None = None) -> float:
        """Returns the mean loss of `given`, or on held-out data, of which the run must have an evaluation."""
        with self._while("_is_evaluating"), self.evaluated():
            if given is not None:
                return self.samples.forward.mean_loss([self.samples.splitter.given(given)])
            assert self.samples.evaluation is not None, "there is no [evaluation]"
            return self.samples.evaluation()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Returns a context manager within which weights are those to evaluate and to save (`Update.evaluated`)."""
        update = self.stepper.update
        if update.traits.has_modes:
            self.checkpointer.stage()
        with update.evaluated():
            yield

    def predict(self, given: GivenBatch, *, join: bool) -> Any:
        """Returns the model's outputs as `Run.predict` says."""
        with self._while("_is_evaluating"), self.evaluated():
            batch = self.samples.splitter.to_predict(given, self.samples.reads)
            collected = Collected(batch.micros, self.samples.forward.outputs(batch))
            return self._in_form(collected, given, join=join)

    def launch(self, given: GivenBatch | None, collected: Collected | None = None) -> Launched:
        """Starts a step on `given`, or on the next samples of the feed; on CUDA the device continues after this returns.
        collected: gets the model's outputs.
        """
        number, profiler, timeline = self.num_steps_done + 1, self.outputs.profiler, self.outputs.timeline
        with self._running():
            batch = self._begin_call(given, collected)
            clock = None if timeline is None else timeline.before_step(number, batch.num_micros)
            votes = Votes(self._stop_asked, self.checkpointer.wants_save())
            outputs = None if collected is None else collected.outputs
            totals = self.stepper.step(self.num_steps_done, batch, votes=votes, clock=clock, outputs=outputs)
        self._check_buffers()
        if profiler is not None:
            profiler.after_step(number)
        self.num_steps_done = number
        return Launched(number, totals, self.stepper.update.lr, self._taken)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Returns a context manager for a call of a step."""
        self.require()
        self.attempt.begin(self.num_steps_done)
        with self.parts.world.device.random_state_kept(), self._while("_is_stepping"):
            yield

    def _begin_call(self, given: GivenBatch | None, collected: Collected | None) -> StepBatch:
        """Takes the samples of a call of the next step, and prepares what comes with its first call."""
        batch, wait_s, samples = self._take(given)
        if self.stepper.sums is None:
            self._taken = Taken()
            if self.outputs.profiler is not None:
                self.outputs.profiler.before_step(self.num_steps_done + 1)
        if self._is_first:
            self.parts.registry.check_complete(self.parts.layers)
        if collected is not None:
            collected.micros = batch.micros
        count = sum(map(self.samples.meter.count, batch.whole)) * self.parts.topology.dp
        before = self._taken
        self._taken = Taken(before.count + count, before.seconds, before.data_wait_s + wait_s, before.samples + samples)
        return batch

    def _check_buffers(self) -> None:
        """Checks, after the first call of this run object, that no buffer was written."""
        if self._watch is not None and self._is_first:
            self._watch.check()
            self._watch = None  # its copies of buffers are free
        self._is_first = False

    def _in_form(self, collected: Collected, given: GivenBatch | None, *, join: bool) -> Any:
        return collected.in_form(given, self.samples.splitter.info.fields, self.parts.groups["sp"], join=join)

    def _save_if_due(self) -> None:
        """Saves the run as it is now, if all ranks know that a save is due; no step is in flight then."""
        if self.checkpointer.is_due(self.num_steps_done):
            self.parts.weights.settle()
            self.checkpointer.save_due(self.num_steps_done)
            self._restart()

    def _take(self, given: GivenBatch | None) -> tuple[StepBatch, float, tuple[int, ...]]:
        """Returns the step's batch, the seconds spent waiting for the feed, and the numbers of its samples."""
        splitter, feed = self.samples.splitter, self.samples.feed
        if given is not None:
            return splitter.given(given), 0.0, ()
        assert feed is not None, "a fake world takes no steps"
        return splitter.fed(feed.next()), feed.wait_s, feed.samples

    @contextmanager
    def _while(self, flag: str) -> Iterator[None]:
        """Returns a context manager that sets the attribute `flag` to True within the block."""
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, False)

    def _restart(self) -> None:
        """Times the next step from now on: what came before is no part of it."""
        self._since = self.parts.world.device.moment()

    def _emit_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._emit(late)

    def _emit(self, launched: Launched) -> Row:
        """Waits for a step's totals, evaluates if due, writes its row and returns it. Raises RunError, on all ranks
        alike, if the step was refused.
        """
        standing = self.parts.store.state.standing
        standing.comes(DEVICE)
        result = launched.totals.read()
        standing.comes(BETWEEN)
        if self.outputs.timeline is not None:
            self.outputs.timeline.write(launched.number)
        ended = launched.totals.ended
        seconds = self.parts.world.device.seconds_between(self._since, ended) + launched.taken.seconds
        self._since = ended
        is_skipped = self._is_skipped(launched, result)
        if result.is_refused and not is_skipped:
            raise self._refusal(launched, result)
        self.was_stopped = result.wants_stop
        if result.wants_save:
            self.checkpointer.ask()
        row: Row = {"step": launched.number, "loss": result.loss, "grad_norm": result.grad_norm, "lr": launched.lr}
        if result.loss_scale is not None:
            row["loss_scale"] = result.loss_scale
        if result.loss_scale is not None or self.stepper.update.skips is not None:
            row["skipped"] = int(result.skipped or is_skipped)
        row |= self.parts.numbers.row(result.numbers)
        row |= self.samples.meter.measure(launched.taken.count, seconds, launched.taken.data_wait_s)
        try:
            if self._evaluates_after(launched):
                row["held_out_loss"] = self.evaluate()
                self._restart()
        finally:  # the step was taken, whatever became of its evaluation
            for writer in self.outputs.writers:
                writer.write(row)
        self.tell(row)
        return row

    def _is_skipped(self, launched: Launched, result: StepResult) -> bool:
        """Returns whether the plan says to continue although the step's loss or norm is not finite; the same on all ranks."""
        skips = self.stepper.update.skips
        if skips is None:
            return False
        skips.settle(launched.totals)
        return result.is_no_number and not skips.are_too_many

    def _refusal(self, launched: Launched, result: StepResult) -> RunError:
        skips, is_latest = self.stepper.update.skips, launched.number == self.num_steps_done
        before = 0 if skips is None else max(0, skips.num_in_a_row - 1)
        return refusal(
            self.parts,
            launched.number,
            result,
            launched.totals,
            launched.taken.samples,
            is_latest=is_latest,
            num_skipped=before,
        )

    def _evaluates_after(self, launched: Launched) -> bool:
        if self.samples.evaluation is None or self.plan.evaluation is None:
            return False
        return launched.number % self.plan.evaluation.every == 0 or launched.number == self.plan.run.steps

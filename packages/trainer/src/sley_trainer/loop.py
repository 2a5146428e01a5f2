"""Runs the steps of a run and writes one metrics row per step. On CUDA, the totals of a step are read during the next step:

launch step 1 ──> launch step 2 ──> emit row 1: writers, listeners ──> launch step 3 ──> emit row 2 ...
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from sley_core.comm.device import Moment
from sley_core.comm.exchanges import BETWEEN_STEPS, DEVICE_WAIT
from sley_core.engine.parts import Parts
from sley_core.engine.step_batch import BatchCounts, GivenBatch, ModelOutputs
from sley_core.engine.totals import StepTotals, Votes, build_refusal
from sley_core.errors import RunError, StateError, run_closed_error
from sley_core.hookspecs import NOTIFICATION_HOOKS
from sley_core.plan.plan import Plan
from sley_core.plan.tables import metric_row_key
from sley_core.protocols import MetricsWriter
from sley_trainer.attach import Samples, StepProfiler
from sley_trainer.run_memory import STEP_PARTS, RunMemory
from sley_trainer.run_state import RunState, build_checkpointer
from sley_trainer.state_dict import LoadedWeights
from sley_trainer.stepper import Stepper

Row = dict[str, float | int]  # the metrics of one step, by name
Outcome = Literal["finished", "interrupted", "failed"]  # the outcome of a run

MAX_EXP = 709.0
"""The loss in nats from which the perplexity is reported as infinite: `math.exp` overflows above about 709.78."""


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose row is not written yet. On CUDA, its totals may not be on the host yet. step: the number of the
    step, from 1. lr: its learning rate. counts: the counts over all ranks' samples. data_wait_s: how long this rank waited for
    data, in seconds. samples: the numbers of this rank's samples in the data; empty if a program passed the batch.
    """

    step: int
    totals: StepTotals
    lr: float
    counts: BatchCounts
    data_wait_s: float = 0.0
    samples: tuple[int, ...] = ()


class Loop:
    """The base class of `Run`, which runs steps and writes their rows. `Run` adds the interface for programs.

    listeners: functions that this rank calls with each row. readers: functions that this rank calls with each row; they must
    not read weights, which may still be in flight from other ranks. num_steps_done: the number of optimizer steps, including
    refused and skipped steps. was_stopped: whether all ranks have agreed to stop. best: the best evaluation so far; None if the
    plan has no `keep_best`. num_parameters, num_trained: the number of elements of all parameters of the model, and of the
    trained parameters. notes: messages for the user.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        stepper: Stepper,
        samples: Samples,
        writers: Sequence[MetricsWriter],
        profiler: StepProfiler | None,
        memory: RunMemory,
        load_weights: Callable[..., LoadedWeights],
        state: RunState,
        sizes: tuple[int, int],
    ) -> None:
        self.plan = plan
        self.parts = parts
        self.world, self.topology, self.groups = parts.world, parts.topology, parts.groups
        self.layers, self.registry, self.store = parts.layers, parts.registry, parts.store
        self.device = parts.world.device
        self.stepper = stepper
        self.caller = stepper.executor.caller
        self.samples = samples
        self.dataset, self.feed = samples.dataset, samples.feed
        self.held_out = samples.evaluation_feeds[""].feed if "" in samples.evaluation_feeds else None
        self.writers, self.profiler = writers, profiler
        self.num_parameters, self.num_trained = sizes
        self.best, self.notes = state.best, state.notes
        if self.feed is not None:
            self.feed.notes = self.notes
        self.memory = replace(memory, wait_until_idle=self._finish_pending, check_idle=self._check_idle)
        self.listeners: list[Callable[[Row], None]] = []
        self.readers: list[Callable[[Row], None]] = []
        self.num_steps_done = 0
        self.was_stopped = False
        self._load_weights = load_weights
        self._state = state
        self._checkpointer = build_checkpointer(state)
        # The plugins are searched only once, so that a step makes no hook call if none listens.
        self._listening_plugins = {
            hook: [plugin for plugin in plan.plugins.values() if plugin.implements(hook)] for hook in NOTIFICATION_HOOKS
        }
        self._outcome: Outcome = "finished"
        self._has_begun = self._is_closed = self._is_training = False
        self._is_first_step = True  # whether this process has run no step, as after a resume
        self._activity = ""  # "a step" or "an evaluation" while one runs
        self._has_listeners = False
        self._is_stop_requested = False
        self._start_time: Moment = 0.0  # on the device's time line, since the host may read a row late
        self._pending_step: PendingStep | None = None

    def launch(self, inputs: GivenBatch | None, outputs: ModelOutputs | None = None) -> PendingStep:
        """Runs a step on `inputs`, or on the feed's next samples if `inputs` is None; on CUDA, returns before the device is
        done. All ranks must call it. outputs: receives the model's outputs in this step.
        """
        self.memory.require("a step", STEP_PARTS)  # a listener may have offloaded some of the parts
        self._state.attempt.begin(self.num_steps_done)
        step, profiler, meter = self.num_steps_done + 1, self.profiler, self.samples.meter
        with self.device.preserve_random_state(), self._override_attribute("_activity", "a step"):
            if inputs is not None:
                batch, wait_s, numbers = self.samples.splitter.split_input(inputs), 0.0, tuple[int, ...]()
            else:
                assert self.feed is not None, "a simulated world takes no steps"
                batch = self.samples.splitter.split_feed(self.feed.next(is_last=step == self.plan.run.steps))
                wait_s, numbers = self.feed.wait_s, self.feed.samples
            if profiler is not None:
                profiler.before_step(step)
            if self._is_first_step:
                self.parts.registry.check_complete(self.parts.layers)
                _ = self._state.resolved_plan  # before the files that it names may change
            if outputs is not None:
                outputs.micros = batch.micros
            batch = replace(batch, counts=reduce(BatchCounts.add, map(meter.count, batch.whole)))
            votes = Votes(self._is_stop_requested, self._checkpointer.wants_save())
            by_micro = None if outputs is None else outputs.by_micro
            totals = self.stepper.step(self.num_steps_done, batch, votes=votes, outputs=by_micro)
        self._is_first_step = False
        if profiler is not None:
            profiler.after_step(step)
        self.num_steps_done = step
        return PendingStep(step, totals, self.stepper.update.lr, self.stepper.agreement.counts, wait_s, numbers)

    def _evaluate_sets(self) -> Row:
        """Evaluates all sets of `[evaluation]`, and returns the values of their metrics under their keys in the row."""
        row: Row = {}
        metrics = self.samples.metrics
        with self._evaluation_mode():
            for set_name, feed in self.samples.evaluation_feeds.items():
                results = self.stepper.evaluate(feed.batches(self.samples.splitter), metrics)
                if metrics.has_perplexity:
                    perplexity = math.exp(results["loss"]) if results["loss"] < MAX_EXP else math.inf
                    results = {"loss": results["loss"], "perplexity": perplexity, **results}
                row |= {metric_row_key(metric, set_name): value for metric, value in results.items()}
        return row

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Within the block, marks an evaluation as running, and gives the model the weights for evaluations."""
        with self._override_attribute("_activity", "an evaluation"), self._use_evaluation_weights():
            yield

    @contextmanager
    def _use_evaluation_weights(self) -> Iterator[None]:
        """Within the block, the model has the weights for evaluations. Before a switch, copies unwritten checkpoint state."""
        update = self.stepper.update
        if update.switches_weights:
            self._checkpointer.copy_unwritten_state()
        with update.use_evaluation_weights():
            yield

    def _format_outputs(self, outputs: ModelOutputs, inputs: GivenBatch | None, *, join: bool) -> Any:
        return outputs.to_input_form(inputs, self.samples.splitter.info.fields, self.parts.groups["sp"], join=join)

    def _complete_pending_step(self) -> None:
        pending, self._pending_step = self._pending_step, None
        if pending is not None:
            self._complete_step(pending)

    def _complete_step(self, pending: PendingStep) -> Row:
        """Waits for the totals of the step, evaluates if an evaluation is due, writes the row and returns it. Raises RunError
        on all ranks for a refused step, unless the plan allows the run to skip it.
        """
        step_progress, skips = self.parts.store.state.step_progress, self.stepper.update.skips
        step_progress.begin_entry(DEVICE_WAIT)
        result = pending.totals.read()
        step_progress.begin_entry(BETWEEN_STEPS)
        end_time = pending.totals.end
        seconds = self.device.seconds_between(self._start_time, end_time)
        self._start_time = end_time
        if skips is not None:
            skips.settle(pending.totals)
        is_skipped = skips is not None and result.is_skippable and skips.num_in_a_row <= skips.max_in_a_row
        if result.is_refused and not is_skipped:
            is_latest = pending.step == self.num_steps_done
            if is_latest:
                self.parts.store.state.was_taken = False
            raise build_refusal(
                self.parts,
                pending.step,
                result,
                pending.totals,
                pending.samples,
                is_latest=is_latest,
                num_skipped=0 if skips is None else max(0, skips.num_in_a_row - 1),
            )
        self.was_stopped = result.wants_stop
        if result.wants_save:
            self._checkpointer.request_save()
        row: Row = {"step": pending.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": pending.lr}
        if result.loss_scale is not None:
            row["loss_scale"] = result.loss_scale
        if result.loss_scale is not None or skips is not None:
            row["skipped"] = int(result.is_skipped or is_skipped)
        count = len(self.parts.numbers.names)
        row |= self.parts.numbers.row(result.numbers[:count])
        if (sources := self.stepper.update.sources) is not None:
            row |= sources.row(result.numbers[count:])
        row |= self.samples.meter.measure(pending.counts, seconds, pending.data_wait_s)
        try:
            if self._is_evaluation_due(pending.step):
                row |= self._evaluate_sets()
                if self.best is not None and self.best.add(pending.step, row):
                    self._checkpointer.request_save()
                self._start_time = self.device.moment()
        finally:  # the step has run, even if its evaluation fails
            for writer in self.writers:
                writer.write(row)
        for reader in self.readers:
            reader(row)
        if self._has_listeners or self.listeners or self._listening_plugins["sley_step_finished"]:
            self.parts.weights.settle()
        for listener in self.listeners:
            listener(row)
        self._call_hook("sley_step_finished", run=self, row=row)
        return row

    def _check_open(self) -> None:
        if self._is_closed:
            raise run_closed_error("run")

    def _finish_pending(self) -> None:
        """Writes the row of the pending step, if any, and waits for weights in flight. Public methods call it first. Raises
        RunError "step-running" within a step or an evaluation, and on CUDA in a listener while the next step runs.
        """
        self._check_open()
        if self._activity or (self._is_training and self._pending_step is not None):
            raise RunError("step-running", f"{self._activity or 'a step'} is still running", hint="call it between two steps")
        self._complete_pending_step()
        self.parts.weights.settle()

    def _check_idle(self) -> None:
        """Copies the state that a checkpoint still has to write, so that its memory can be offloaded. Raises StateError
        "step-failed" if exchanges of a failed step or evaluation may still use this run's memory.
        """
        stepper = self.stepper
        if self.world.size > 1 and (stepper.is_unfinished or stepper.executor.is_unfinished):
            label = "step" if stepper.is_unfinished else "evaluation"
            message = f"the last {label} failed, and its exchanges with other ranks may still use the memory to be offloaded"
            raise StateError("step-failed", message, hint="run a step first, or close the run")
        self._checkpointer.copy_unwritten_state()

    def _is_evaluation_due(self, step: int) -> bool:
        if self.plan.evaluation is None or not self.samples.evaluation_feeds:
            return False
        return step % self.plan.evaluation.every == 0 or step == self.plan.run.steps

    def _save_if_due(self) -> None:
        """Starts to save a checkpoint if one is due. All ranks call it and decide alike. No step may be in flight."""
        if self._checkpointer.is_due(self.num_steps_done):
            self.parts.weights.settle()
            self._checkpointer.start_save(self.num_steps_done)
            self._start_time = self.device.moment()

    def _call_hook(self, hook: str, **arguments: Any) -> None:
        """Calls `hook` in each plugin that implements it, in the plan's order. Raises PluginError if a call fails."""
        for plugin in self._listening_plugins[hook]:
            plugin.call(hook, **arguments)

    @contextmanager
    def _override_attribute(self, name: str, value: object) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

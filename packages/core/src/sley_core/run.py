"""A run: `assemble` returns it; the command line, or a program of your own, drives it.

with assemble(plan, world) as run:
    run.train()                      # all steps of the plan
    row = run.step(batch)            # or one step, on your own samples
    loss = run.evaluate()            # held-out loss, or that of a batch
    outputs = run.predict(batch)     # the model's outputs for your own samples
    run.load_weights(state)          # other weights, between two steps
    run.save_weights("weights")      # safetensors files
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from sley_core.attach import AssemblyInfo, RunOutputs, Samples, collect_counts
from sley_core.comm.device import on_stream
from sley_core.engine.call import count_graphs
from sley_core.engine.save import Precision, WeightSaver
from sley_core.engine.step_batch import GivenBatch, ModelOutputs
from sley_core.errors import RunError, StateError, UsageError, run_closed_error
from sley_core.evaluation import local_rows
from sley_core.loop import Loop, Row
from sley_core.memory.run_memory import TO_EVALUATE, TO_LOAD, TO_RESTORE, TO_SAVE, TO_STEP, RunMemory
from sley_core.run_state.state import AUTO, TrainingState
from sley_core.weight_files.write import FILE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.engine.load import LoadedWeights
    from sley_core.engine.parts import Parts
    from sley_core.engine.stepper import Stepper
    from sley_core.memory.state import Part
    from sley_core.plan.plan import Plan
    from sley_core.protocols import RestoreResult

Outcome = Literal["finished", "interrupted", "failed"]


class Run(Loop, AbstractContextManager["Run"]):
    """One rank's part of a training run. All ranks call the same methods in the same order, except `stop` and `close`.

    parts: this rank's part of the run; `world`, `topology`, `groups`, `layers`, `registry` and `store` are its attributes too.
    memory: reports and moves the run's memory. facts: results of the assembly; its `notes` are for the user.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        stepper: Stepper,
        samples: Samples,
        outputs: RunOutputs,
        memory: RunMemory,
        load_weights: Callable[..., LoadedWeights],
        state: TrainingState,
        facts: AssemblyInfo,
    ) -> None:
        super().__init__(plan, parts, stepper, samples, outputs, memory, state)
        self.world, self.topology, self.groups = parts.world, parts.topology, parts.groups
        self.layers, self.registry, self.store = parts.layers, parts.registry, parts.store
        self.caller = stepper.executor.caller
        self.dataset = samples.dataset
        self.facts = facts
        self.notes = facts.notes
        if self.feed is not None:
            self.feed.notes = self.notes
        self.memory = replace(memory, settle=self._finish_pending, check_free=self._check_free)
        self._load_weights = load_weights
        self._outcome: Outcome = "finished"
        self._has_begun = self._is_closed = False
        self._is_training = False

    @property
    def rows(self) -> slice:
        """This rank's rows (samples) of the global batch, with full sequences; the same on all ranks of an `sp` group."""
        rows = local_rows(self.plan.batch.global_size, self.parts)
        return slice(rows.start, rows.stop)

    @property
    def resolved_plan(self) -> Plan:
        """The plan, completed by values that only the run could determine: ranks of the world, samples of an epoch, ..."""
        return self._state.resolved_plan

    def train(self) -> Outcome:
        """Takes steps until the plan's last one, until `[evaluation] patience` is at its end, or until any rank asks to stop;
        returns the outcome.

        Calls the plugins' notifications. Raises RunError on all ranks, with no weight changed by that step: `not-finite` for
        the loss or the gradient norm, `nothing-counts` for a batch of weight 0; and before the first step `checkpoint-folder`.
        """
        with self.device.on_stream():
            self._finish_pending()
            self.memory.require("a step", TO_STEP)
            self._checkpointer.probe()
            with self._track_outcome(), self._override_attribute("_is_training", True):
                # All ranks must wait for late weights alike, so they ask whether anyone listens.
                has_listeners = bool(self.listeners)
                control = self.groups["control"]
                self._has_listeners = self.parts.weights.arrive_late and any(
                    control.gather_objects(has_listeners, label="who listens to steps")
                )
                self._restart_timer()
                with self.parts.weights.settle_on_error():
                    while self.num_steps_done < self.plan.run.steps and not (self.was_stopped or self.stopped_early):
                        # Launched before the previous step is emitted: on CUDA the device is not idle while the host reads.
                        before, self._pending_step = self._pending_step, self.launch(None)
                        if before is not None:
                            self._emit(before)
                        is_due = self._is_evaluation_due(self._pending_step.number) or self._checkpointer.is_due(
                            self.num_steps_done
                        )
                        if is_due or not self.device.is_async:
                            self._emit_pending()
                        self._save_if_due()
                    self._emit_pending()
                    self.parts.weights.settle()
                self._checkpointer.finish_training(self.num_steps_done, was_stopped=self.was_stopped)
        return self._outcome

    @overload
    def step(self, batch: GivenBatch | None = None) -> Row: ...

    @overload
    def step(
        self, batch: GivenBatch | None = None, *, return_outputs: Literal[True], join: bool = False
    ) -> tuple[Row, Any]: ...

    @overload
    def step(self, batch: GivenBatch | None = None, *, return_outputs: bool, join: bool = False) -> Any: ...

    def step(self, batch: GivenBatch | None = None, *, return_outputs: bool = False, join: bool = False) -> Any:
        """Takes one optimizer step and returns its row, the same on every rank.

        batch: this rank's samples, rows `run.rows` of the global batch, on the host: {field: tensor}, or a list of
        microbatches whose sequence lengths may differ, but not between stages. By default the next samples of the plan. The
        number of microbatches need not be that of the plan, but must be the same on all ranks.

        return_outputs: returns the row and the model's outputs in this step's forward, copied and without a graph, in the form
        of `predict`, with `join` as there; the same on all ranks.

        Raises the same errors as `train`, and, with nothing changed, for a batch that does not match the data's declaration.
        """
        outputs = ModelOutputs() if return_outputs else None
        with self.device.on_stream():
            self._finish_pending()
            with self._track_outcome():
                self._restart_timer()
                with self.parts.weights.settle_on_error():
                    pending = self.launch(batch, outputs)
                self.parts.weights.settle()
                row = self._emit(pending)
                self._save_if_due()
                return row if outputs is None else (row, self._format_outputs(outputs, batch, join=join))

    @on_stream
    def evaluate(self, batch: GivenBatch | None = None) -> float:
        """Returns the mean loss over `batch`, the same on every rank; changes nothing.

        batch: this rank's samples, as in `step`; by default the plan's held-out samples. Raises RunError `not-finite` and
        `nothing-counts` on all ranks, and UsageError `no-evaluation` without both a batch and held-out samples.
        """
        self._finish_pending()
        if batch is None and self.held_out is None:
            hint = "add [evaluation] with `every = 100`, or pass a batch"
            message = "the plan has no [evaluation] table"
            if self.plan.evaluation is not None:
                message, hint = (
                    "[evaluation] has `held_out = false`, so there is no held-out loss",
                    "use `run.evaluate_sets()` to evaluate its sets",
                )
            raise UsageError("no-evaluation", message, hint=hint)
        self._require_memory("an evaluation", TO_EVALUATE)
        return self._mean_loss(batch)

    @on_stream
    def evaluate_sets(self) -> Row:
        """Returns the numbers of `[evaluation]` as a row has them (`held_out_loss`, `held_out/NAME/loss`), the same on every
        rank; changes nothing. Raises the same errors as `evaluate`, and RunError `metric-result`.
        """
        self._finish_pending()
        if not self.samples.evaluated:
            hint = "add [evaluation] with `every = 100`"
            raise UsageError("no-evaluation", "the plan has no [evaluation] table", hint=hint)
        self._require_memory("an evaluation", TO_EVALUATE)
        return self._evaluate_sets()

    @on_stream
    def predict(self, batch: GivenBatch, *, join: bool = False) -> Any:
        """Returns the model's outputs for `batch` on ranks with the model's last layer, None on the other stages; changes
        nothing. Modules are in evaluation mode.

        batch: as in `step`; fields that no layer reads, such as labels, may be missing. The result has the form of the batch:
        for {field: tensor} one output, whose tensors are joined along the batch dim; for a list of microbatches a list.
        Tensors are on the run's device, without a graph. Ranks that split sequences (`sp`) get the output of their slice, or
        with `join` that of whole sequences; classes that ranks share are joined.

        Raises RunError `boundary-type` for an output that is not made of tensors, `outputs-apart` for a tensor without the dim
        along which it would be joined, and StateError `memory-away`.
        """
        self._finish_pending()
        self._require_memory("a prediction", TO_EVALUATE)
        with self._override_attribute("_activity", "an evaluation"), self._use_evaluation_weights():
            step_batch = self.samples.splitter.split_prediction(batch, self.samples.reads)
            outputs = ModelOutputs(step_batch.micros, self.stepper.outputs(step_batch))
            return self._format_outputs(outputs, batch, join=join)

    @on_stream
    def load_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True) -> LoadedWeights:
        """Sets the model's weights to those of `state` exactly: {name: full tensor}, with the same names in every layout.

        All ranks pass the same state; each copies its own part, including shards and fp32 masters. A tied weight may have any
        of its names. Buffers in `state` are loaded too; optimizer states (moments) stay. A mapping is checked before anything
        is written; pairs are written as they come, so that one tensor at a time is in memory. strict: missing or unknown names
        are an error; otherwise they are returned.

        Raises RunError on all ranks: `weights-mismatch`, and `weights-differ` if ranks got different values.
        """
        self._finish_pending()
        self.memory.require("loading weights", TO_LOAD)
        self._checkpointer.copy_unwritten_state()
        return self._load_weights(state, strict=strict)

    @on_stream
    def save_weights(self, folder: str | Path, *, precision: Precision = "working", max_file_bytes: int = FILE_BYTES) -> None:
        """Saves the model's weights in `folder`, as safetensors files under names that no layout changes.

        All ranks must see the same `folder`. Several files get an index. A tied weight is written once, under the name of the
        registry; persistent buffers are those of the first replica. precision: "working" for `precision.compute`, "full" for
        the optimizer's weights (fp32 masters). max_file_bytes: the size limit of a file; a larger tensor gets its
        own file. The metadata of each has `step`, the steps done. Files are written beside `folder` and replace it when all of
        them are on disk, so it is never incomplete.

        Raises RunError `weights-unsaved` on all ranks if any could not write, if `folder` holds other files, or if memory is
        offloaded; UsageError `no-precision` for another word.
        """
        self._finish_pending()
        if precision not in TO_SAVE:
            raise UsageError("no-precision", f"unknown precision of weights {precision!r}", hint=f"use {' or '.join(TO_SAVE)}")
        save = WeightSaver(self.parts, self.stepper.update.masters)
        attempt = self._state.attempt.current
        facts = {"step": str(self.num_steps_done), "attempt": "" if attempt is None else attempt.id}
        self._require_memory("saving weights", ())
        with self._use_evaluation_weights():
            save(Path(folder).absolute(), precision, max_file_bytes, partial(self._prepare_weights, precision), facts)

    def check_weights_folder(self, folder: str | Path) -> None:
        """Raises RunError on all ranks if `save_weights` could not save in `folder`: `weights-unsaved` if it holds other files,
        `checkpoint-folder` if a rank that writes does not see it.
        """
        self._check_open()
        WeightSaver(self.parts, self.stepper.update.masters).check(Path(folder).absolute())

    def _prepare_weights(self, precision: Precision) -> None:
        """Prepares the memory that a save of `precision` reads. Raises StateError `memory-away`."""
        self.memory.require("saving weights", TO_SAVE[precision])
        if precision == "full":
            self.memory.follow("saving weights")

    @on_stream
    def save_checkpoint(self, path: str | Path | None = None) -> str:
        """Writes a checkpoint and returns its folder; the checkpoint is complete when this returns.

        path: the folder to create; by default the next one in the run's folder of checkpoints. Raises RunError
        `checkpoint-failed` on all ranks if it cannot be written: there is no checkpoint then, and the run can continue.
        """
        self._finish_pending()
        return self._checkpointer.save(path, self.num_steps_done)

    @on_stream
    def load_checkpoint(self, path: str | Path, *, allow_fresh_start: bool = False) -> RestoreResult | None:
        """Resumes from a checkpoint of any layout, and returns a description of it; None for "auto" if there is none yet.

        Restores weights, masters, optimizer states, buffers, loss scale, position in the data and the number of steps done;
        rows that are not of the checkpoint's own steps are dropped from the metrics. path: a checkpoint; or a folder of
        several, of which the newest intact one is loaded; or "auto" for the newest that this run wrote, or else the one from
        which it began. allow_fresh_start: whether "auto" may drop the rows of a run that has saved no checkpoint.

        Raises on all ranks, with nothing changed: RunError `no-checkpoint`, `checkpoint-damaged`, `checkpoint-mismatch`
        for another model's or optimizer's; PlanError `resume-differs` for a run with other data, loss or seed; UsageError
        `never-anew` for "auto" without a checkpoint of this run, if its folder has rows or weights.
        """
        self._finish_pending()
        self.memory.require("loading a checkpoint", TO_RESTORE)
        restored, num_rows = self._checkpointer.load(path, allow_fresh_start=allow_fresh_start), 0
        if restored is not None:
            named = "" if str(path) == AUTO else str(path)
            num_rows, note = self._state.attempt.resume(restored.lineage, restored.step, named, restored.path)
            restored.notes.extend([note] if note else [])
            self.num_steps_done = restored.step
        self.outputs.rewind(num_rows)
        return restored

    @property
    def stopped_early(self) -> str:
        """Why `train` takes no more steps before the plan's last one, in words: `[evaluation] patience` is at its end. "" if it
        is not. The same on all ranks.
        """
        if self.best is None or self.num_steps_done >= self.plan.run.steps:
            return ""
        return self.best.why_over

    def stop(self) -> None:
        """Asks all ranks to stop after the step in progress. Safe in a signal handler; does nothing once the run is closed."""
        self._is_stop_requested = True

    @property
    def counts(self) -> dict[str, dict[str, float]]:
        """Numbers counted by the run's parts on this rank (`protocols.Counts`, offload managers), by their name in the plan."""
        counts = collect_counts(self.plan, self.stepper, self.parts.pool, self.memory)
        if self.plan.model.config.compile:
            counts["compile"] = {"graphs": count_graphs()}
        return counts | ({} if self.plan.checkpoint is None else {"checkpoint": dict(self._checkpointer.counts())})

    @on_stream
    def close(self) -> None:
        """Ends threads, files and hooks, even if some of them fail to end. Leaves the world open. A second call does nothing.

        Layers are ordinary modules again, without patches, hooks or attributes of the run. A module with a sharded weight
        raises RunError `weights-sharded` when it is called; methods of the run raise `run-closed`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        parts = [*self.outputs.writers, self.stepper, self.outputs.profiler, self.feed]
        feeds = (samples.feed for samples in self.samples.evaluated.values())
        with ExitStack() as stack:  # the last first
            for part in (*parts, *feeds, self._checkpointer):
                if part is not None:
                    stack.callback(part.close)
            if self._has_begun:
                stack.callback(self._notify, "sley_run_finished", run=self, outcome=self._outcome)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._outcome = "failed"
        self.close()

    @contextmanager
    def _track_outcome(self) -> Iterator[None]:
        """Announces the run before its first step, and notes whether the last steps failed or all ranks were asked to stop."""
        self._outcome = "failed"
        if not self._has_begun:
            self._has_begun = True
            self._notify("sley_run_started", run=self)
        yield
        self._outcome = "interrupted" if self.was_stopped else "finished"

    def _require_memory(self, label: str, parts: Sequence[Part]) -> None:
        """Makes the device wait for `parts`, and for all weights and states if the optimizer has modes. Raises StateError."""
        self.memory.require(label, (*parts, *(TO_RESTORE if self.stepper.update.traits.has_modes else ())))

    def _check_open(self) -> None:
        if self._is_closed:
            raise run_closed_error("run")

    def _finish_pending(self) -> None:
        """Emits a step that was in flight when the previous one was refused, and waits for weights: before any call but a step
        of `train`. Raises RunError `step-running` within a step or an evaluation (from a module's hook), and from a listener on
        CUDA, where the weights are already those of the next step.
        """
        self._check_open()
        if self._activity or (self._is_training and self._pending_step is not None):
            raise RunError("step-running", f"{self._activity or 'a step'} is still running", hint="call it between two steps")
        self._emit_pending()
        self.parts.weights.settle()

    def _check_free(self) -> None:
        """Raises StateError `step-failed` if exchanges of a failed step or evaluation may still use this run's memory."""
        stepper = self.stepper
        if self.world.size > 1 and (stepper.left_in_flight or stepper.executor.left_in_flight):
            label = "step" if stepper.left_in_flight else "evaluation"
            message = (
                f"the last {label} failed, and its communication with other ranks may still use the memory to be offloaded"
            )
            raise StateError("step-failed", message, hint="run a step first, or close the run")
        self._checkpointer.copy_unwritten_state()

"""Defines `Run`, which `assemble` returns, and which the command line or your own program drives.

with assemble(plan, world) as run:
    run.train()                      # all steps of the plan
    row = run.step(batch)            # one step on your own samples
    loss = run.evaluate()            # the mean loss over the held-out samples
    outputs = run.predict(batch)     # the model's outputs for your own samples
    run.load_weights(state)          # replaces the weights between two steps
    run.save_weights("weights")      # safetensors files
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from torch import Tensor

from sley_core.comm.device import on_stream
from sley_core.engine.call import count_graphs
from sley_core.engine.step_batch import GivenBatch, ModelOutputs
from sley_core.errors import UsageError
from sley_core.memory import Part
from sley_core.plan.plan import Plan
from sley_core.protocols import Counts, RestoreResult, RewindableWriter
from sley_core.weight_files.write import MAX_FILE_BYTES
from sley_trainer.attach import list_built_components
from sley_trainer.evaluation import local_rows
from sley_trainer.loop import Loop, Row
from sley_trainer.loop import Outcome as Outcome
from sley_trainer.run_memory import EVALUATION_PARTS, LOAD_PARTS, RESTORE_PARTS, SAVE_PARTS, STEP_PARTS, summarize_moves
from sley_trainer.run_state import AUTO
from sley_trainer.state_dict import LoadedWeights, Precision, WeightSaver


class Run(Loop, AbstractContextManager["Run"]):
    """One rank's part of a training run. All ranks must call the same methods in the same order, except `stop` and `close`.
    parts: this rank's parts of the run, whose `world`, `topology`, `groups`, `layers`, `registry` and `store` are also
    attributes of the run. memory: reports the run's memory and moves it between device and host.
    """

    @property
    def rows(self) -> slice:
        """This rank's rows (samples) of the global batch. All ranks that share sequences (an `sp` group) have the same rows."""
        rows = local_rows(self.plan.batch.global_size, self.parts)
        return slice(rows.start, rows.stop)

    @property
    def resolved_plan(self) -> Plan:
        """The plan with the values that only the run could determine, such as the number of ranks and of samples per epoch."""
        return self._state.resolved_plan

    def train(self) -> Outcome:
        """Runs the plan's remaining steps. Returns "interrupted" if a rank has asked to stop, and otherwise "finished", even if
        `[evaluation] patience` has ended the run. After "interrupted", a further call runs the steps that remain.

        Raises RunError on all ranks: "checkpoint-folder" if a rank cannot use the checkpoint folder, "not-finite" if the loss
        or the gradient norm is not finite, and "nothing-counts" if a batch has the loss weight 0. The last two errors leave the
        weights unchanged.
        """
        with self.device.on_stream():
            self._finish_pending()
            self.memory.require("a step", STEP_PARTS)
            self._checkpointer.probe()
            with self._track_outcome(), self._override_attribute("_is_training", True):
                # If any rank has a listener, all ranks must wait for weights that are still in flight.
                has_listeners = bool(self.listeners)
                control = self.groups["control"]
                self._has_listeners = self.parts.weights.can_arrive_late and any(
                    control.gather_objects(has_listeners, label="who listens to steps")
                )
                self._start_time = self.device.moment()
                self.was_stopped = False
                with self.parts.weights.settle_on_error():
                    while self.num_steps_done < self.plan.run.steps and not (self.was_stopped or self.stopped_early):
                        # The next step starts before the previous row is emitted, so that a CUDA device does not idle.
                        previous, self._pending_step = self._pending_step, self.launch(None)
                        if previous is not None:
                            self._complete_step(previous)
                        is_due = self._is_evaluation_due(self._pending_step.step) or self._checkpointer.is_due(
                            self.num_steps_done
                        )
                        if is_due or not self.device.is_async:
                            self._complete_pending_step()
                        self._save_if_due()
                    self._complete_pending_step()
                    self.parts.weights.settle()
                self._checkpointer.finish_training(self.num_steps_done, was_stopped=self.was_stopped)
                self._is_stop_requested &= not self.was_stopped
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
        """Runs one optimizer step and returns its row, which is the same on every rank.

        batch: this rank's samples on the host, i.e. the rows `run.rows` of the global batch: {field: tensor}, or a list of
        microbatches, whose sequence lengths may differ; None takes the next samples of the plan. All ranks must pass the same
        number of microbatches, which may differ from the plan's. return_outputs: whether to return (row, outputs). Then
        `outputs` are the model's outputs in the forward of this step, in the form that `predict` returns. All ranks must pass
        the same value. join: whether ranks get the outputs of whole sequences instead of their slices.

        Raises the same errors as `train`, and RunError for a batch that does not match the declared fields.
        """
        outputs = ModelOutputs() if return_outputs else None
        with self.device.on_stream():
            self._finish_pending()
            with self._track_outcome():
                self._start_time = self.device.moment()
                with self.parts.weights.settle_on_error():
                    pending = self.launch(batch, outputs)
                self.parts.weights.settle()
                row = self._complete_step(pending)
                self._save_if_due()
                return row if outputs is None else (row, self._format_outputs(outputs, batch, join=join))

    @on_stream
    def evaluate(self, batch: GivenBatch | None = None) -> float:
        """Returns the mean loss over the batches of all ranks; the result is the same on every rank. Does not change the run.
        batch: this rank's samples, {field: tensor} or a list of microbatches; None takes the plan's held-out samples. Raises
        RunError "not-finite" or "nothing-counts" on all ranks, and UsageError "no-evaluation" if there is neither a batch nor
        held-out samples.
        """
        self._finish_pending()
        if batch is None and self.held_out is None:
            hint = "add [evaluation] with `every = 100` and without `held_out = false`, or pass a batch"
            raise UsageError("no-evaluation", "the plan has no held-out samples to evaluate", hint=hint)
        self._require_memory("an evaluation", EVALUATION_PARTS)
        splitter = self.samples.splitter
        with self._evaluation_mode():
            batches = (
                [splitter.split_input(batch)] if batch is not None else self.samples.evaluation_feeds[""].batches(splitter)
            )
            return self.stepper.evaluate(batches)["loss"]

    @on_stream
    def evaluate_sets(self) -> Row:
        """Returns the results of `[evaluation]`, keyed as in a row (`held_out_loss`, `held_out/NAME/loss`). The results are the
        same on every rank. Does not change the run. Raises the errors of `evaluate`, and RunError "metric-result".
        """
        self._finish_pending()
        if not self.samples.evaluation_feeds:
            hint = "add [evaluation] with `every = 100`"
            raise UsageError("no-evaluation", "the plan has no [evaluation] table", hint=hint)
        self._require_memory("an evaluation", EVALUATION_PARTS)
        return self._evaluate_sets()

    @on_stream
    def predict(self, batch: GivenBatch, *, join: bool = False) -> Any:
        """Returns the model's outputs for `batch` in evaluation mode, or None on stages without the last layer. Does not change
        the run.

        batch: this rank's samples, as for `step`; fields that no layer reads, such as labels, may be missing. For {field:
        tensor} the result is one output, whose tensors are joined along the batch dim; for a list of microbatches it is a list.
        Tensors are on the run's device, without a graph. join: whether ranks that split sequences (`sp`) get the output of
        whole sequences instead of their slice. If classes are split over ranks, the result always has all classes.

        Raises RunError "boundary-type" for an output that does not consist of tensors, "outputs-apart" for a tensor without the
        dim along which it would be joined, and StateError "memory-away" if the weights are offloaded.
        """
        self._finish_pending()
        self._require_memory("a prediction", EVALUATION_PARTS)
        with self._evaluation_mode():
            step_batch = self.samples.splitter.split_prediction(batch, self.samples.read_fields)
            outputs = ModelOutputs(step_batch.micros, self.stepper.predict(step_batch))
            return self._format_outputs(outputs, batch, join=join)

    @on_stream
    def load_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True) -> LoadedWeights:
        """Sets the model's weights to the values in `state`, {name: full tensor} with the same names in every layout.

        All ranks must pass the same state; each copies its own part, including shards and master weights. A tied weight may
        have any of its names. Buffers in `state` are loaded too; optimizer states do not change, and averages of weights
        start again. A mapping is checked before anything is written. Pairs are checked and written one by one, so that only
        one tensor is in memory. strict: whether missing or unknown names are an error; if not, the result lists them.

        Raises RunError on all ranks: "weights-mismatch" if `state` does not fit the model, and "weights-differ" if ranks got
        different values.
        """
        self._finish_pending()
        self.memory.require("loading weights", LOAD_PARTS)
        self._checkpointer.copy_unwritten_state()
        self.stepper.update.include_unfrozen_params()
        loaded = self._load_weights(state, strict=strict)
        if (averages := self.stepper.update.averages) is not None:
            averages.reset()
        return loaded

    @on_stream
    def save_weights(
        self, folder: str | Path, *, precision: Precision = "working", max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Saves the model's weights in `folder` as safetensors files, with the same names in every layout.

        All ranks must see the same `folder`, which is replaced when all files are complete. Several files get an index. A tied
        weight is written once, under its name in the registry. Persistent buffers come from the first replica. precision:
        "working" for weights in the dtype `precision.compute`, "full" for the master weights. max_file_bytes: the size limit of
        a file; a larger tensor has its own file.

        Raises RunError "weights-unsaved" on all ranks if a rank cannot write, if `folder` has files other than weights, or if
        memory is offloaded. Raises UsageError "no-precision" for an unknown precision.
        """
        self._finish_pending()
        if precision not in SAVE_PARTS:
            hint = f"use {' or '.join(SAVE_PARTS)}"
            raise UsageError("no-precision", f"weights cannot be saved with the precision {precision!r}", hint=hint)
        save = WeightSaver(self.parts, self.stepper.update.masters)
        attempt = self._state.attempt.current
        metadata = {"step": str(self.num_steps_done), "attempt": "" if attempt is None else attempt.id}
        self._require_memory("saving weights", ())
        with self._use_evaluation_weights():
            save(Path(folder).absolute(), precision, max_file_bytes, partial(self._prepare_weights, precision), metadata)

    def check_weights_folder(self, folder: str | Path) -> None:
        """Raises RunError on all ranks if `save_weights` could not save in `folder`: "weights-unsaved" if it has files other
        than weights, "checkpoint-folder" if a rank that writes files does not see it. All ranks must call it.
        """
        self._check_open()
        WeightSaver(self.parts, self.stepper.update.masters).check(Path(folder).absolute())

    def _prepare_weights(self, precision: Precision) -> None:
        """Raises StateError "memory-away" if the weights to save are offloaded. Updates masters that are to be saved."""
        self.memory.require("saving weights", SAVE_PARTS[precision])
        if precision == "full":
            self.memory.update_masters("saving weights")

    @on_stream
    def save_checkpoint(self, path: str | Path | None = None) -> str:
        """Writes a complete checkpoint and returns its folder. path: the folder to create; None creates the next folder in the
        run's checkpoint folder. Raises RunError "checkpoint-failed" on all ranks if writing fails; the run can then continue.
        """
        self._finish_pending()
        return self._checkpointer.save(path, self.num_steps_done)

    @on_stream
    def load_checkpoint(self, path: str | Path, *, allow_fresh_start: bool = False) -> RestoreResult | None:
        """Resumes from a checkpoint of any layout and returns its description; None for "auto" if there is no checkpoint yet.

        Restores weights, master weights, optimizer states, buffers, the loss scale, the position in the data and the number of
        steps, and drops the metrics rows of other steps. path: a checkpoint; a folder, to load its newest intact checkpoint; or
        "auto", to load the newest checkpoint of this run, or else the checkpoint from which the run started. allow_fresh_start:
        whether "auto" may drop the rows of a run without a checkpoint.

        Raises on all ranks, with nothing changed: RunError "no-checkpoint", "checkpoint-damaged", or "checkpoint-mismatch" for
        a different model or optimizer; PlanError "resume-differs" or "data-changed" for a different loss, seed or data;
        UsageError "never-anew" if "auto" finds no checkpoint of this run, but its folder has rows or weights.
        """
        self._finish_pending()
        self.memory.require("loading a checkpoint", RESTORE_PARTS)
        restored, num_rows = self._checkpointer.load(path, allow_fresh_start=allow_fresh_start), 0
        if restored is not None:
            named = "" if str(path) == AUTO else str(path)
            num_rows, note = self._state.attempt.resume(restored.lineage, restored.step, named, restored.path)
            restored.notes.extend([note] if note else [])
            self.num_steps_done = restored.step
        for writer in self.writers:
            if isinstance(writer, RewindableWriter):  # drops the rows of steps that will run again
                writer.rewind(num_rows)
        return restored

    @property
    def stopped_early(self) -> str:
        """The reason why `[evaluation] patience` ends `train` before the plan's last step, or ""; the same on all ranks."""
        if self.best is None or self.num_steps_done >= self.plan.run.steps:
            return ""
        return self.best.stop_reason

    def stop(self) -> None:
        """Asks all ranks to stop training after the step in progress. Any rank may call it, even in a signal handler."""
        self._is_stop_requested = True

    @property
    def counts(self) -> dict[str, dict[str, float]]:
        """The statistics of the run's parts on this rank, keyed by the part's name in the plan. If several parts have the same
        name, the second key ends with " 2", and so on.
        """
        plan, parts = self.plan, list_built_components(self.plan, self.stepper)
        stats = [(component.name, dict(part.counts())) for component, part in parts if isinstance(part, Counts)]
        stats += [
            (table.name, summarize_moves(manager)) for table, manager in zip(plan.offload, self.memory.managers, strict=True)
        ]
        counts: dict[str, dict[str, float]] = {"core.pool": self.parts.pool.counts()}
        for name, numbers in stats:
            num_same = sum(key.split(" ")[0] == name for key in counts)
            counts[f"{name} {num_same + 1}" if num_same else name] = numbers
        if plan.model.config.compile:
            counts["compile"] = {"graphs": count_graphs()}
        return counts | ({} if plan.checkpoint is None else {"checkpoint": dict(self._checkpointer.counts())})

    @on_stream
    def close(self) -> None:
        """Stops threads, closes files and removes hooks, even if one of these actions fails. Does not close the world. Layers
        become ordinary modules again. Modules with sharded weights then raise RunError "sharded-weight-read" when called, and
        methods of the run raise "run-closed". A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        parts = [*self.writers, self.stepper, self.profiler, self.feed]
        feeds = (samples.feed for samples in self.samples.evaluation_feeds.values())
        with ExitStack() as stack:  # closes the last part first
            for part in (*parts, *feeds, self._checkpointer):
                if part is not None:
                    stack.callback(part.close)
            if self._has_begun:
                stack.callback(self._call_hook, "sley_run_finished", run=self, outcome=self._outcome)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._outcome = "failed"
        self.close()

    @contextmanager
    def _track_outcome(self) -> Iterator[None]:
        """Calls the `sley_run_started` hook before the first step, and sets `_outcome` to the outcome of the block."""
        self._outcome = "failed"
        if not self._has_begun:
            self._has_begun = True
            self._call_hook("sley_run_started", run=self)
        yield
        self._outcome = "interrupted" if self.was_stopped else "finished"

    def _require_memory(self, label: str, parts: Sequence[Part]) -> None:
        """Calls `memory.require` for `parts`, and also for `RESTORE_PARTS` if evaluations use other weights than training."""
        self.memory.require(label, (*parts, *(RESTORE_PARTS if self.stepper.update.switches_weights else ())))

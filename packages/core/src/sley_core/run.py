"""A run: `assemble` returns it, and the command line or your own program drives it.

with assemble(plan, world) as run:
    run.train()                      # all steps of the plan
    row = run.step(batch)            # or one step, on your own samples
    loss = run.evaluate()            # held-out loss
    run.load_weights(state)          # other weights, between two steps
    run.save_weights("weights")      # safetensors files
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from sley_core.comm.collectives import gather_objects
from sley_core.engine.save import WeightSaver
from sley_core.equipment import rows_of
from sley_core.errors import KeyPath, StateError, UsageError, closed
from sley_core.loop import Loop, Row
from sley_core.memory.run_memory import TO_EVALUATE, TO_LOAD, TO_RESTORE, TO_SAVE, TO_STEP
from sley_core.metrics.parts import counts_of
from sley_core.notify import Notifier
from sley_core.plan.load import with_values
from sley_core.weight_files.write import FILE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.checkpoint.checkpoints import Checkpoints
    from sley_core.checkpoint.choosing import RunOrigin
    from sley_core.checkpoint.loading import Restored
    from sley_core.engine.load import LoadedWeights, WeightLoader
    from sley_core.engine.parts import Parts
    from sley_core.engine.save import Precision
    from sley_core.engine.step_batch import GivenBatch
    from sley_core.engine.stepper import Stepper
    from sley_core.engine.waits import IsDue, Wait
    from sley_core.equipment import AssemblyFacts, Outputs, Samples
    from sley_core.memory.run_memory import RunMemory
    from sley_core.plan.plan import Plan

Outcome = Literal["finished", "interrupted", "failed"]


class Run(AbstractContextManager["Run"]):
    """Runs one rank's part of a training run. All ranks must call the same methods in the same order.

    parts: what plugins are attached to; `world`, `topology`, `groups`, `layers`, `book` and `store` are its attributes too.
    stepper: takes one step; loop: takes many, and makes rows. samples: the training data. outputs: the writers of metrics,
    timelines and profiles. memory: reports what the run holds, and moves it off the device and back. facts: what assembling
    found out; its `notes` are for the user. listeners: called with each row, on every rank. readers: called with each row too,
    but must not read anything else, since weights may still be in flight from other ranks.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        stepper: Stepper,
        samples: Samples,
        outputs: Outputs,
        memory: RunMemory,
        load_weights: WeightLoader,
        checkpoints: Checkpoints,
        facts: AssemblyFacts,
    ) -> None:
        self.plan = plan
        self.parts = parts
        self.world, self.topology, self.groups = parts.world, parts.topology, parts.groups
        self.layers, self.book, self.store = parts.layers, parts.book, parts.store
        self.stepper = stepper
        self.caller = stepper.executor.caller
        self.samples = samples
        self.dataset, self.feed, self.evaluation = samples.dataset, samples.feed, samples.evaluation
        self.outputs = outputs
        self.facts = facts
        self.notes = facts.notes
        self.listeners: list[Callable[[Row], None]] = []
        self.readers: list[Callable[[Row], None]] = []
        self._looks = False
        require = partial(memory.require, "a step", TO_STEP)
        self.loop = Loop(plan, parts, stepper, samples, outputs, self._tell, require, checkpoints)
        self.memory = memory
        memory.settle, memory.check_free = self._settle, self._check_free
        self._load_weights = load_weights
        self._checkpoints = checkpoints
        checkpoints.notes = self.notes
        checkpoints.resolved = lambda: self.resolved_plan.to_toml()
        self._notify = Notifier(plan)
        self._is_closed = False

    @property
    def num_steps_done(self) -> int:
        """Number of optimizer steps, refused ones included: each keeps its number."""
        return self.loop.num_steps_done

    @property
    def rows(self) -> slice:
        """This rank's rows (samples) of the global batch, with full sequences; the same on all ranks of an `sp` group."""
        rows = rows_of(self.plan.batch.global_size, self.parts)
        return slice(rows.start, rows.stop)

    @property
    def resolved_plan(self) -> Plan:
        """The plan completed by what only the run could determine: the ranks of the world, the samples of an epoch, ..."""
        found: dict[KeyPath, Any] = {**self.facts.found, ("parallel", "dp"): self.topology.dp}
        if self.feed is not None and self.feed.num_samples is not None:
            found["data", "samples_per_epoch"] = self.feed.num_samples
        return with_values(self.plan, found)

    def train(self) -> Outcome:
        """Takes steps until the plan's last one, or until any rank asks to stop; returns the outcome. All ranks call it.

        Calls the plugins' notifications. On CUDA a row is read while the next step runs. Raises RunError, on all ranks alike
        and with no weight changed by that step: `not-finite` if the loss or the gradient norm is not finite, `nothing-counts`
        for a batch of weight 0.
        """
        self._settle()
        self.memory.require("a step", TO_STEP)
        outcome: Outcome = "failed"
        self._notify("sley_run_started", run=self)
        try:
            self._looks = self._any_listens()
            self.loop.train()
            outcome = "interrupted" if self.loop.was_stopped else "finished"
        finally:
            self._notify("sley_run_finished", run=self, outcome=outcome)
        return outcome

    def step(self, batch: GivenBatch | None = None) -> Row:
        """Takes one optimizer step and returns its row, the same on every rank. All ranks call it.

        batch: this rank's samples, rows `run.rows` of the global batch, on the host: {field: tensor}; if left out, the next
        ones of the plan's data. It may have more or fewer micro-batches than the plan says, but the same number on all ranks.
        It may be a list of micro-batches, whose sequence lengths may differ, but must be the same on all stages. Raises
        RunError as `train` does, and, with nothing changed, for a batch that does not match the data's declaration.
        """
        self._settle()
        return self.loop.step(batch)

    def evaluate(self) -> float:
        """Returns the mean held-out loss; changes nothing. All ranks call it. Raises UsageError without `[evaluation]`."""
        self._settle()
        if self.evaluation is None:
            raise UsageError("no-evaluation", "the plan has no [evaluation] table", hint="add one with `every = 100`")
        self.memory.require("an evaluation", TO_EVALUATE)
        return self.loop.evaluate()

    def load_weights(
        self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True
    ) -> LoadedWeights:
        """Sets the model's weights to those of `state` exactly: {name: full tensor}, with the same names in every layout.

        All ranks call it, between two steps, with the same state; each copies the part that it holds, including shards and fp32
        masters. A tied weight may be under any of its names. Buffers in `state` are loaded too. Optimizer states (moments)
        stay. A mapping is checked before anything is written; pairs are written as they come, so that only one tensor need be
        in memory. strict: missing or unknown names are an error; otherwise they are returned.

        Raises RunError on all ranks alike: `weights-mismatch`, and `weights-differ` if ranks were given different values.
        """
        self._settle()
        self.memory.require("loading weights", TO_LOAD)
        self._checkpoints.secure()
        found = self._load_weights(state, strict=strict)
        self.loop.weights_loaded()
        return found

    def save_weights(
        self, folder: str | Path, *, precision: Precision = "working", max_file_bytes: int = FILE_BYTES
    ) -> None:
        """Saves the model's weights in `folder`, as safetensors files under names that no layout changes.

        All ranks call it, between two steps, and must see the same `folder`. Several files get an index. A tied weight is
        written once, under the name of the book; persistent buffers are those of the first replica. precision: "working" for
        `precision.compute`, "full" for what the optimizer steps (fp32 masters). max_file_bytes: the size limit of a file; a
        larger tensor gets its own file. Files are written beside `folder` and replace it when all of them are on disk, so it is
        never incomplete.

        Raises RunError `weights-unsaved` on all ranks alike if any could not write, if `folder` holds other files, or if memory
        is offloaded; UsageError `no-precision` for another word.
        """
        self._settle()
        if precision not in TO_SAVE:
            raise UsageError(
                "no-precision", f"weights have no precision {precision!r}", hint=f"it is {' or '.join(TO_SAVE)}"
            )
        require = partial(self.memory.require, "saving weights", TO_SAVE[precision])
        save = WeightSaver(self.parts, self.stepper.update.masters)
        save(Path(folder).absolute(), precision, max_file_bytes, require)

    def save_checkpoint(self, path: str | Path | None = None) -> str:
        """Writes a checkpoint and returns its folder; the checkpoint is complete when this returns. All ranks call it, between
        two steps.

        path: the folder to create; if left out, the next one in the run's folder of checkpoints. Offloaded memory is read on
        the host. Raises RunError `checkpoint-failed` on all ranks alike if it cannot be written: there is no checkpoint then,
        and the run can continue.
        """
        self._settle()
        return self._checkpoints.save(path, self.num_steps_done)

    def load_checkpoint(self, path: str | Path, origin: RunOrigin | None = None) -> Restored | None:
        """Resumes from a checkpoint, in this layout or another, and returns what was loaded; None for "auto" if there is none
        yet.

        All ranks call it, between two steps. It restores weights, masters, optimizer states, buffers, loss scale, position in
        the data and the number of steps done; rows of later steps are dropped from the metrics. path: a checkpoint; or a folder
        of several, or "auto" for the run's own folder, of which the newest intact one is loaded. origin: for "auto", the
        checkpoint at which the run began, if any (`Restored.origin` on rank 0).

        Raises RunError on all ranks alike, with nothing changed: `no-checkpoint`, `checkpoint-damaged`, `checkpoint-mismatch`
        for another model's or optimizer's; PlanError `resume-differs` for a run with other data, loss or seed.
        """
        self._settle()
        self.memory.require("loading a checkpoint", TO_RESTORE)
        found, steps = self._checkpoints.load(path, origin)
        if found is not None:
            self.loop.go_on(steps)
        self.outputs.rewind(self.num_steps_done)
        return found

    def before_layer(self, name: str, wait: Wait, is_due: IsDue | None = None) -> None:
        """Registers `wait`, which is called before every use of the weights of layer `name`, recomputation included, if
        `is_due` says so.
        """
        self._check_open()
        self.parts.waits.before_layer(name, wait, is_due)

    def stop(self) -> None:
        """Asks all ranks to stop after the step in progress. Safe in a signal handler; does nothing once the run is closed."""
        self.loop.stop()

    @property
    def counts(self) -> dict[str, dict[str, float]]:
        """Numbers counted by the run's parts on this rank (`protocols.Counts`, offload managers), by their name in the plan."""
        counts = counts_of(self.plan, self.stepper, self.parts.pool, self.memory)
        return counts | ({} if self.plan.checkpoint is None else {"checkpoint": dict(self._checkpoints.counts)})

    def close(self) -> None:
        """Ends threads, files and hooks, even if some of them fail to end. Leaves the world open. A second call does nothing.

        Layers are ordinary modules again, without patches, hooks or attributes of the run. A module with a sharded weight
        raises RunError `weights-sharded` when it is called; methods of the run raise `run-closed`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        feeds = (self.feed, self.evaluation.feed if self.evaluation else None)
        parts = [*self.outputs.writers, self.stepper, self.outputs.profiler, *feeds, self._checkpoints]
        with ExitStack() as stack:  # the last first
            for part in parts:
                if part is not None:
                    stack.callback(part.close)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed("run")

    def _settle(self) -> None:
        self._check_open()
        self.loop.settle()
        self.parts.weights.settle()

    def _check_free(self) -> None:
        """Raises StateError `step-failed` if exchanges of a failed step or evaluation may still use this run's memory."""
        stepper = self.stepper
        if self.world.size > 1 and (stepper.left_in_flight or stepper.executor.left_in_flight):
            what = "step" if stepper.left_in_flight else "evaluation"
            raise StateError(
                "step-failed",
                f"the last {what} failed, and its exchanges with other ranks may be at work on memory that is to leave",
                hint="take a step first, which ends them, or close the run",
            )
        self._checkpoints.secure()

    def _any_listens(self) -> bool:
        """Returns whether any rank has listeners, if that matters: all ranks must wait alike. All ranks call it."""
        if not self.parts.weights.come_late:
            return False
        control = self.groups["control"]
        return any(gather_objects(bool(self.listeners), control, what="who listens to steps"))

    def _tell(self, row: Row) -> None:
        """Passes a row to all readers and listeners, with settled weights if any of them may read those."""
        for reader in self.readers:
            reader(row)
        if self._looks or self.listeners or self._notify.is_heard("sley_step_finished"):
            self.parts.weights.settle()
        for listener in self.listeners:
            listener(row)
        self._notify("sley_step_finished", run=self, row=row)

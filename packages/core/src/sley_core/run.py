"""A run: what `assemble` returns, what the command line drives, and what a program of your own uses.

with assemble(plan, world) as run:
    run.train()                      # all steps of the plan
    row = run.step(batch)            # or one step, on your own samples
    loss = run.evaluate()            # held-out loss
    run.load_weights(state)          # other weights, between two steps
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from sley_core.data.cut import count_micros, parts
from sley_core.data.vocabulary import check_tokens
from sley_core.engine.not_finite import is_refused, refusal
from sley_core.equipment import rows_of
from sley_core.errors import KeyPath, RunError, UsageError, closed
from sley_core.metrics.parts import counts_of, held_bytes
from sley_core.notify import Notifier
from sley_core.plan.load import with_values

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.engine.execute import HostBatch
    from sley_core.engine.load import LoadedWeights, WeightLoader
    from sley_core.engine.parts import Parts
    from sley_core.engine.stepper import Stepper
    from sley_core.engine.totals import PendingTotals
    from sley_core.engine.waits import IsDue, Wait
    from sley_core.equipment import Facts, Outputs, Samples
    from sley_core.plan.plan import Plan
    from sley_core.protocols import SequenceAttention

Row = dict[str, float | int]
Outcome = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class _Launched:
    """A step whose totals are still on their way to the host."""

    number: int
    totals: PendingTotals
    lr: float
    tokens: int
    data_wait_s: float
    samples: tuple[int, ...]


class Run(AbstractContextManager["Run"]):
    """One rank's part of a run. All ranks call the same methods in the same order.

    parts: what plugins are attached to; `world`, `topology`, `groups`, `layers`, `book` and `store` are theirs. stepper: takes
    the steps. samples: what it trains on. outputs: what it writes. facts: what assembling found out, `notes` among it: what a
    user should know. listeners: called with each row, on every rank. num_steps_done: optimizer steps taken.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        stepper: Stepper,
        samples: Samples,
        outputs: Outputs,
        load_weights: WeightLoader,
        attention: SequenceAttention | None,
        facts: Facts,
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
        self.num_steps_done = 0
        self.was_stopped = False
        self._attention = attention
        self._load_weights = load_weights
        self._notify = Notifier(plan)
        self._watch = samples.watch
        self._stop_asked = False
        self._is_closed = False
        self._is_stepping = False
        self._clock = 0.0
        self._late: _Launched | None = None

    @property
    def rows(self) -> slice:
        """This rank's samples within the global batch; ranks of one `sp` group have the same ones, whole."""
        rows = rows_of(self.plan.batch.global_size, self.parts)
        return slice(rows.start, rows.stop)

    @property
    def resolved_plan(self) -> Plan:
        """The plan with what only the run could tell: the ranks of the world, how many samples an epoch has, ..."""
        found: dict[KeyPath, Any] = {**self.facts.found, ("parallel", "dp"): self.topology.dp}
        if self.feed is not None and self.feed.num_samples is not None:
            found["data", "samples_per_epoch"] = self.feed.num_samples
        return with_values(self.plan, found)

    def train(self) -> Outcome:
        """Steps until the plan's last step, or until somebody asked to stop; tells the plugins that listen.

        On CUDA a row is read while the next step runs. Raises RunError, on all ranks alike and with no weight changed by that
        step, `not-finite` when the loss or the gradient norm is no number, and `nothing-counts` for a batch without weight.
        """
        self._settle()
        outcome: Outcome = "failed"
        self._notify("sley_run_started", run=self)
        try:
            self._train()
            outcome = "interrupted" if self.was_stopped else "finished"
        finally:
            self._notify("sley_run_finished", run=self, outcome=outcome)
        return outcome

    def step(self, batch: HostBatch | None = None) -> Row:
        """One optimizer step; returns its row, the same on every rank.

        batch: this rank's samples, rows `run.rows` of the global batch, on the host: {field: tensor}; left out, the
        next ones of the plan's data. It may be larger or smaller than the plan's, by whole micro-batches, alike on all
        ranks; or a list of micro-batches, whose sequences may differ in length, the same on all stages. Raises RunError, and
        has changed nothing, for a batch that the data's declaration does not fit, and as `train` does.
        """
        self._settle()
        self._clock = time.perf_counter()
        return self._emit(self._launch(batch))

    def evaluate(self) -> float:
        """The mean loss on held-out data; changes nothing. Raises UsageError where the plan has no `[evaluation]`."""
        self._settle()
        if self.evaluation is None:
            raise UsageError("no-evaluation", "the plan has no [evaluation] table", hint="add one with `every = 100`")
        return self.evaluation()

    def load_weights(
        self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True
    ) -> LoadedWeights:
        """The model's weights are those of `state` from now on, exactly: {name in every layout: whole tensor}.

        All ranks call it, between two steps, with the same state; each takes what it holds of it, its shards too, masters
        of narrower weights included. A tied weight may stand under any of its names. Buffers are loaded where they are given.
        What the optimizer has gathered (its moments) stays. A mapping is checked before anything is written; pairs, of which
        only one tensor need be in memory, are written as they come. strict: names that are missing or unknown are refused;
        else they are returned. Raises RunError on all ranks alike: `weights-mismatch`, and `weights-differ` where ranks
        were given other values.
        """
        self._check_open()
        if self._is_stepping:
            raise RunError(
                "step-running", "weights are loaded in the middle of a step", hint="load them between two steps"
            )
        self._settle()
        found = self._load_weights(state, strict=strict)
        if self._watch is not None:
            self._watch.look()
        return found

    def before_layer(self, name: str, wait: Wait, is_due: IsDue | None = None) -> None:
        """`wait` is called before every use of the weights of layer `name`, recomputation included, where it `is_due`."""
        self._check_open()
        self.parts.waits.before_layer(name, wait, is_due)

    def stop(self) -> None:
        """Asks all ranks to stop after the step in progress; safe in a signal handler, and nothing once the run is closed."""
        self._stop_asked = True

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for parameters, their masters, gradients and optimizer states."""
        return held_bytes(self.stepper)

    @property
    def counts(self) -> dict[str, dict[str, float]]:
        """What the parts of this rank's run have counted, by the name in the plan: those that are `protocols.Counts`."""
        return counts_of(self.plan, self.stepper)

    def close(self) -> None:
        """Ends threads, files and hooks, each even if another fails to; the world stays for whoever joined it.

        Layers are ordinary modules again. After it, what would do something raises RunError `run-closed`, but for `close`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        feeds = (self.feed, self.evaluation.feed if self.evaluation else None)
        parts = [*self.outputs.writers, self.stepper, self.outputs.profiler, *feeds]
        with ExitStack() as stack:  # the last first
            for part in parts:
                if part is not None:
                    stack.callback(part.close)
            if self._attention is not None:
                stack.callback(self._attention.detach)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed("run")

    def _train(self) -> None:
        self._clock = time.perf_counter()
        while self.num_steps_done < self.plan.run.steps and not self.was_stopped:
            before, self._late = self._late, self._launch(None)
            if before is not None:
                self._emit(before)
            if self._evaluates_after(self._late) or not self.world.device.is_async:
                self._emit_late()
        self._emit_late()

    def _emit_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._emit(late)

    def _settle(self) -> None:
        """Raises RunError for a closed run; tells of a step that was under way when the one before it was refused.

        A program that catches the error of a step comes here. The step after it was taken from the same weights, so it is the
        next one, and has its number.
        """
        self._check_open()
        if self._late is not None and not self._is_stepping:
            self._late = replace(self._late, number=self.num_steps_done)
            self._emit_late()

    def _launch(self, batch: HostBatch | None) -> _Launched:
        wait_s = 0.0
        samples: tuple[int, ...] = ()
        if batch is None:
            assert self.feed is not None, "a fake world takes no steps"
            batch = self.feed.next()
            wait_s, samples = self.feed.wait_s, self.feed.samples
        else:
            for part in parts(batch):
                check_tokens(part, self.dataset.info)
        slices, profiler, timeline = self.samples.slices, self.outputs.profiler, self.outputs.timeline
        num_micros = count_micros(batch, slices.fields, self.plan.batch.micro_size)
        number = self.num_steps_done + 1
        if profiler is not None:
            profiler.before_step(number)
        if timeline is not None:
            timeline.before_step(number, num_micros)
        with self.world.device.random_state_kept(), self._stepping():
            own = slices(batch) if isinstance(batch, Mapping) else [slices(part) for part in batch]
            totals = self.stepper.step(self.num_steps_done, own, num_micros, stop=self._stop_asked, whole=batch)
        if self._watch is not None and self.num_steps_done == 0:
            self._watch.check()
            self._watch = None  # its copies of buffers are free
        if profiler is not None:
            profiler.after_step(number)
        if timeline is not None:
            timeline.after_step()
        self.num_steps_done = number
        tokens = sum(self.samples.meter.num_tokens(part) for part in parts(batch)) * self.topology.dp
        return _Launched(number, totals, self.stepper.update.lr, tokens, wait_s, samples)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _emit(self, launched: _Launched) -> Row:
        result = launched.totals.read()
        if self.outputs.timeline is not None:
            self.outputs.timeline.write(launched.number)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if is_refused(result):
            self.num_steps_done -= (
                1  # nothing was changed: a program that goes on takes this step with the next samples
            )
            is_latest = self.num_steps_done + 1 == launched.number
            raise refusal(self.parts, launched.number, result, launched.totals, launched.samples, is_latest=is_latest)
        self.was_stopped = result.wants_stop
        row: Row = {"step": launched.number, "loss": result.loss, "grad_norm": result.grad_norm, "lr": launched.lr}
        if result.loss_scale is not None:
            row |= {"loss_scale": result.loss_scale, "skipped": int(result.skipped)}
        row |= self.samples.meter.measure(launched.tokens, seconds, launched.data_wait_s)
        if self._evaluates_after(launched):
            assert self.evaluation is not None
            row["held_out_loss"] = self.evaluation()
            self._clock = time.perf_counter()
        for writer in self.outputs.writers:
            writer.write(row)
        for listener in self.listeners:
            listener(row)
        self._notify("sley_step_finished", run=self, row=row)
        return row

    def _evaluates_after(self, launched: _Launched) -> bool:
        if self.evaluation is None or self.plan.evaluation is None:
            return False
        return launched.number % self.plan.evaluation.every == 0 or launched.number == self.plan.run.steps

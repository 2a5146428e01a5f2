"""Runs one optimizer step, from this rank's samples to updated weights.

begin ──> forward and backward actions ──> handlers finish ──> norm, clip, optimizer ──> weights_updated
               gradients become ready ^
               and handlers reduce them
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sley_core.actions.action import Lowered, select_actions
from sley_core.comm.progress import BETWEEN, EVALUATION, REDUCTION, UPDATE
from sley_core.engine import replicas
from sley_core.engine.agreement import Agreement, collect_exchanges, exchange_difference, exchange_mismatch_error
from sley_core.engine.parts import Parts, StepState
from sley_core.engine.registry import Param
from sley_core.engine.step_batch import BatchWeight, StepBatch
from sley_core.engine.totals import StepTotals, Votes
from sley_core.errors import RunError, run_closed_error
from sley_core.model.attention import attention_kernel
from sley_core.protocols import GradientHandler
from sley_trainer.evaluation import Metrics, Tally
from sley_trainer.execute import Executor, ListRun
from sley_trainer.stage import ActionLists
from sley_trainer.update import Update

NO_VOTES = Votes()
NO_METRICS = Metrics()


@dataclass(eq=False)
class Stepper:
    """Runs optimizer steps and forward-only passes. `handlers` are called in the plan's order, so that their collectives have
    the same order on all ranks.

    undo: detaches everything from the model, in reverse order, when the stepper is closed. compare: compares the replicas of
    weights and buffers, before the first step and then every `COMPARE_EVERY` steps; None to skip this. attention: the name of
    the kernel for attention. left_in_flight: whether a step failed before its handlers were done, so that their exchanges may
    be in flight until the next step.
    """

    parts: Parts
    executor: Executor
    lists: ActionLists
    handlers: Sequence[GradientHandler]
    update: Update
    undo: ExitStack
    compare: Callable[[], None] | None
    attention: str
    left_in_flight: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        parts = self.parts
        self.store, self.groups, self.device, self.events = parts.store, parts.groups, parts.world.device, parts.events
        self.state: StepState = self.store.state
        self.agreement = Agreement(self.groups, self.store)
        self._num_agreed = 0
        if self.handlers:
            self.store.on_ready.append(self._gradient_ready)
            self.store.on_chunk_done.append(self._chunk_done)

    def step(
        self, step: int, batch: StepBatch, *, votes: Votes = NO_VOTES, outputs: dict[int, Any] | None = None
    ) -> StepTotals:
        """Trains on `batch`: forward, backward, reduction, update. All ranks must call it. On CUDA it returns before the device
        is done, and `read` of the result waits. A call after a failed one starts from a clean state.

        step: the number of the step, from 0. votes: this rank's votes. outputs: receives a copy of the model's output of each
        microbatch, on ranks with the last layer.
        """
        if self.is_closed:
            raise run_closed_error("stepper")
        with self.device.in_use(), attention_kernel(self.attention):
            loss = self._run(step, batch, outputs)
            self.state.step_progress.begin_entry(REDUCTION)
            for handler in self.handlers:
                handler.finish_step(self.state)
            self.left_in_flight = False
            self.state.step_progress.begin_entry(UPDATE)
            for event in self.events.gradients_done:
                event()
            if (skips := self.update.skips) is not None:
                skips.settle()
            # All ranks know the global weight, so only one of them adds it.
            totals = self.update.step(step, loss, self.agreement.weight if self.groups["all"].coord == 0 else 0.0, votes)
            totals.fetch()
            self.state.was_taken = self.update.was_taken
            if skips is not None:
                skips.record(totals)
                if self.device.is_async and self.update.was_taken:  # the host does not know yet
                    self.state.was_taken = lambda: not totals.read().is_skippable
            for event in self.events.after_update:
                event()
            for handler in self.handlers:
                handler.weights_updated(self.state)
            self.state.step_progress.begin_entry(BETWEEN)
            return totals

    def _run(self, step: int, batch: StepBatch, outputs: dict[int, Any] | None) -> Tensor:
        """Runs all forwards and backwards of the step. Returns the sum of the loss over this rank's samples."""
        num_microbatches = batch.num_microbatches
        steps = self.lists.training(num_microbatches)
        self.state.begin(step, select_actions(steps), num_microbatches, self.groups["dp"].coord * num_microbatches)
        self.left_in_flight = True
        self.store.begin_step()
        for event in self.events.began:
            event()
        for group in self.groups.values():
            group.log.clear()
        self.agreement.begin(f"step {step + 1}", batch, self.store.refusal)
        compare = self.compare if self._num_agreed % replicas.COMPARE_EVERY == 0 else None
        # No rank waits for another one in its first action.
        can_defer_check = all(self.groups[axis].size == 1 for axis in ("model", "sp"))
        if can_defer_check and compare is None:
            self.state.after_first = self.agreement.check
        else:
            self.agreement.check()
        self._num_agreed += 1
        if compare is not None:
            compare()
        for handler in self.handlers:
            handler.begin_step(self.state)
        if self.executor.sources is not None:
            self.executor.sources.begin(batch)
        weight = None  # only ranks with the loss know the divisor of gradients
        if self.executor.has_loss:
            weight = BatchWeight(self._global_weight, self.update.scale.value if self.update.scale else 1.0)
        return self.executor.run(steps, self.state, ListRun(batch.micros, self.store, weight, outputs))

    def _global_weight(self) -> float:
        """Waits for the sum of all ranks' loss weights, which the agreement exchanges, and returns it."""
        self.agreement.check()
        return self.agreement.weight

    def measure(self, batches: Iterable[StepBatch], metrics: Metrics = NO_METRICS) -> dict[str, float]:
        """Returns the mean loss over all `batches` as "loss", and the means of `metrics` by name; NaN for a count of 0. All
        ranks must call it with equally many batches. Raises RunError "not-finite", "nothing-counts" or "metric-result".
        """
        with self._evaluation_mode() as state:
            weight, losses, tally = 0.0, [], Tally(metrics)
            for group in self.groups.values():
                group.log.clear()
            for index, batch in enumerate(batches):
                steps = self._begin_forward("an evaluation", index, batch, state)
                counts = tally if metrics.names or metrics.custom is not None else None
                run = ListRun(batch.micros, tally=counts, num_counted=batch.num_counted)
                losses.append(self.executor.run(steps, state, run))
                weight += self.agreement.weight  # of all ranks
            names = tally.agree_names(self.groups["control"])
            sums = [losses, *(tally.sums_by_batch(name, index) for name in names for index in (0, 1))]
            difference = torch.tensor([exchange_difference(self.groups.values())], dtype=torch.float64)
            totals = torch.cat([self.device.move(difference), *map(self.store.reduction.loss_terms, sums)])
            # All ranks evaluate after the same steps and on the same number of batches; stages without the loss add nothing.
            self.groups["all"].all_reduce(totals, label="the mean loss").wait()
            totals = totals.cpu()
            ranks_differ = bool(totals[0])
            loss, *values = (self.store.reduction.loss_of(part, len(losses)) for part in totals[1:].chunk(len(sums)))
            state.step_progress.begin_entry(BETWEEN)
        if ranks_differ:
            raise exchange_mismatch_error("an evaluation", collect_exchanges(self.groups.values()), self.groups["control"])
        if not weight:
            message = "the loss weight of the evaluated samples is 0, so their mean loss is undefined"
            raise RunError("nothing-counts", message, hint="check the data: all of its labels are ignored")
        mean = loss / weight
        if not math.isfinite(mean):
            hint = "check whether training diverged, or whether the data contains NaN or infinite values"
            raise RunError("not-finite", f"the loss of the evaluated samples is {mean}", hint=hint)
        pairs = zip(values[::2], values[1::2], strict=True)
        means = (total / count if count else math.nan for total, count in pairs)
        return {"loss": mean, **dict(zip(names, means, strict=True))}

    def outputs(self, batch: StepBatch) -> dict[int, Any]:
        """Returns {microbatch: the model's output}; empty on ranks without the last layer. All ranks must call it."""
        with self._evaluation_mode() as state:
            steps = self._begin_forward("a prediction", 0, batch, state)
            outputs: dict[int, Any] = {}
            self.executor.run(steps, state, ListRun(batch.micros, outputs=outputs))
            state.step_progress.begin_entry(BETWEEN)
        return outputs

    @contextmanager
    def _evaluation_mode(self) -> Iterator[StepState]:
        """Yields the state of an evaluation. Within the block all modules are in evaluation mode, and autograd
        records nothing.
        """
        modules = [layer.module for layers in self.executor.chunks for layer in layers]
        all_modules = [submodule for module in modules for submodule in module.modules()]
        training = [module.training for module in all_modules]
        for module in modules:
            module.eval()
        try:
            with self.device.in_use(), attention_kernel(self.attention), self.device.preserve_random_state(), torch.no_grad():
                step_progress = self.groups.progress.step_progress
                state = StepState(within=step_progress)
                step_progress.begin_entry(EVALUATION)
                yield state
        finally:
            # Restore the mode of each module: a program may keep some modules in evaluation mode.
            for module, was_training in zip(all_modules, training, strict=True):
                module.training = was_training

    def _begin_forward(self, label: str, index: int, batch: StepBatch, state: StepState) -> Lowered:
        """Begins the forward of batch `index`, and returns its list of actions."""
        # This checks that all ranks evaluate equal models, and that stages and slices have the same samples.
        self.agreement.begin(label, batch).check()
        steps = self.lists.evaluation(batch.num_microbatches)
        first_micro = self.groups["dp"].coord * batch.num_microbatches
        state.begin(index, select_actions(steps), batch.num_microbatches, first_micro)
        return steps

    def close(self) -> None:
        """Detaches all parts from the model, even if one of them fails to detach. No step may follow."""
        self.is_closed = True
        self.undo.close()

    def _gradient_ready(self, param: Param) -> None:
        for handler in self.handlers:
            handler.gradient_ready(param, self.state)

    def _chunk_done(self, chunk: int) -> None:
        for handler in self.handlers:
            handler.chunk_done(chunk, self.state)

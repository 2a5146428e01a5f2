"""One optimizer step, from this rank's samples to updated weights.

begin ──> forward and backward actions ──> handlers finish ──> norm, clip, optimizer ──> weights_updated
               gradients become ready ^
               and handlers reduce them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sley_core.actions.action import actions_of
from sley_core.comm.progress import BETWEEN, REDUCTION, UPDATE
from sley_core.engine.agreement import Agreement
from sley_core.engine.loss_weight import BatchWeight
from sley_core.engine.not_finite import is_no_number
from sley_core.engine.step_events import StepEvents, call
from sley_core.engine.totals import PendingTotals, Votes
from sley_core.errors import closed

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.comm.groups import Groups
    from sley_core.engine.book import Entry
    from sley_core.engine.clock import ActionClock
    from sley_core.engine.execute import Executor
    from sley_core.engine.lists import Lists
    from sley_core.engine.step_batch import StepBatch
    from sley_core.engine.step_state import StepState
    from sley_core.engine.store import GradientStore
    from sley_core.engine.update import Update
    from sley_core.protocols import GradientHandler


NO_VOTES = Votes()

STARTING_STEPS = 2
"""In the first steps the agreement is not deferred: handlers may communicate in `begin_step`, to agree on an order that the
first step showed.
"""


class Stepper:
    """Takes steps. `handlers` are called in the plan's order, so that their collectives have the same order on all ranks.

    undo: closed with the stepper; detaches handlers and everything else from the model, in reverse order. compare_first:
    compares all ranks' first values before the first step. events: what else is called in a step.

    left_in_flight: whether a step failed before handlers were done, so that their exchanges may still be in flight until the
    next one.
    """

    def __init__(
        self,
        executor: Executor,
        lists: Lists,
        store: GradientStore,
        handlers: Sequence[GradientHandler],
        update: Update,
        groups: Groups,
        device: Device,
        undo: ExitStack,
        compare_first: Callable[[], None] | None = None,
        events: StepEvents | None = None,
    ) -> None:
        self.executor = executor
        self.lists = lists
        self.store = store
        self.handlers = handlers
        self.update = update
        self.groups = groups
        self.device = device
        self.events = events or StepEvents()
        self.left_in_flight = False
        self.state: StepState = store.state
        self._undo = undo
        self.is_closed = False
        self.agreement = Agreement(groups, store, compare_first)
        self._num_begun = 0
        if handlers:
            store.on_ready.append(self._gradient_ready)
            store.on_chunk_done.append(self._chunk_done)

    def step(
        self, step: int, batch: StepBatch, *, votes: Votes = NO_VOTES, clock: ActionClock | None = None
    ) -> PendingTotals:
        """Trains on `batch`: forward, backward, reduction, update. All ranks call it, and it communicates.

        step: counts from 0. votes: this rank's, for what comes after the step. clock: records when actions run. On CUDA it
        returns before the device is done; `read` of the result waits. After an exception the next call starts clean.
        """
        if self.is_closed:
            raise closed("stepper")
        with self.device.in_use():
            return self._step(step, batch, votes, clock)

    def _step(self, step: int, batch: StepBatch, votes: Votes, clock: ActionClock | None) -> PendingTotals:
        """Takes the step, as `step` describes: begins it in state, store and handlers, executes the list, finishes the
        reductions, and updates.
        """
        num_micros = batch.num_micros
        steps = self.lists.training(num_micros)
        self.state.begin(step, actions_of(steps), num_micros, first_micro=self.groups["dp"].coord * num_micros)
        self.left_in_flight = True
        self.store.begin_step()
        call(self.events.began)
        for group in self.groups.values():
            group.log.clear()
        weight = self._weight(batch)
        self.agreement.begin(f"step {step + 1}", batch, self.store.changed)
        self._num_begun += 1
        if self.agreement.may_wait and self._num_begun > STARTING_STEPS:
            self.state.after_first = self.agreement.check
        else:
            self.agreement.check()
        for handler in self.handlers:
            handler.begin_step(self.state)
        loss = self.executor.train(steps, batch.micros, self.state, self.store, weight, clock)
        self.state.standing.comes(REDUCTION)
        for handler in self.handlers:
            handler.finish_step(self.state)
        self.left_in_flight = False
        self.state.standing.comes(UPDATE)
        call(self.events.gradients_done)
        if (skips := self.update.skips) is not None:
            skips.settle()
        weight_here = batch.weight
        if self.store.canonical is not None:  # all ranks know the global weight already, so one rank adds it
            weight_here = self.agreement.weight if self.groups["all"].coord == 0 else 0.0
        totals = self.update.step(step, loss, weight_here, votes)
        pending = PendingTotals(totals, self.device)
        self.state.was_taken = self.update.was_taken
        if skips is not None:
            skips.follow(pending)
            if self.device.is_async and self.update.was_taken:  # the host does not know yet
                self.state.taken_if(lambda: not is_no_number(pending.read()))
        call(self.events.after_update)
        for handler in self.handlers:
            handler.weights_updated(self.state)
        self.state.standing.comes(BETWEEN)
        return pending

    def _weight(self, batch: StepBatch) -> BatchWeight | None:
        """Returns the loss weight of the global batch on ranks with the loss; None on others, which do not need it."""
        if not self.executor.has_loss:
            return None
        scale = self.update.scale.value if self.update.scale else 1.0
        return BatchWeight(self._global_weight, scale)

    def _global_weight(self) -> float:
        """Waits for the sum of all ranks' weights, which is part of the agreement's exchange, and returns it."""
        self.agreement.check()
        return self.agreement.weight

    def close(self) -> None:
        """Detaches everything from the model, once; continues if one part fails to detach. No step may follow."""
        self.is_closed = True
        self._undo.close()

    def _gradient_ready(self, entry: Entry) -> None:
        for handler in self.handlers:
            handler.gradient_ready(entry, self.state)

    def _chunk_done(self, chunk: int) -> None:
        for handler in self.handlers:
            handler.chunk_done(chunk, self.state)

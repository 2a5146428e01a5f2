"""One optimizer step, from this rank's samples to updated weights.

begin ──> forward and backward actions ──> handlers finish ──> norm, clip, optimizer ──> weights_updated
               gradients become ready ^
               and handlers reduce them
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from sley_core.actions.action import Action, actions_of, sequential
from sley_core.actions.lower import lower
from sley_core.actions.placement import Placement
from sley_core.engine.totals import PendingTotals
from sley_core.engine.weight import BatchWeight

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.comm.groups import Groups
    from sley_core.engine.book import Entry
    from sley_core.engine.execute import Executor, HostBatch
    from sley_core.engine.step_state import StepState
    from sley_core.engine.store import GradientStore
    from sley_core.engine.update import Update
    from sley_core.protocols import GradientHandler


class Stepper:
    """Takes steps. `handlers` are called in the plan's order, which is the order of their collectives."""

    def __init__(
        self,
        executor: Executor,
        store: GradientStore,
        handlers: Sequence[GradientHandler],
        update: Update,
        groups: Groups,
        device: Device,
    ) -> None:
        self.executor = executor
        self.store = store
        self.handlers = handlers
        self.update = update
        self.groups = groups
        self.device = device
        self.state: StepState = store.state
        store.on_ready.append(self._gradient_ready)
        store.on_chunk_done.append(self._chunk_done)

    def step(self, step: int, batch: HostBatch, num_micros: int, *, stop: bool = False) -> PendingTotals:
        """Trains on `batch`, this rank's samples on the host, as `num_micros` micro-batches of one size.

        step: counts from 0. stop: this rank's vote to stop after the step. After an exception the next call starts
        clean.
        """
        actions = training_actions(num_micros)
        self.state.begin(step, actions, num_micros, first_micro=self.groups["dp"].coord * num_micros)
        self.store.begin_step()
        for handler in self.handlers:
            handler.begin_step(self.state)
        # The stage's ranks hold all samples of the global batch between them.
        weight = BatchWeight(self.executor.loss.weight(batch), self.groups["stage"], self.device)
        loss = self.executor.train(actions, batch, self.state, self.store, weight)
        for handler in self.handlers:
            handler.finish_step(self.state)
        totals = self.update.step(step, loss, stop)
        for handler in self.handlers:
            handler.weights_updated(self.state)
        return PendingTotals(totals, weight.total, self.device)

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.detach()
        self.store.close()

    def _gradient_ready(self, entry: Entry) -> None:
        for handler in self.handlers:
            handler.gradient_ready(entry, self.state)

    def _chunk_done(self, chunk: int) -> None:
        for handler in self.handlers:
            handler.chunk_done(chunk, self.state)


@lru_cache(maxsize=64)
def training_actions(num_micros: int) -> tuple[Action, ...]:
    """The lowered list of a rank without a pipeline."""
    (steps,) = lower([sequential(num_micros)], Placement(stages=1), num_micros)
    return actions_of(steps)

"""The loss on held-out samples: forward only, in the same process, with no gradient allocated and nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sley_core.actions.action import actions_of, forward_only, sequential
from sley_core.actions.lower import lower
from sley_core.actions.placement import Placement
from sley_core.comm.collectives import all_reduce
from sley_core.engine.step_state import StepState
from sley_core.engine.weight import BatchWeight

if TYPE_CHECKING:
    from torch import nn

    from sley_core.comm.device import Device
    from sley_core.comm.groups import Groups
    from sley_core.data.feed import Feed
    from sley_core.engine.execute import Executor


class Evaluation:
    """Measures `executor`'s model on the first `num_batches` global batches of `feed`, the same ones each time."""

    def __init__(
        self,
        executor: Executor,
        modules: Sequence[nn.Module],
        feed: Feed,
        groups: Groups,
        device: Device,
        *,
        num_batches: int,
        num_micros: int,
    ) -> None:
        self.executor = executor
        self.modules = modules
        self.feed = feed
        self.groups = groups
        self.device = device
        self.num_batches = num_batches
        self.num_micros = num_micros
        lists = [forward_only(sequential(num_micros))]
        (steps,) = lower(lists, Placement(stages=1), num_micros, training=False)
        self._actions = actions_of(steps)

    def __call__(self) -> float:
        """The mean loss over all held-out samples seen; a collective over all ranks."""
        training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        try:
            return self._measure()
        finally:
            for module, was in zip(self.modules, training, strict=True):
                module.train(was)

    def _measure(self) -> float:
        self.feed.restore({"samples": 0})
        state = StepState()
        loss = weight = 0.0
        for number in range(self.num_batches):
            batch = self.feed.next()
            state.begin(number, self._actions, self.num_micros, first_micro=self.groups["dp"].coord * self.num_micros)
            total = self.executor.evaluate(self._actions, batch, state)
            # All ranks evaluate after the same steps, and as many batches.
            local = BatchWeight(self.executor.loss.weight(batch), self.groups["stage"], self.device)
            all_reduce(total, self.groups["all"], what="the held-out loss").wait()
            loss += float(total)
            weight += float(local.total)
        self.feed.close()
        return loss / weight if weight else 0.0

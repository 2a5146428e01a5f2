"""Measures the loss on held-out samples: forward only, in the same process; allocates no gradient and changes no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sley_core.actions.action import actions_of
from sley_core.comm.collectives import all_reduce
from sley_core.comm.compare import differing, exchanges_differ, exchanges_of
from sley_core.comm.progress import BETWEEN, EVALUATION
from sley_core.engine.canonical.losses import spread, tree_sum
from sley_core.engine.step_state import StepState
from sley_core.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from sley_core.comm.device import Device
    from sley_core.comm.groups import Groups
    from sley_core.data.feed import Feed
    from sley_core.engine.agreement import Agreement
    from sley_core.engine.execute import Executor
    from sley_core.engine.lists import Lists
    from sley_core.engine.step_batch import BatchSplitter


class Evaluation:
    """Measures the mean loss of `executor`'s model on the first `num_batches` global batches of `feed`, the same ones each
    time.
    """

    def __init__(
        self,
        executor: Executor,
        lists: Lists,
        modules: Sequence[nn.Module],
        feed: Feed,
        splitter: BatchSplitter,
        groups: Groups,
        device: Device,
        agreement: Agreement,
        *,
        num_batches: int,
        num_micros: int,
    ) -> None:
        self.executor = executor
        self.steps = lists.evaluation(num_micros)
        self.modules = modules
        self.feed = feed
        self.splitter = splitter
        self.groups = groups
        self.device = device
        self.agreement = agreement
        self.num_batches = num_batches
        self.num_micros = num_micros

    def __call__(self) -> float:
        """Returns the mean loss over the held-out samples. All ranks call it, and it communicates.

        Raises RunError, on all ranks alike: "not-finite" if it is not finite, "nothing-counts" if no label counts.
        """
        every = [part for module in self.modules for part in module.modules()]
        training = [part.training for part in every]
        for module in self.modules:
            module.eval()
        try:
            with self.device.random_state_kept():
                return self._measure()
        finally:
            # Each module gets its own former mode: a program may keep some in evaluation mode.
            for part, was in zip(every, training, strict=True):
                part.training = was

    def _measure(self) -> float:
        """Runs the batches, and sums losses, weights and exchange checks over all ranks at the end; returns the mean loss."""
        self.feed.restore({"samples": 0})
        standing = self.groups.progress.standing
        state = StepState(within=standing)
        standing.comes(EVALUATION)
        totals = torch.zeros(2, dtype=torch.float64)
        terms: list[torch.Tensor] = []
        for group in self.groups.values():
            group.log.clear()
        for number in range(self.num_batches):
            batch = self.splitter.fed(self.feed.next())
            # All ranks evaluate, on models that are alike, and stages and slices have the same samples.
            self.agreement.begin("an evaluation", batch).check()
            first_micro = self.groups["dp"].coord * self.num_micros
            state.begin(number, actions_of(self.steps), self.num_micros, first_micro)
            loss = self.executor.evaluate(self.steps, batch.micros, state)
            if loss.ndim:
                terms.append(spread(loss, first_micro, self.groups["dp"].size * self.num_micros))
                # All ranks know the weight of the global batch already, so one rank adds it.
                totals[1] += self.agreement.weight if self.groups["all"].coord == 0 else 0.0
            else:
                totals += torch.tensor([float(loss), batch.weight], dtype=torch.float64)
        self.feed.close()
        differs = torch.tensor([exchanges_differ(self.groups.values())], dtype=torch.float64)
        totals = torch.cat([self.device.move(torch.cat([totals, differs])), *terms])
        # All ranks evaluate after the same steps, and as many batches; stages without the loss add nothing.
        all_reduce(totals, self.groups["all"], what="the held-out loss").wait()
        loss_sum, weight_sum, ranks_differ = totals[:3].tolist()
        standing.comes(BETWEEN)
        for losses in torch.chunk(totals[3:], len(terms)) if terms else ():
            loss_sum += float(tree_sum(losses))
        if ranks_differ:
            raise differing("an evaluation", exchanges_of(self.groups.values()), self.groups["control"])
        if not weight_sum:
            hint = "look at the held-out data: all of its labels are ignored"
            raise RunError(
                "nothing-counts", "the held-out samples have a loss weight of 0, so there is no mean", hint=hint
            )
        mean: float = loss_sum / weight_sum
        if not math.isfinite(mean):
            hint = "the weights may have grown too large for this data, or the data itself holds what is no number"
            raise RunError("not-finite", f"the held-out loss is {mean}", hint=hint)
        return mean

"""One layout's step at a glance: the least it takes, what a simulation of its lists says, and what its stages hold."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sley_core.actions.costs import Costs
from sley_core.actions.peaks import peaks_of
from sley_core.draft import DTYPES, dtypes
from sley_core.errors import PlanError
from sley_core.estimate.seconds.links import NOTHING, Cost, collective, message
from sley_core.estimate.seconds.result import simulate_step
from sley_core.estimate.seconds.step import GradientExchange, StepWork
from sley_core.estimate.seconds_of_plan import TOTALS_BYTES
from sley_core.plan.check import MOST_FORWARDS
from sley_core.search.glance import leaves_shards, reduces
from sley_core.search.layer_table import once
from sley_core.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sley_core.protocols import Collective
    from sley_core.search.layer_table import LayerTable
    from sley_core.search.layouts import Candidate
    from sley_core.search.quick import Quick, StageCut

MOST_LAYERS_WHOLE = 2
"""How many layers have whole weights at once where weights are sharded: one that computes, and the one after it."""


class QuickStep:
    """Raises PlanError "schedule-too-long" for a step of more micro-batches than any plan may have."""

    def __init__(self, quick: Quick, layout: Candidate, cut: StageCut, table: LayerTable) -> None:
        self.quick = quick
        self.layout = layout
        self.cut = cut
        self.table = table
        sizes = layout.shape.sizes
        self.topology = Topology(quick.world, sizes.pp, sizes.sp, sizes.wp)
        self.micros = sizes.micros(quick.plan, quick.world)
        if self.micros * cut.placement.num_positions > MOST_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")
        held, owned = quick.held_elements(layout.shape, every=leaves_shards(layout.reducer))
        self.held, self.owned = self._by_stage(held), self._by_stage(owned)

    def least_s(self) -> float:
        """Returns the seconds that the fullest stage computes, from the arrival of its first micro-batch to the return of its
        last gradient to the first stage.
        """
        forward, back = self._by_position(self.table.forward), self._by_position(self.table.least_back)
        through = np.minimum(self.table.backward, self.table.input_gradient)
        before = np.concatenate(([0.0], np.cumsum(forward + self._by_position(through))[:-1]))
        busy, first = np.zeros(self.topology.pp), np.full(self.topology.pp, np.inf)
        np.add.at(busy, self.cut.owners, (forward + back) * self.micros)
        np.minimum.at(first, self.cut.owners, before)
        return float((busy + first + self._update_s()).max()) + self.quick.machine.device.step_s

    def seconds(self) -> float:
        """Returns the simulated seconds of the step. Of many micro-batches a few are simulated: each further adds the same."""
        few = 2 * self.topology.pp
        if self.micros <= 2 * few:
            return self._simulated(self.micros)
        some, more = self._simulated(few), self._simulated(2 * few)
        return more + (more - some) / few * (self.micros - 2 * few)

    @cached_property
    def stage_bytes(self) -> list[int]:
        """Returns the bytes of each stage: weights, gradients, states, and what waits for backwards."""
        states = self.held * self.quick.weight_bytes + self.owned * self.quick.state_bytes
        return [int(count) for count in states + self._gathered_bytes() + np.array(self._waiting_bytes())]

    def _waiting_bytes(self) -> list[int]:
        """Returns the most bytes that wait for backwards on each stage at once."""
        kept = tuple(int(count) for count in self._by_position(self.table.kept))
        handed = tuple(int(self.table.output[last - 1]) for last in self.cut.bounds[1:-1])
        costs = Costs({}, (0.0,) * len(handed), kept, tuple(size // 2 for size in kept), handed)
        few = min(self.micros, 2 * self.topology.pp)  # with more, no stage holds more at once

        def held() -> list[int]:
            lists = self.cut.lists.of_all_stages(few)
            return [peaks_of(entries, at, self.cut.placement, costs).num_bytes for at, entries in enumerate(lists)]

        return once(self.quick.peaks, (id(self.cut), few, kept), held)

    def _gathered_bytes(self) -> np.ndarray:
        """Returns the bytes of whole weights, and of whole gradients, that each stage has for a while."""
        shape, plan = self.layout.shape, self.quick.plan
        if shape.weights is None:
            return np.zeros(self.topology.pp)
        cut = self.quick.tables.cut(shape)
        working, gradient = dtypes(plan)[0].itemsize, DTYPES[plan.precision.gradients].itemsize
        largest = np.maximum.reduceat(cut, np.array(self.cut.bounds[:-1]))
        most = np.zeros(self.topology.pp)
        np.maximum.at(most, self.cut.owners, MOST_LAYERS_WHOLE * largest)
        whole = self._by_stage(cut) if reduces(shape.weights) == "step" else most
        return np.asarray(most * working + whole * gradient)

    def _simulated(self, micros: int) -> float:
        machine, parts = self.quick.machine, list(pairwise(self.cut.bounds))
        update_s = self._update_s()
        work = StepWork(
            parts=[[self.table.seconds(at) for at in range(first, last)] for first, last in parts],
            messages=[self._message(position) for position in range(len(parts) - 1)],
            gradients={number: list(self._exchanges(number)) for number in range(self.topology.pp)},
            update_s={number: float(seconds) for number, seconds in enumerate(update_s)},
            together=collective("sum", TOTALS_BYTES, range(self.topology.world), machine.links),
            after_s=machine.device.step_s,
        )
        return simulate_step(self.cut.lists.of_all_stages(micros), self.cut.placement, work).seconds

    def _update_s(self) -> np.ndarray:
        """Returns the seconds of each stage's norm and update, which move their bytes once."""
        gradient = DTYPES[self.quick.plan.precision.gradients].itemsize
        moved = self.held * gradient + self.owned * (gradient + 2 * self.quick.state_bytes)
        return np.asarray(moved / self.quick.machine.device.memory_bandwidth)

    def _message(self, position: int) -> Cost:
        """Returns the cost of what position `position` of the model hands to the next one."""
        sender, receiver = self.cut.owners[position], self.cut.owners[position + 1]
        if sender == receiver:
            return NOTHING
        size = self.topology.ranks_per_stage
        num_bytes = int(self.table.output[self.cut.bounds[position + 1] - 1])
        return message(num_bytes, sender * size, receiver * size, self.quick.machine.links)

    def _exchanges(self, stage: int) -> Iterator[GradientExchange]:
        """Yields, for each layer of a stage from the last on, a sum, or a reduction and a gather; where gradients of shards are
        reduced once a step, that comes before.
        """
        shape, plan = self.layout.shape, self.quick.plan
        numel, cut = self.quick.tables.numel, self.quick.tables.cut(shape)
        gradient, working = DTYPES[plan.precision.gradients].itemsize, dtypes(plan)[0].itemsize
        kind: Collective = "reduce" if leaves_shards(self.layout.reducer) else "sum"
        first_rank = stage * self.topology.ranks_per_stage
        for chunk, (first, last) in enumerate(self.parts(stage)):
            for at in reversed(range(first, last)):
                uses = ((chunk, at - first),)
                shards, whole = -(-int(cut[at]) // self.topology.wp), int(numel[at] - cut[at])
                if reduces(shape.weights) == "step":
                    cost = self._cost("reduce", "wp", int(cut[at]) * gradient, first_rank)
                    yield GradientExchange(cost, "ready", uses, lane="reduce wp")
                yield GradientExchange(self._both(kind, shards, whole, gradient, first_rank), "ready", uses)
                if kind == "reduce":
                    back = self._both("gather", shards, whole, working, first_rank)
                    yield GradientExchange(back, "updated", uses, lane="weights")

    def _both(self, kind: Collective, shards: int, whole: int, itemsize: int, rank: int) -> Cost:
        """Returns the cost of an exchange of a layer's shards between replicas, and one of its other weights in the stage."""
        one = self._cost(kind, "wdp", shards * itemsize, rank)
        other = self._cost(kind, "stage", whole * itemsize, rank)
        return Cost(one.latency_s + other.latency_s, one.work_s + other.work_s)

    def _cost(self, kind: Collective, axis: str, num_bytes: int, rank: int) -> Cost:
        if not num_bytes:
            return NOTHING
        return collective(kind, num_bytes, self.topology.ranks_of(axis, rank), self.quick.machine.links)

    def parts(self, stage: int) -> list[tuple[int, int]]:
        """Returns the first layer of each chunk of a stage, and the one behind its last."""
        bounds = list(pairwise(self.cut.bounds))
        return [bounds[self.cut.placement.position(stage, chunk)] for chunk in range(self.cut.placement.chunks)]

    def _by_position(self, values: np.ndarray) -> np.ndarray:
        """Returns the sums of layers' values over each position."""
        return np.add.reduceat(values, np.array(self.cut.bounds[:-1]))

    def _by_stage(self, values: np.ndarray) -> np.ndarray:
        """Returns the sums of layers' values over each stage."""
        return np.bincount(self.cut.owners, weights=self._by_position(values), minlength=self.topology.pp)

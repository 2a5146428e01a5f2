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
from sley_core.estimate.seconds.links import NOTHING, Cost, message
from sley_core.estimate.seconds.result import simulated_s
from sley_core.estimate.seconds.step import GradientExchange, StepWork, Use
from sley_core.plan.check import MOST_FORWARDS
from sley_core.search.glance import leaves_shards, reduces
from sley_core.search.layer_table import once
from sley_core.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from sley_core.protocols import Collective
    from sley_core.search.layer_table import LayerColumns
    from sley_core.search.layouts import Candidate
    from sley_core.search.quick import Exchanged, Quick, StageCut

    Starts = Literal["ready", "updated"]

MOST_LAYERS_WHOLE = 2
"""How many layers have whole weights at once where weights are sharded: one that computes, and the one after it."""


class QuickStep:
    """Raises PlanError "schedule-too-long" for a step of more micro-batches than any plan may have."""

    def __init__(self, quick: Quick, layout: Candidate, cut: StageCut, table: LayerColumns) -> None:
        self.quick = quick
        self.layout = layout
        self.cut = cut
        self.table = table
        sizes = layout.shape.sizes
        self.topology = Topology(quick.world, sizes.pp, sizes.sp, sizes.wp)
        self.micros = sizes.micros(quick.plan, quick.world)
        if self.micros * cut.placement.num_positions > MOST_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")
        kind: Collective = "reduce" if leaves_shards(layout.reducer) else "sum"
        self.exchanged = (
            quick.exchanged(layout.shape, kind),
            quick.exchanged(layout.shape, "gather" if kind == "reduce" else None),
        )
        held, owned = quick.held_elements(layout.shape, every=leaves_shards(layout.reducer))
        self.held, self.owned = self._by_stage(held), self._by_stage(owned)

    def least_s(self) -> float:
        """Returns the seconds that the fullest stage computes, from the arrival of its first micro-batch to the return of its
        last gradient to the first stage.
        """
        forward = self._by_position(self.table.forward)
        through = np.minimum(self.table.backward, self.table.input_gradient)
        messages = np.array([2 * sum(cost) for cost in self.messages])  # up, and down again
        before = np.concatenate(([0.0], np.cumsum((forward + self._by_position(through))[:-1] + messages)))
        first = np.full(self.topology.pp, np.inf)
        np.minimum.at(first, self.cut.owners, before)
        there, again = self._by_stage(self.table.forward), self._by_stage(self.table.least_back)
        sums, gathers = (sum(map(self._by_stage, costs)) for costs in self.exchanged)
        # gathers come before the last layer's first forward, and sums after the first gradients of the last backward
        exposed = np.maximum(sums - again, 0.0) + np.maximum(gathers - there, 0.0)
        busy = (there + again) * self.micros + exposed + self._update_s()
        return float((busy + first).max()) + self.quick.end_s(self.topology.pp)

    def seconds(self) -> float:
        """Returns the simulated seconds of the step. Of many micro-batches a few are simulated: each further adds the same."""
        pp = self.topology.pp
        if self.micros <= 3 * pp:
            return self._simulated(self.micros)
        some, more = self._simulated(2 * pp), self._simulated(3 * pp)
        return more + (more - some) / pp * (self.micros - 3 * pp)

    @cached_property
    def stage_bytes(self) -> list[int]:
        """Returns the bytes of each stage: weights, gradients, states, and what waits for backwards."""
        return [int(count) for count in self._states_bytes() + np.array(self._waiting_bytes())]

    def least_bytes(self) -> int:
        """Returns bytes that the fullest stage has in any case: one micro-batch waits for its backward."""
        return int((self._states_bytes() + self._by_stage(self.table.kept)).max())

    def _states_bytes(self) -> np.ndarray:
        """Returns the bytes of each stage's weights, gradients and states."""
        states = self.held * self.quick.weight_bytes + self.owned * self.quick.state_bytes
        return np.asarray(states + self._gathered_bytes())

    def _waiting_bytes(self) -> list[int]:
        """Returns the most bytes that wait for backwards on each stage at once."""
        kept = tuple(int(count) for count in self._by_position(self.table.kept))
        handed = tuple(int(self.table.output[last - 1]) for last in self.cut.bounds[1:-1])
        few = min(self.micros, 2 * self.topology.pp)  # with more, no stage holds more at once

        def held() -> list[int]:
            lists = self.cut.lists.of_all_stages(few)
            costs = Costs({}, (0.0,) * len(handed), kept, tuple(size // 2 for size in kept), handed)
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
            messages=self.messages,
            gradients={number: list(self._exchanges(number)) for number in range(self.topology.pp)},
            update_s={number: float(seconds) for number, seconds in enumerate(update_s)},
            together=self.quick.together,
            after_s=machine.device.step_s,
        )
        return simulated_s(self.cut.lists.of_all_stages(micros), self.cut.placement, work)

    def _update_s(self) -> np.ndarray:
        """Returns the seconds of each stage's norm and update, which move their bytes once."""
        gradient = DTYPES[self.quick.plan.precision.gradients].itemsize
        moved = self.held * gradient + self.owned * (gradient + 2 * self.quick.state_bytes)
        return np.asarray(moved / self.quick.machine.device.memory_bandwidth)

    @cached_property
    def messages(self) -> list[Cost]:
        """The cost of what crosses between each two positions; however weights are sharded, layers hand on as much."""

        def costs() -> list[Cost]:
            return [self._message(position) for position in range(len(self.cut.bounds) - 2)]

        return once(self.quick.messages, (id(self.cut), id(self.table.output)), costs)

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
        each = self._exchange_of(self.quick.reduced_once(self.layout.shape), "ready", "reduce wp")
        sums, gathers = self.exchanged
        made = each, self._exchange_of(sums, "ready", "reduce"), self._exchange_of(gathers, "updated", "weights")
        for chunk, (first, last) in enumerate(self.parts(stage)):
            for at in reversed(range(first, last)):
                found = (make(at, ((chunk, at - first),)) for make in made)
                yield from (one for one in found if one.cost != NOTHING)

    def _exchange_of(
        self, costs: Exchanged, starts: Starts, lane: str
    ) -> Callable[[int, tuple[Use, ...]], GradientExchange]:
        """Returns what makes the exchange of a layer, by its number and its place in the stage."""
        latency_s, work_s = costs
        return lambda at, uses: GradientExchange(Cost(float(latency_s[at]), float(work_s[at])), starts, uses, lane=lane)

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

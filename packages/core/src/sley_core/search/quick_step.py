"""Estimates one layout's step at a glance: the least it takes, what a simulation of its lists says, and what
its stages hold.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sley_core.actions.costs import Costs
from sley_core.errors import PlanError
from sley_core.estimate.layers.once import once
from sley_core.estimate.seconds.links import NOTHING, Cost, message
from sley_core.estimate.seconds.result import simulated_s
from sley_core.estimate.seconds.step import GradientExchange, StepWork, Use
from sley_core.plan.check import MOST_FORWARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from sley_core.search.layer_table import LayerColumns
    from sley_core.search.layouts import Candidate
    from sley_core.search.quick import Quick
    from sley_core.search.stage_costs import Exchanged
    from sley_core.search.stage_cut import Floats, StageCut

    Starts = Literal["ready", "updated"]


class Passes(NamedTuple):
    """Holds, for each stage, what its layers take, whoever sums gradients. first: seconds before its first forward begins and
    behind its last gradient; there, again: seconds of a micro-batch's forward and backward; kept: bytes that wait for a
    backward.
    """

    first: Floats
    there: Floats
    again: Floats
    kept: Floats


class QuickStep:
    """Estimates a step of `layout`, of which `cut` are the schedule's lists and parts, and `table` the seconds and bytes of
    layers.

    Raises PlanError "schedule-too-long" for a step of more micro-batches than any plan may have.
    """

    def __init__(self, quick: Quick, layout: Candidate, cut: StageCut, table: LayerColumns) -> None:
        self.quick = quick
        self.layout = layout
        self.cut = cut
        self.parts = cut.parts
        self.table = table
        self.pp = layout.shape.sizes.pp
        self.micros = layout.shape.sizes.micros(quick.plan, quick.world)
        if self.micros * cut.placement.num_positions > MOST_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")
        self.shared = quick.shared.of(layout.shape, cut.parts, layout.reducer)

    def least_s(self) -> float:
        """Returns seconds that the step does not undercut: those that the fullest stage computes, and before and after them
        what passes until its first micro-batch arrives and its last gradient is back at the first stage.
        """
        first, there, again, _ = self.quick.passes(self)
        # gathers come before the last layer's first forward, and sums after the first gradients of the last backward
        exposed = np.maximum(self.shared.sums - again, 0.0) + np.maximum(self.shared.gathers - there, 0.0)
        busy = (there + again) * self.micros + exposed + self.shared.update_s
        return float((busy + first).max()) + self.quick.end_s(self.pp)

    def passes(self) -> Passes:
        """Returns, for each stage, the seconds of a micro-batch's forward and backward, those before its first forward begins
        and behind its last gradient, and the bytes that it keeps of a micro-batch.
        """
        forward, through, *_ = by_position = self.parts.by_position(self.table.rows)
        before = np.concatenate(([0.0], np.cumsum((forward + through)[:-1] + self._both_ways)))
        there, _, again, kept = self.parts.sum_of_stages(by_position)
        return Passes(before[self.parts.firsts], there, again, kept)

    def seconds(self) -> float:
        """Returns the simulated seconds of the step. Of more than three micro-batches per stage, steps of two and of three per
        stage are simulated: each further one adds the same.
        """
        pp = self.pp
        if self.micros <= 3 * pp:
            return self._simulated(self.micros)
        some, more = self._simulated(2 * pp), self._simulated(3 * pp)
        return more + (more - some) / pp * (self.micros - 3 * pp)

    @cached_property
    def stage_bytes(self) -> list[int]:
        """Returns the most bytes of each stage: weights, gradients and states, what waits for backwards, and what one backward
        has beside that; or what there is before the first step, if that is more.
        """
        held = self.shared.states_bytes + np.array(self._waiting_bytes()) + self._passing_bytes()
        return [int(count) for count in np.maximum(held, self.shared.start_bytes)]

    def least_bytes(self) -> int:
        """Returns bytes that the fullest stage has in any case: weights, gradients and states, and one micro-batch that waits
        for its backward.
        """
        return int((self.shared.states_bytes + self.quick.passes(self).kept).max())

    def _waiting_bytes(self) -> list[int]:
        """Returns the most bytes that wait for backwards on each stage at once."""
        kept = tuple(int(count) for count in self.parts.by_position(self.table.kept))
        handed = tuple(int(self.table.output[last - 1]) for last in self.parts.bounds[1:-1])
        few = min(self.micros, 2 * self.pp)  # with more, no stage holds more at once

        def held() -> list[int]:
            costs = Costs({}, (0.0,) * len(handed), kept, tuple(size // 2 for size in kept), handed)
            return self.cut.held(few).most_bytes(costs)

        return once(self.quick.peaks, (id(self.cut), few, kept), held)

    def _passing_bytes(self) -> Floats:
        """Returns the bytes that a backward on each stage has at once beside all that waits: of its chunks, that with the
        fewest.
        """
        table, bounds = self.table, self.parts.bounds

        def passing() -> Floats:
            """Computes it for each position, layer by layer: what a backward has, less what the layers behind it have freed,
            and less the gradient that came in a message, which waits already.
            """
            found = []
            for first, last in pairwise(bounds):
                freed = np.cumsum(table.kept[first:last][::-1])[::-1] - table.kept[first:last]  # by the layers behind
                more = table.passing[first:last] - freed
                more[-1] -= table.output[last - 1] if last < bounds[-1] else 0
                found.append(max(0.0, float(more.max())))
            return np.asarray(np.array(found)[self.parts.places].min(axis=0))

        return once(self.quick.passing, (id(self.parts), id(table.passing)), passing)

    def _simulated(self, micros: int) -> float:
        """Returns the simulated seconds of a step of `micros` micro-batches."""
        layers = self.table.layers
        work = StepWork(
            parts=[layers[first:last] for first, last in pairwise(self.parts.bounds)],
            messages=self.messages,
            gradients={number: list(self._exchanges(number)) for number in range(self.pp)},
            update_s={number: float(seconds) for number, seconds in enumerate(self.shared.update_s)},
            together=self.quick.together,
            after_s=self.quick.machine.device.step_s,
        )
        return simulated_s(self.cut.outline(micros), work)

    @cached_property
    def messages(self) -> list[Cost]:
        """Returns the cost of what each position but the last hands to the next; the same however weights are sharded."""

        def costs() -> list[Cost]:
            return [self._message(position) for position in range(len(self.parts.bounds) - 2)]

        return once(self.quick.messages, (id(self.parts), id(self.table.output)), costs)

    @property
    def _both_ways(self) -> Floats:
        """Returns the seconds of the messages between each two positions, up and down again: [positions - 1]."""
        key = id(self.parts), id(self.table.output)
        return once(self.quick.both_ways, key, lambda: np.array([2 * sum(cost) for cost in self.messages]))

    def _message(self, position: int) -> Cost:
        """Returns the cost of what position `position` of the model hands to the next one; nothing where one stage has both."""
        sender, receiver = self.cut.placement.route[position : position + 2]
        if sender == receiver:
            return NOTHING
        size = self.quick.world // self.pp
        num_bytes = int(self.table.output[self.parts.bounds[position + 1] - 1])
        return message(num_bytes, sender * size, receiver * size, self.quick.machine.links)

    def _exchanges(self, stage: int) -> Iterator[GradientExchange]:
        """Yields the exchanges of each layer of a stage, from each chunk's last layer to its first: the sum of its gradients,
        or their reduction and the gather of stepped weights; before it the reduction over shards, if that comes once a step.
        Those that cost nothing are left out.
        """
        exchanged = self.shared.exchanged
        each = self._exchange_of(exchanged.once, "ready", "reduce wp")
        sums = self._exchange_of(exchanged.sums, "ready", "reduce")
        made = each, sums, self._exchange_of(exchanged.gathers, "updated", "weights")
        for chunk, (first, last) in enumerate(self.parts.of_stage(stage)):
            for at in reversed(range(first, last)):
                found = (make(at, ((chunk, at - first),)) for make in made)
                yield from (one for one in found if one.cost != NOTHING)

    def _exchange_of(
        self, costs: Exchanged, starts: Starts, lane: str
    ) -> Callable[[int, tuple[Use, ...]], GradientExchange]:
        """Returns a function that makes the exchange of a layer, given its number in the model and its place in the stage."""
        return lambda at, uses: GradientExchange(Cost(*costs[:, at].tolist()), starts, uses, lane=lane)

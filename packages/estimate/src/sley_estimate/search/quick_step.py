"""Estimates one layout's step at a glance: what a simulation of its lists says, and what its stages hold."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sley_core.actions.action import Kind
from sley_core.actions.costs import Costs
from sley_core.errors import PlanError
from sley_core.plan.check import MOST_FORWARDS
from sley_estimate.layers.once import once
from sley_estimate.search.stage_costs import ATTENDED, BESIDE
from sley_estimate.seconds.critical_path import path_costs
from sley_estimate.seconds.links import NOTHING, Cost
from sley_estimate.seconds.result import simulated_s
from sley_estimate.seconds.step import GradientExchange, StepWork, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from sley_estimate.search.layer_columns import LayerColumns
    from sley_estimate.search.layouts import Candidate
    from sley_estimate.search.quick import Quick
    from sley_estimate.search.stage_costs import Exchanged, OfStages
    from sley_estimate.search.stage_cut import Floats, StageCut

    Starts = Literal["ready", "updated"]


MOST_SIMULATED = 8192
"""So many forwards, of all positions together, are simulated at most, or four micro-batches per stage if these are more: lists
of as many take half a second to make.
"""


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

    @cached_property
    def shared(self) -> OfStages:
        """Returns seconds and bytes of each stage that do not depend on its micro-batches."""
        return self.quick.shared.of(self.layout.shape, self.parts, self.layout.reducer)

    def devices_s(self) -> float:
        """Returns the simulated seconds of the devices in the step. Of a very long one, shorter steps are simulated, one twice
        as long as the other: each further micro-batch takes what one takes that the longer has more.
        """
        half = max(MOST_SIMULATED // self.cut.placement.num_positions // (2 * self.pp), 2) * self.pp
        if self.micros <= max(2 * half, self.few):
            return self._simulated(self.micros)
        some, more = self._simulated(half), self._simulated(2 * half)
        return more + (more - some) / half * (self.micros - 2 * half)

    @cached_property
    def host_s(self) -> float:
        """Returns the seconds of the slowest host to start its stage's part of the step; 0 where none runs ahead."""
        engine = self.quick.machine.engine
        if engine is None and not self.table.has_host:
            return 0.0
        ends = (one.kind for some in self.cut.outline(self.few).special for one in some.values())
        layers_s = self.parts.by_stage(self.table.host_s[int(Kind.WEIGHT_GRADIENT in ends)]) * self.micros
        if engine is None:
            return float(layers_s.max())
        held = self.parts.by_stage([len(some) for some in self.quick.tables.trained.counted(self.parts).held])
        return max(
            float(of_layers_s) + engine.seconds(int(num_parameters), self.micros)
            for of_layers_s, num_parameters in zip(layers_s.tolist(), held, strict=True)
        )

    @cached_property
    def few(self) -> int:
        """Returns the micro-batches of the lists that tell what the stages hold, and bound the step's seconds."""
        return self.cut.few(self.micros)

    @property
    def few_key(self) -> tuple[int, int]:
        """Returns what is equal for steps with the same lists of `few` micro-batches."""
        return id(self.cut), self.few

    @cached_property
    def path_costs(self) -> Floats:
        """Returns the costs of which a path through lists of `few` micro-batches adds some up, as `path_costs` of
        `critical_path.py` has them.
        """
        table, parts = self.table, self.parts
        kinds = np.array([table.forward, table.backward, table.input_gradient, table.weight_gradient])
        seconds = parts.by_position(kinds)
        messages = self.quick.messages(parts, table.output)
        return path_costs(seconds, messages, *self._around(seconds))

    def _around(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Returns the seconds at least before the first forward of each position, until the gathers of its weights are over,
        and behind its last gradients, until its sums, those of the positions behind it and the update are; [positions] each.

        seconds: of actions, [4, positions].
        """
        exchanged = self.shared.exchanged
        each = exchanged.gathers[BESIDE].sum(axis=0), exchanged.sums[BESIDE].sum(axis=0), exchanged.sums[ATTENDED]
        gathers, sums, attended = self.parts.by_position(np.array(each))
        places, order = self.parts.places, self.cut.outline(self.few).complete
        heads_s, tails_s = np.zeros_like(gathers), np.zeros_like(sums)
        # The first layers of the forward may have no gather to wait for, and sums start within the action that ends gradients.
        heads_s[places] = np.maximum(gathers[places].cumsum(axis=0) - seconds[0][places], 0.0)
        left = sums[order][::-1].cumsum(axis=0)[::-1]
        left = np.maximum(left - seconds[1:].max(axis=0)[order], 0.0)
        left[-1] = np.maximum(left[-1], attended[order].sum(axis=0))  # what no computing hides comes behind all of it
        tails_s[order] = left + self.shared.update_s
        return heads_s, tails_s

    @cached_property
    def beside_s(self) -> float:
        """Returns the seconds that the step takes at least beside a path: of more than `few` micro-batches, on the stage that
        computes most, and at its end.
        """
        both_ways = self.parts.by_stage(self.table.forward) + self.parts.by_stage(self.table.least_back)
        return float(both_ways.max()) * (self.micros - self.few) + self.quick.end_s(self.pp)

    @cached_property
    def stage_bytes(self) -> list[int]:
        """Returns the most bytes of each stage: weights, gradients and states, what waits for backwards, and what one backward
        has beside that; or what there is before the first step, if that is more.
        """
        held = self.shared.states_bytes + np.array(self._waiting_bytes()) + self._passing_bytes()
        return [int(count) for count in np.maximum(held, self.shared.start_bytes)]

    def _waiting_bytes(self) -> list[int]:
        """Returns the most bytes that wait for backwards on each stage at once."""
        kept = tuple(int(count) for count in self.parts.by_position(self.table.kept))
        handed = tuple(int(self.table.output[last - 1]) for last in self.parts.bounds[1:-1])
        few = self.few

        def held() -> list[int]:
            costs = Costs({}, (0.0,) * len(handed), kept, tuple(size // 2 for size in kept), handed)
            return self.cut.held(few).most_bytes(costs)

        return once(self.quick.peaks, (id(self.cut), few, kept, handed), held)

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
            messages=self.quick.messages(self.parts, self.table.output),
            gradients={number: list(self._exchanges(number)) for number in range(self.pp)},
            update_s={number: float(seconds) for number, seconds in enumerate(self.shared.update_s)},
            together=self.quick.together,
            after_s=self.quick.machine.device.step_s,
        )
        return simulated_s(self.cut.outline(micros), work)

    def _exchanges(self, stage: int) -> Iterator[GradientExchange]:
        """Yields the exchanges of each layer of a stage, from each chunk's last layer to its first: the sum of its gradients,
        or their reduction and the gather of stepped weights; before it the reduction over shards, if that comes once a step.
        Those that cost nothing are left out.
        """
        exchanged = self.shared.exchanged
        each = self._exchange_of(exchanged.once, "ready", "reduce wp")
        sums = self._exchange_of(exchanged.sums, "ready", "reduce")
        made = each, sums, self._exchange_of(exchanged.gathers, "updated", "gather")
        for chunk, (first, last) in enumerate(self.parts.of_stage(stage)):
            for at in reversed(range(first, last)):
                found = (make(at, ((chunk, at - first),)) for make in made)
                yield from (one for one in found if one.cost != NOTHING)

    def _exchange_of(
        self, costs: Exchanged, starts: Starts, lane: str
    ) -> Callable[[int, tuple[Use, ...]], GradientExchange]:
        """Returns a function that makes the exchange of a layer, given its number in the model and its place in the stage."""
        return lambda at, uses: GradientExchange(Cost(*costs[:, at].tolist()), starts, uses, lane=lane)

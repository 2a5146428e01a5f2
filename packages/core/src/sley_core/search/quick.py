"""Seconds and bytes of a layout at a glance, to put thousands in order: what its layers take, and its lists.

    what each layer takes, in its shape ──> seconds, kept bytes ──┐
    schedule ──> lists of all stages, lowered ────────────────────┼──> simulated step, held bytes
    parameters of each stage ──> a sum per layer, update, states ─┘

It is not the estimate of the layout, which its own steps give (`exact.py`); what a search names has been through that. Left out
are gradient handlers beside the reducer, ties, and of bytes what an operator needs for a moment, buckets and messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from sley_core.draft import DTYPES, draft_model, dtypes
from sley_core.engine import layer_costs
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.estimate.seconds.links import NOTHING, Cost, collective
from sley_core.estimate.seconds_of_plan import TOTALS_BYTES
from sley_core.estimate.stage_facts import num_states
from sley_core.search.best_first import Estimate
from sley_core.search.glance import check_plan_at_a_glance, check_reducer, check_shape, leaves_shards, reduces
from sley_core.search.layer_table import LayerTables, once
from sley_core.search.layouts import Candidate, Shape
from sley_core.search.quick_step import QuickStep
from sley_core.topology import Topology

if TYPE_CHECKING:
    from sley_core.actions.placement import Placement
    from sley_core.engine.lists import Lists
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective


Exchanged = tuple[np.ndarray, np.ndarray]
"""Of each layer: seconds that do not depend on others, and seconds of the bytes."""


@dataclass(frozen=True)
class StageCut:
    """How a schedule cuts the model into stages. bounds: of the model's layers, from position to position. owners: the stage
    that holds each position.
    """

    lists: Lists
    placement: Placement
    bounds: Sequence[int]

    @cached_property
    def owners(self) -> list[int]:
        positions = range(self.placement.num_positions)
        return [self.placement.holder(at).stage for at in positions]


class Quick:
    """Estimates layouts of `plan` on `world` ranks of `machine`.

    Raises PlanError "not-at-a-glance" for a plan that has none which can be told so.
    """

    def __init__(self, plan: Plan, world: int, machine: MachineFile) -> None:
        check_plan_at_a_glance(plan)
        self.plan = plan
        self.world = world
        self.machine = machine
        self.tables = LayerTables(plan, machine)
        self._costs = layer_costs.by_parameters(self.tables.model)
        self._cuts: dict[tuple[int, str], StageCut | SleyError] = {}
        self._exchanged: dict[tuple[str | None, int, int, str], Exchanged | SleyError] = {}
        self._bounds: dict[Hashable, Estimate | SleyError] = {}
        self._seconds: dict[Hashable, float | SleyError] = {}
        self._slices: dict[str, SleyError | None] = {}
        self.messages: dict[tuple[int, int], list[Cost] | SleyError] = {}  # by id of what is kept here and in `tables`
        self.peaks: dict[tuple[int, int, tuple[int, ...]], list[int] | SleyError] = {}

    def least(self, shape: Shape) -> Estimate:
        """Returns seconds and bytes that no layout of a shape undercuts: what the average stage computes, and holds between
        the first forward and its backward.

        Raises PlanError for a shape that no layout has, and "not-at-a-glance" for one with a part that tells too little.
        """
        sizes, tables = shape.sizes, self.tables
        if sizes.pp > len(tables.model.layers):
            raise PlanError("partition-empty", "there are more stages than layers")
        check_shape(shape)
        if shape.attention is not None:
            once(self._slices, str(shape.attention), lambda: self._check_slices(shape))
        table = tables.of(shape)
        there, back = float(table.forward.sum()), float(table.least_back.sum())
        exposed = max(0.0, float(sum(costs.sum() for costs in self.exchanged(shape, "reduce"))) - back)
        seconds = ((there + back) * sizes.micros(self.plan, self.world) + exposed) / sizes.pp
        held, owned = self.held_elements(shape, every=True)
        num_bytes = held.sum() * self.weight_bytes + owned.sum() * self.state_bytes + table.kept.sum()
        return Estimate(seconds + self.end_s(sizes.pp), int(num_bytes / sizes.pp))

    def bound(self, layout: Candidate) -> Estimate:
        """Returns the seconds of a step in which the fullest stage never waits once it has begun, and the bytes that it holds
        with one micro-batch under way.

        Raises PlanError for a layout that cannot be assembled, and "not-at-a-glance" as `least`.
        """
        check_reducer(layout.reducer)

        def bound() -> Estimate:
            step = self.step(layout)
            return Estimate(step.least_s(), step.least_bytes())

        return once(self._bounds, _alike(layout), bound)

    def num_bytes(self, layout: Candidate) -> int:
        """Returns the bytes of the stage that holds most. Raises as `bound` does."""
        return max(self.step(layout).stage_bytes)

    def seconds(self, layout: Candidate) -> float:
        """Returns the simulated seconds of a step. Raises as `bound` does."""
        return once(self._seconds, _alike(layout), self.step(layout).seconds)

    def end_s(self, pp: int) -> float:
        """Returns the seconds that end every step: what all stages sum, and what belongs to nothing else."""
        return (sum(self.together) if pp > 1 else 0.0) + self.machine.device.step_s

    @cached_property
    def together(self) -> Cost:
        """The cost of what all ranks sum before the update."""
        return collective("sum", TOTALS_BYTES, range(self.world), self.machine.links)

    def step(self, layout: Candidate) -> QuickStep:
        """Returns the layout's step. Raises PlanError for one that cannot be assembled."""
        return QuickStep(self, layout, self._cut(layout), self.tables.of(layout.shape))

    def held_elements(self, shape: Shape, *, every: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each layer, the elements that a rank holds of its weights, and those that it steps.

        every: whether each of those that hold an element alike steps a part of it.
        """
        sizes, cut = shape.sizes, self.tables.cut(shape)
        ranks = self.world // sizes.pp
        shards, whole = cut / sizes.wp, self.tables.numel - cut
        held = shards + whole
        return held, (shards / (ranks // sizes.wp) + whole / ranks) if every else held

    def exchanged(self, shape: Shape, kind: Collective | None) -> Exchanged:
        """Returns latency and seconds of the bytes of an exchange of each layer's gradients, or of its weights: of shards with
        their replicas, and of the rest in the stage. None: nothing is exchanged. All stages are as the first.
        """
        sizes = shape.sizes
        key = kind, sizes.pp, sizes.wp, str(shape.weights)

        def costs() -> Exchanged:
            cut = self.tables.cut(shape)
            topology = Topology(self.world, sizes.pp, wp=sizes.wp)
            one = self._of_layers(kind, -(-cut // sizes.wp), topology.ranks_of("wdp", 0))
            other = self._of_layers(kind, self.tables.numel - cut, topology.ranks_of("stage", 0))
            return one[0] + other[0], one[1] + other[1]

        return once(self._exchanged, key, costs)

    def reduced_once(self, shape: Shape) -> Exchanged:
        """Returns the same of the reductions of shards' gradients that come once a step."""
        is_once = reduces(shape.weights) == "step"
        return self._of_layers("reduce" if is_once else None, self.tables.cut(shape), range(shape.sizes.wp))

    def _of_layers(self, kind: Collective | None, elements: np.ndarray, ranks: Sequence[int]) -> Exchanged:
        if kind is None:
            return np.zeros(len(elements)), np.zeros(len(elements))
        itemsize = dtypes(self.plan)[0].itemsize if kind == "gather" else DTYPES[self.plan.precision.gradients].itemsize
        known = {
            count: collective(kind, int(count) * itemsize, ranks, self.machine.links)
            for count in set(elements)
            if count
        }
        found = [known.get(count, NOTHING) for count in elements]
        return np.array([cost.latency_s for cost in found]), np.array([cost.work_s for cost in found])

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a parameter that only those hold who step it: its master, and the optimizer's states."""
        working, stepped = dtypes(self.plan)
        master = stepped.itemsize if stepped != working else 0
        return master + num_states(self.plan) * stepped.itemsize

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a parameter that every rank holds that has it: its working copy and its gradient."""
        return dtypes(self.plan)[0].itemsize + DTYPES[self.plan.precision.gradients].itemsize

    def _cut(self, layout: Candidate) -> StageCut:
        """Returns how the layout's schedule cuts the model; the same for all layouts with the same stages."""
        key = layout.shape.sizes.pp, str(layout.schedule)

        def cut() -> StageCut:
            sizes = replace(layout.shape.sizes, sp=1, wp=1, micro_size=1)
            plain = replace(layout, shape=replace(layout.shape, sizes=sizes, weights=None, attention=None))
            plan = plain.plan(self.plan, self.world)
            stage = stage_of(plan, plan.topology(self.world), 0, self.tables.model, self._costs)
            bounds = list(accumulate((len(part) for _, part in stage.stages), initial=0))
            return StageCut(stage.lists, stage.lists.placement, bounds)

        return once(self._cuts, key, cut)

    def _check_slices(self, shape: Shape) -> None:
        """Raises PlanError as a run does for a model that cannot see slices of a sequence."""
        sizes = replace(shape.sizes, pp=1, wp=1, micro_size=1)
        plan = Candidate(replace(shape, sizes=sizes, weights=None), None, None).plan(self.plan, sizes.sp)
        draft_model(plan, self.tables.dataset.info)


def _alike(layout: Candidate) -> Hashable:
    """Returns a key that is equal for layouts which take the same at a glance: two reducers with plain sums do."""
    shape = layout.shape
    tables = shape.activations, shape.weights, shape.attention, layout.schedule
    return (shape.sizes, leaves_shards(layout.reducer), *map(str, tables))

"""Estimates seconds and bytes of a layout at a glance, to put thousands in order: what its layers take, and its lists.

    what each layer takes, in its shape ──> seconds, kept bytes ──┐
    schedule ──> lists of all stages, lowered ────────────────────┼──> simulated step, held bytes
    parameters of each stage ──> a sum per layer, update, states ─┘

It is not the estimate of the layout, which its own steps give (`exact.py`); what a search names has been through that. Left out
are gradient handlers beside the reducer, ties, and some of the bytes: theirs is a lower figure, and drops nothing that fits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from sley_core.draft import draft_model
from sley_core.engine import layer_costs
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.estimate.layers.once import once
from sley_core.estimate.machine.on_machine import on_machine
from sley_core.estimate.seconds.links import Cost, collective
from sley_core.estimate.seconds_of_plan import TOTALS_BYTES
from sley_core.search.best_first import Estimate
from sley_core.search.buckets import bucket_bytes
from sley_core.search.glance import check_plan_at_a_glance, check_reducer, check_shape, leaves_shards
from sley_core.search.layer_table import LayerTables
from sley_core.search.layouts import Candidate, Shape
from sley_core.search.quick_step import Passes, QuickStep
from sley_core.search.stage_costs import StageCosts
from sley_core.search.stage_cut import ModelParts, StageCut

if TYPE_CHECKING:
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan
    from sley_core.search.layer_table import LayerColumns
    from sley_core.search.stage_cut import Floats


class Quick:
    """Estimates layouts of `plan` on `world` ranks of `machine`.

    Raises PlanError "not-at-a-glance" for a plan with canonical sums, none of whose layouts can be priced so.
    """

    def __init__(self, plan: Plan, world: int, machine: MachineFile) -> None:
        plan = on_machine(plan, machine)
        check_plan_at_a_glance(plan)
        self.plan = plan
        self.world = world
        self.machine = machine
        self.tables = LayerTables(plan, machine)
        self._costs = layer_costs.by_parameters(self.tables.model)
        self._cuts: dict[tuple[int, str], StageCut | SleyError] = {}
        self._parts: dict[Hashable, ModelParts] = {}
        self._passes: tuple[LayerColumns, ModelParts, Passes] | None = None
        self._bounds: dict[Hashable, Estimate | SleyError] = {}
        self._seconds: dict[Hashable, float | SleyError] = {}
        self._slices: dict[str, SleyError | None] = {}
        self.shared = StageCosts(plan, world, machine, self.tables)
        self.messages: dict[tuple[int, int], list[Cost] | SleyError] = {}  # by id of what is kept here and in `tables`
        self.both_ways: dict[tuple[int, int], Floats | SleyError] = {}
        self.passing: dict[tuple[int, int], Floats | SleyError] = {}
        self.peaks: dict[tuple[int, int, tuple[int, ...]], list[int] | SleyError] = {}

    def least(self, shape: Shape) -> Estimate:
        """Returns seconds and bytes that no layout of a shape undercuts: what the average stage computes, and holds between the
        first forward and its backward.

        Raises PlanError for a shape that no layout has, and "not-at-a-glance" for one with a part that does not say what it
        does.
        """
        sizes, tables = shape.sizes, self.tables
        if sizes.pp > len(tables.model.layers):
            raise PlanError("partition-empty", "there are more stages than layers")
        check_shape(shape)
        if shape.attention is not None:
            once(self._slices, str(shape.attention), lambda: self._check_slices(shape))
        there, back, kept = tables.of(shape).totals
        shared = self.shared.least(shape)
        exposed = max(0.0, shared.exchanged_s - back)
        seconds = ((there + back) * sizes.micros(self.plan, self.world) + exposed + shared.update_s) / sizes.pp
        return Estimate(seconds + self.end_s(sizes.pp), int((shared.num_bytes + kept) / sizes.pp))

    def bound(self, layout: Candidate) -> Estimate:
        """Returns the seconds of a step in which the fullest stage never waits once it has begun, and the bytes that it holds
        with one micro-batch under way.

        Raises PlanError for a layout that cannot be assembled, and "not-at-a-glance" for a reducer that does not say that its
        sums are plain.
        """
        check_reducer(layout.reducer)
        if layout.shape.offload is not None:  # as the only shapes of which `least` need not have been asked
            check_shape(layout.shape)

        def bound() -> Estimate:
            step = self.step(layout)
            return Estimate(step.least_s(), step.least_bytes())

        return once(self._bounds, (_alike(layout), self._cut(layout).parts), bound)

    def num_bytes(self, layout: Candidate) -> int:
        """Returns the bytes of the stage that holds most. Raises PlanError for a layout that cannot be assembled."""
        return max(self.step(layout).stage_bytes)

    def seconds(self, layout: Candidate) -> float:
        """Returns the simulated seconds of a step. Raises PlanError for a layout that cannot be assembled."""
        return once(self._seconds, (_alike(layout), str(layout.schedule)), self.step(layout).seconds)

    def passes(self, step: QuickStep) -> Passes:
        """Returns, for each stage, seconds and bytes of what its layers do with a micro-batch in this step; kept for the last
        cut and table that were asked, since alike layouts come one after another.
        """
        known = self._passes
        if known is None or known[0] is not step.table or known[1] is not step.parts:
            self._passes = known = step.table, step.parts, step.passes()
        return known[2]

    def end_s(self, pp: int) -> float:
        """Returns the seconds that end every step with `pp` stages: a sum over all ranks where there are several, and what
        belongs to nothing else.
        """
        return (sum(self.together) if pp > 1 else 0.0) + self.machine.device.step_s

    @cached_property
    def together(self) -> Cost:
        """Returns the cost of what all ranks sum before the update: loss, norm, votes."""
        return collective("sum", TOTALS_BYTES, range(self.world), self.machine.links)

    def step(self, layout: Candidate) -> QuickStep:
        """Returns what estimates the layout's step. Raises PlanError for a layout that cannot be assembled."""
        return QuickStep(self, layout, self._cut(layout), self.tables.of(layout.shape))

    def _cut(self, layout: Candidate) -> StageCut:
        """Returns the lists and parts into which the layout's schedule cuts the model; one object for all layouts with as many
        stages and the same schedule.
        """
        key = layout.shape.sizes.pp, str(layout.schedule)

        def cut() -> StageCut:
            """Makes them, of a plan with whole weights and sequences and micro-batches of one sample: none of these changes the
            cut.
            """
            sizes = replace(layout.shape.sizes, sp=1, wp=1, micro_size=1)
            plain = replace(layout, shape=replace(layout.shape, sizes=sizes, weights=None, attention=None))
            plan = plain.plan(self.plan, self.world)
            stage = stage_of(plan, plan.topology(self.world), 0, self.tables.model, self._costs)
            bounds = tuple(accumulate((len(part) for _, part in stage.stages), initial=0))
            placement = stage.lists.placement
            parts = self._parts.setdefault((bounds, placement.route), ModelParts(bounds, placement))
            return StageCut(stage.lists, parts)

        return once(self._cuts, key, cut)

    def _check_slices(self, shape: Shape) -> None:
        """Raises PlanError, as a run does, for a model or attention that cannot work on slices of a sequence."""
        sizes = replace(shape.sizes, pp=1, wp=1, micro_size=1)
        plan = Candidate(replace(shape, sizes=sizes, weights=None), None, None).plan(self.plan, sizes.sp)
        draft_model(plan, self.tables.dataset.info)


def _alike(layout: Candidate) -> Hashable:
    """Returns a key that is equal for layouts which are estimated alike but for their schedules: the same shape, and reducers
    with the same buckets that leave ranks the same part.
    """
    shape = layout.shape
    return (
        shape.sizes,
        leaves_shards(layout.reducer),
        bucket_bytes(layout.reducer),
        str(shape.activations),
        str(shape.weights),
        str(shape.attention),
        str(shape.offload),
    )

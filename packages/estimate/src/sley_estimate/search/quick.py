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
from sley_core.engine.stage import by_parameters, stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.topology import Topology
from sley_estimate.layers.once import once
from sley_estimate.machine.on_machine import on_machine
from sley_estimate.search.best_first import Estimate
from sley_estimate.search.bounds import Bounds
from sley_estimate.search.buckets import bucket_bytes
from sley_estimate.search.glance import check_plan_at_a_glance, check_shape, leaves_shards
from sley_estimate.search.known_paths import KnownPaths
from sley_estimate.search.layer_table import LayerTables
from sley_estimate.search.layouts import Candidate, Shape
from sley_estimate.search.quick_step import QuickStep
from sley_estimate.search.stage_costs import StageCosts
from sley_estimate.search.stage_cut import ModelParts, StageCut
from sley_estimate.seconds.groups import slowest_message
from sley_estimate.seconds.links import NOTHING, Cost, collective
from sley_estimate.seconds_of_plan import TOTALS_BYTES

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.layer_columns import Integers
    from sley_estimate.search.stage_cut import Floats


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
        self.tables = LayerTables(plan, world, machine)
        self._costs = by_parameters(self.tables.model)
        self._cuts: dict[tuple[int, str], StageCut | SleyError] = {}
        self._parts: dict[Hashable, ModelParts] = {}
        self._seconds: dict[Hashable, float | SleyError] = {}
        self._slices: dict[str, SleyError | None] = {}
        self.shared = StageCosts(plan, world, machine, self.tables)
        self._bounds = Bounds(self)
        self._paths = KnownPaths()
        self._messages: dict[tuple[int, int], list[Cost] | SleyError] = {}  # by id of what is kept here and in `tables`
        self._one_message: dict[tuple[int, int, int, int], Cost | SleyError] = {}
        self.passing: dict[tuple[int, int], Floats | SleyError] = {}
        self.peaks: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int] | SleyError] = {}

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
        # sums of one part of a stage may run beside its others
        exposed = max(0.0, shared.attended_s, shared.exchanged_s - back if sizes.pp == 1 else 0.0)
        seconds = ((there + back) * sizes.micros(self.plan, self.world) + exposed + shared.update_s) / sizes.pp
        return Estimate(seconds + self.end_s(sizes.pp), int((shared.num_bytes + kept) / sizes.pp))

    def bound(self, layout: Candidate) -> Estimate:
        """Returns seconds and bytes that the layout does not undercut: see `Bounds.of`."""
        return self._bounds.of(layout)

    def num_bytes(self, layout: Candidate) -> int:
        """Returns the bytes of the stage that holds most. Raises PlanError for a layout that cannot be assembled."""
        return max(self.step(layout).stage_bytes)

    def seconds(self, layout: Candidate) -> float:
        """Returns the simulated seconds of a step. Raises PlanError for a layout that cannot be assembled."""

        def simulated() -> float:
            """Simulates it, and learns what that says of others."""
            step = self.step(layout)
            self._paths.begin(step)
            seconds = step.devices_s()
            self._paths.learn(step, seconds)
            return max(seconds, step.host_s)

        return once(self._seconds, (_alike(layout), str(layout.schedule)), simulated)

    def closer_s(self, layout: Candidate, *, look: bool = False) -> float:
        """Returns seconds that the layout does not undercut, by what its hosts take, and by what is known of others with the
        same lists: see `KnownPaths`. look: whether to look at this layout where nothing is known. Raises PlanError for a layout
        that cannot be assembled.
        """
        step = self.step(layout)
        if look:
            self._paths.begin(step)
        return max(self._paths.least_s(step), step.host_s)

    def messages(self, parts: ModelParts, output: Integers) -> list[Cost]:
        """Returns the cost of what each position but the last hands to the next; the same however weights are sharded.

        output: bytes of each layer's, as a table of layers has them.
        """

        def costs() -> list[Cost]:
            return [self._message(parts, output, position) for position in range(len(parts.bounds) - 2)]

        return once(self._messages, (id(parts), id(output)), costs)

    def _message(self, parts: ModelParts, output: Integers, position: int) -> Cost:
        """Returns the cost of what position `position` of the model hands to the next one; nothing where one stage has both."""
        sender, receiver = parts.placement.route[position : position + 2]
        if sender == receiver:
            return NOTHING
        num_bytes, stages = int(output[parts.bounds[position + 1] - 1]), parts.placement.stages

        def cost() -> Cost:
            return slowest_message(num_bytes, (sender, receiver), Topology(self.world, stages), self.machine.links)

        return once(self._one_message, (stages, sender, receiver, num_bytes), cost)

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
        return QuickStep(self, layout, self.cut(layout), self.tables.of(layout.shape))

    def cut(self, layout: Candidate) -> StageCut:
        """Returns the lists and parts into which the layout's schedule cuts the model; one object for all layouts with as many
        stages and the same schedule.
        """
        key = layout.shape.sizes.pp, str(layout.schedule)
        known = self._cuts.get(key)
        if isinstance(known, StageCut):  # as for all but the first of a thousand
            return known

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
    return layout.shape.key, leaves_shards(layout.reducer), bucket_bytes(layout.reducer)

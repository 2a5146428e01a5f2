"""Seconds and bytes of a layout at a glance, to put thousands in order: what its layers take, and its lists.

    distinct layers, traced once per micro-batch and policy ──> seconds, kept bytes ──┐
    schedule ──> lists of all stages, lowered ────────────────────────────────────────┼──> simulated step, held bytes
    parameters of each stage ──> one sum per layer, the update, states ───────────────┘

It is not the estimate of the layout, which its own steps give (`estimate`); what a search names has been through that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from sley_core.actions.costs import Costs
from sley_core.actions.peaks import peaks_of
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import DTYPES, draft_model, dtypes
from sley_core.engine import layer_costs
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.estimate.layers.distinct import layer_keys
from sley_core.estimate.layers.of_plan import layer_works
from sley_core.estimate.layers.operators import LayerWork
from sley_core.estimate.seconds.layer_seconds import LayerSeconds
from sley_core.estimate.seconds.links import NOTHING, Cost, collective, message
from sley_core.estimate.seconds.result import simulate_step
from sley_core.estimate.seconds.step import GradientExchange, StepWork
from sley_core.estimate.seconds_of_plan import TOTALS_BYTES
from sley_core.estimate.stage_facts import num_states
from sley_core.plan.check import MOST_FORWARDS
from sley_core.records import GradientHandlerRecord
from sley_core.search.best_first import Estimate
from sley_core.search.choices import Choice
from sley_core.search.layouts import Candidate, Sizes
from sley_core.topology import Topology

if TYPE_CHECKING:
    from sley_core.actions.placement import Placement
    from sley_core.engine.lists import Lists
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan


@dataclass(frozen=True)
class Priced:
    """A layer at one size of micro-batch, under one activation policy."""

    work: LayerWork
    seconds: LayerSeconds


@dataclass(frozen=True)
class StageCut:
    """How a schedule cuts the model into stages. bounds: of the model's layers, from position to position."""

    lists: Lists
    placement: Placement
    bounds: Sequence[int]


class Quick:
    """Estimates layouts of `plan` on `world` ranks of `machine`. Layers are traced when a layout first asks for them."""

    def __init__(self, plan: Plan, world: int, machine: MachineFile) -> None:
        self.plan = plan
        self.world = world
        self.machine = machine
        self._dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        self._model = draft_model(plan, self._dataset.info)
        self._costs = layer_costs.by_parameters(self._model)
        self._priced: dict[tuple[int, str], list[Priced] | SleyError] = {}
        self._cuts: dict[tuple[int, str], StageCut | SleyError] = {}
        self.held: dict[tuple[int, int, tuple[int, ...]], list[int] | SleyError] = {}

    def bound(self, layout: Candidate) -> Estimate:
        """Returns the seconds of a step in which the fullest stage never waits once it has begun, and the bytes of the stage
        that holds most.

        Raises PlanError for a layout that cannot be assembled, and "estimate-seconds" for one of which only its own steps tell.
        """
        step = self._step(layout)
        return Estimate(step.least_s(), step.num_bytes())

    def seconds(self, layout: Candidate) -> float:
        """Returns the simulated seconds of a step. Raises as `bound` does."""
        return self._step(layout).seconds()

    def is_sharded(self, layout: Candidate) -> bool:
        """Returns whether a rank steps only a part of its weights."""
        record = self.plan.loader.record("gradient_handlers", layout.reducer.name) if layout.reducer else None
        return isinstance(record, GradientHandlerRecord) and record.result == "shard"

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a parameter that only those hold who step it: its master, and the optimizer's states."""
        working, stepped = dtypes(self.plan)
        master = stepped.itemsize if stepped != working else 0
        return master + num_states(self.plan) * stepped.itemsize

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a parameter that every rank of a stage holds: its working copy and its gradient."""
        return dtypes(self.plan)[0].itemsize + DTYPES[self.plan.precision.gradients].itemsize

    def _step(self, layout: Candidate) -> _QuickStep:
        copies = layout.offload or layout.activations.name == "memory.host"
        if layout.sizes.wp > 1 or layout.sizes.sp > 1 or copies:
            raise PlanError("estimate-seconds", "shards, slices and copies to the host cannot be told at a glance")
        return _QuickStep(self, layout, self._cut(layout), self._layers(layout.sizes.micro_size, layout.activations))

    def _cut(self, layout: Candidate) -> StageCut:
        """Returns how the layout's schedule cuts the model; the same for all layouts with the same stages."""
        key = layout.sizes.pp, str(layout.schedule)

        def cut() -> StageCut:
            plain = replace(layout, sizes=replace(layout.sizes, micro_size=1), offload=())
            plan = plain.plan(self.plan, self.world)
            stage = stage_of(plan, plan.topology(self.world), 0, self._model, self._costs)
            bounds = list(accumulate((len(part) for _, part in stage.stages), initial=0))
            return StageCut(stage.lists, stage.lists.placement, bounds)

        return _once(self._cuts, key, cut)

    def _layers(self, micro_size: int, policy: Choice) -> list[Priced]:
        """Returns all layers of the model, priced."""

        def price() -> list[Priced]:
            sizes = Sizes(1, 1, 1, micro_size)
            plan = Candidate(sizes, None, policy, None, (), None, None).plan(self.plan, 1)
            fields = meta_micro_batch(plan, self._dataset)
            built = plan.activations.build([layer.name for layer in self._model.layers])
            keys = layer_keys(plan, self._model, built, fields)
            measured = {table.key: LayerSeconds.measured(table) for table in self.machine.layers}
            works = layer_works(plan, self._model, fields, keys)
            known: dict[str, LayerSeconds] = {}
            for key, work in zip(keys, works, strict=True):
                known[key] = known.get(key) or measured.get(key) or LayerSeconds.computed(work, self.machine.device)
            return [Priced(work, known[key]) for key, work in zip(keys, works, strict=True)]

        return _once(self._priced, (micro_size, str(policy)), price)


class _QuickStep:
    """One layout's step. layers: the model's."""

    def __init__(self, quick: Quick, layout: Candidate, cut: StageCut, layers: Sequence[Priced]) -> None:
        self.quick = quick
        self.machine = quick.machine
        self.placement = cut.placement
        self.parts = [layers[first:last] for first, last in pairwise(cut.bounds)]
        self.topology = Topology(quick.world, layout.sizes.pp)
        self.is_sharded = quick.is_sharded(layout)
        self.micros = layout.sizes.micros(quick.plan, quick.world)
        self.cut = cut
        if self.micros * self.placement.num_positions > MOST_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")

    def least_s(self) -> float:
        """Returns the seconds that the fullest stage computes, from the arrival of its first micro-batch to the return of its
        last gradient to the first stage.
        """
        forward = [sum(one.seconds.forward for one in part) for part in self.parts]
        back = [sum(min(one.seconds.backward, one.seconds.input_gradient) for one in part) for part in self.parts]
        whole = [sum(one.seconds.forward + one.seconds.backward for one in part) for part in self.parts]
        busy: dict[int, float] = defaultdict(float)
        first: dict[int, float] = {}
        before = 0.0
        for at in range(len(self.parts)):
            stage = self.placement.holder(at).stage
            first.setdefault(stage, before)
            busy[stage] += whole[at] * self.micros
            before += forward[at] + back[at]
        return max(busy[stage] + first[stage] + self._update_s(stage) for stage in busy) + self.machine.device.step_s

    def seconds(self) -> float:
        """Returns the simulated seconds of the step. Of many micro-batches a few are simulated: each further adds the same."""
        few = 4 * self.placement.num_positions
        if self.micros <= 2 * few:
            return self._simulated(self.micros)
        some, more = self._simulated(few), self._simulated(2 * few)
        return more + (more - some) / few * (self.micros - 2 * few)

    def num_bytes(self) -> int:
        """Returns the bytes of the stage that holds most: weights, gradients, states, and what waits for backwards."""
        kept = tuple(sum(one.work.kept_bytes for one in part) for part in self.parts)
        handed = tuple(part[-1].work.output_bytes for part in self.parts[:-1])
        costs = Costs({}, (0.0,) * len(handed), kept, tuple(size // 2 for size in kept), handed)
        few = min(self.micros, 2 * self.placement.num_positions)  # with more, no stage holds more at once

        def held() -> list[int]:
            lists = self.cut.lists.of_all_stages(few)
            return [peaks_of(entries, at, self.placement, costs).num_bytes for at, entries in enumerate(lists)]

        found = []
        most: list[int] = _once(self.quick.held, (id(self.cut), few, kept), held)
        for number, num_bytes in enumerate(most):
            numel = self._numel(number)
            owned = numel // self.topology.ranks_per_stage if self.is_sharded else numel
            found.append(numel * self.quick.weight_bytes + owned * self.quick.state_bytes + num_bytes)
        return max(found)

    def _simulated(self, micros: int) -> float:
        stages = range(self.topology.pp)
        work = StepWork(
            parts=[[one.seconds for one in part] for part in self.parts],
            messages=[self._message(position) for position in range(self.placement.num_positions - 1)],
            gradients={number: self._exchanges(number) for number in stages},
            update_s={number: self._update_s(number) for number in stages},
            together=collective("sum", TOTALS_BYTES, range(self.topology.world), self.machine.links),
            after_s=self.machine.device.step_s,
        )
        return simulate_step(self.cut.lists.of_all_stages(micros), self.placement, work).seconds

    def _numel(self, stage: int) -> int:
        positions = [at for at in range(len(self.parts)) if self.placement.holder(at).stage == stage]
        return sum(one.work.num_parameters for at in positions for one in self.parts[at])

    def _update_s(self, stage: int) -> float:
        numel = self._numel(stage)
        owned = numel // self.topology.ranks_per_stage if self.is_sharded else numel
        gradient = DTYPES[self.quick.plan.precision.gradients].itemsize
        moved = numel * gradient + owned * (gradient + 2 * self.quick.state_bytes)
        return moved / self.machine.device.memory_bandwidth

    def _message(self, position: int) -> Cost:
        sender, receiver = self.placement.holder(position).stage, self.placement.holder(position + 1).stage
        if sender == receiver:
            return NOTHING
        size = self.topology.ranks_per_stage
        num_bytes = self.parts[position][-1].work.output_bytes
        return message(num_bytes, sender * size, receiver * size, self.machine.links)

    def _exchanges(self, stage: int) -> list[GradientExchange]:
        """Returns a sum, or a reduction and a gather, for each layer of a stage."""
        ranks = self.topology.ranks_of("stage", stage * self.topology.ranks_per_stage)
        if len(ranks) == 1:
            return []
        gradient, working = DTYPES[self.quick.plan.precision.gradients].itemsize, dtypes(self.quick.plan)[0].itemsize
        found = []
        for position, part in enumerate(self.parts):
            holder = self.placement.holder(position)
            if holder.stage != stage:
                continue
            for at, one in reversed(list(enumerate(part))):
                numel, uses = one.work.num_parameters, ((holder.chunk, at),)
                kind: Any = "reduce" if self.is_sharded else "sum"
                cost = collective(kind, numel * gradient, ranks, self.machine.links)
                found.append(GradientExchange(cost, "ready", uses))
                if self.is_sharded:
                    back = collective("gather", numel * working, ranks, self.machine.links)
                    found.append(GradientExchange(back, "updated", uses, lane="weights"))
        return found


Key = TypeVar("Key")
Value = TypeVar("Value")


def _once(known: dict[Key, Value | SleyError], key: Key, make: Callable[[], Value]) -> Value:
    """Returns what `make` made for `key` the first time, or raises what it raised."""
    if key not in known:
        try:
            known[key] = make()
        except SleyError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, SleyError):
        raise found
    return found

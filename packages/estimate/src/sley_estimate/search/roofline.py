"""Estimates seconds and bytes of a layout by one formula, to put hundreds of thousands in order; their own steps decide.

    step    = slowest stage + bubble + messages of one micro-batch, there and back + the sum of all ranks
    stage   = micro-batches x layers + sums of gradients and gathers of weights, as far as layers do not hide them + update
    layer   = the longer of computing (measured, in proportion to what was measured, or counted) and exchanges of its shards
    bubble  = what the schedule's lists idle where all parts of the model take as long, in micro-batches of the average stage
    bytes   = weights, gradients, states + forwards that wait at once x what layers keep + what one backward has beside that

Any reducer sums all gradients of a stage once, any weight communicator gathers a layer before its forward and its backward, and
reduces its gradients, any attention exchanges what it reads and writes. Ties and padding are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sley_core.actions.simulate import Costs, simulate
from sley_core.assemble import DTYPES, draft_model, dtypes
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.stage import by_parameters, stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import MOST_FORWARDS
from sley_core.records import GradientHandlerRecord, steps_on_host
from sley_core.topology import Topology
from sley_estimate.bytes.stage_kinds import most_waiting
from sley_estimate.layers.grown import ATTENTION
from sley_estimate.layers.nearest import NearestLayers
from sley_estimate.layers.once import once
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.variants import LayerVariants, Variant
from sley_estimate.search.layouts import Candidate, Shape, Sizes
from sley_estimate.seconds.groups import all_groups, slowest, slowest_message
from sley_estimate.seconds.host_copies import CopyKind, copy_cost, on_host_s
from sley_estimate.seconds.links import NOTHING, collective
from sley_estimate.seconds.update import moved_by_update, num_states

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.choices import Choice, Choices

T = TypeVar("T")

Floats = NDArray[np.float64]
MANY = 1 << 24
"""Elements of which the seconds of an update are asked, so that what starting a copy takes does not count."""


class Rough(NamedTuple):
    """What one step of a layout takes: its seconds, and the bytes of the rank that holds most."""

    seconds: float
    num_bytes: float


class Layers(NamedTuple):
    """Holds, for each layer, [layers]: seconds of a micro-batch's forward and backward, and of the host to start both; bytes of
    what waits for the backward, of what is handed on, and of what the backward has beside what waited.
    """

    forward: Floats
    backward: Floats
    host: Floats
    kept: Floats
    output: Floats
    passing: Floats


class StageCut(NamedTuple):
    """Holds how a schedule cuts the model. starts: the first layer of each position. places: positions, [chunks, stages].
    route: the stage of each position. bubble: what the lists idle, in micro-batches of a stage. waiting: forwards of a chunk
    that wait at once at most, [stages]; infinite where all do.
    """

    starts: NDArray[np.intp]
    places: NDArray[np.intp]
    route: tuple[int, ...]
    bubble: float
    waiting: Floats

    def by_stage(self, values: Floats) -> Floats:
        """Returns the sums over each stage, [..., stages], of values of each layer, [..., layers]."""
        positions = np.add.reduceat(values, self.starts, axis=-1)
        return np.asarray(positions[..., self.places].sum(axis=-2))


class OfStages(NamedTuple):
    """Holds what micro-batches do not change, [stages]: seconds of sums and of gathers that run beside computing, of both that
    do not, and of the update; bytes of weights, gradients and states.
    """

    sums: Floats
    gathers: Floats
    attended: Floats
    update: Floats
    num_bytes: Floats


class Roofline:
    """Estimates layouts of `plan`, which names its device, on `world` ranks of `machine`. Raises PlanError for a model that
    cannot be made.
    """

    def __init__(self, plan: Plan, world: int, machine: MachineFile, choices: Choices) -> None:
        self.plan, self.world, self.machine = plan, world, machine
        self.dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        self.model = draft_model(plan, self.dataset.info)
        self._variants = LayerVariants(plan, self.model, self.dataset)
        self._nearest = NearestLayers(self._variants, machine, choices)
        self._costs = by_parameters(self.model)
        self._working, self._wide = (dtype.itemsize for dtype in dtypes(plan))
        self._gradient = DTYPES[plan.precision.gradients].itemsize
        self._num_states = num_states(plan)
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returned, or raises the SleyError that it raised, when it was first asked for under `key`."""
        found: T = once(self._known, key, make)
        return found

    def of(self, layout: Candidate) -> Rough:
        """Returns what a step of the layout takes. Raises SleyError for one that cannot be assembled, or of which the machine
        file does not say enough.
        """
        shape, sizes = layout.shape, layout.shape.sizes
        cut, micros = self._cut(layout), sizes.micros(self.plan, self.world)
        if micros * len(cut.route) > MOST_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")
        ways = shape.activations, shape.weights, shape.attention
        key = "shape", id(cut), sizes.wp, sizes.sp, sizes.micro_size, *map(id, ways)
        forward, backward, host, held, ramp = self._once(key, lambda: self._micro_batch(shape, cut, micros))
        fixed = self._of_stages(layout, cut)
        exposed = np.maximum(fixed.sums - backward, 0) + np.maximum(fixed.gathers - forward, 0) + fixed.attended
        stages = micros * (forward + backward) + exposed + fixed.update
        bubble = cut.bubble * float((forward + backward).mean())
        seconds = max(float(stages.max()) + bubble + ramp + self._end_s(sizes.pp), float(host.max()))
        return Rough(seconds, float((fixed.num_bytes + held).max()))

    def _micro_batch(self, shape: Shape, cut: StageCut, micros: int) -> tuple[Floats, Floats, Floats, Floats, float]:
        """Returns, [stages]: seconds of a micro-batch's forward and backward, and of the host in a step; bytes of what waits
        for backwards and of what one has beside that. And the seconds of one micro-batch's messages, there and back.
        """
        layers, (gather, reduce) = self._layers(shape), self._shard_exchanges(shape)
        forward = cut.by_stage(np.maximum(layers.forward, gather[0]) + gather[1])
        back = np.maximum(layers.backward, gather[0] + reduce[0]) + gather[1] + reduce[1]
        waiting = np.minimum(cut.waiting, micros * len(cut.places)) / len(cut.places)
        held = waiting * cut.by_stage(layers.kept) + np.maximum.reduceat(layers.passing, cut.starts)[cut.places].min(axis=0)
        topology, ramp = Topology(self.world, shape.sizes.pp), 0.0
        for last, ends in zip(cut.starts[1:] - 1, zip(cut.route, cut.route[1:], strict=False), strict=True):
            if ends[0] != ends[1]:
                ramp += 2 * self._message_s(int(layers.output[last]), ends, topology)
        engine, host = self.machine.engine, cut.by_stage(layers.host) * micros
        if engine is not None:
            counts = cut.by_stage(np.array([float(len(some)) for some in self._trained]))
            host = host + [engine.seconds(int(count), micros) for count in counts]
        return forward, cut.by_stage(back), host, held, ramp

    def _message_s(self, num_bytes: int, ends: tuple[int, int], topology: Topology) -> float:
        key = "message", num_bytes, ends, topology.pp
        return self._once(key, lambda: sum(slowest_message(num_bytes, ends, topology, self.machine.links)))

    def _layers(self, shape: Shape) -> Layers:
        """Returns the layers of a shape with whole weights."""
        sizes = shape.sizes
        variant = Variant(shape.activations, sizes.micro_size, sizes.sp)

        def layers() -> Layers:
            if shape.attention is not None:
                self._once(("slices", id(shape.attention)), lambda: self._check_slices(shape))
            works = self._variants.works(variant)
            rows = []
            names = getattr(self._variants.policy(shape.activations), "names", ()) if shape.activations.copies else ()
            priced = self._nearest.priced(variant, works, shape.attention)
            for layer, work, (seconds, _) in zip(self.model.layers, works, priced, strict=True):
                forward, backward, kept, passing = (seconds.forward, seconds.backward, work.kept_bytes, work.passing_bytes)
                if sizes.sp > 1:
                    swaps_s, again_s = self._swaps_s(work.forward, sizes.sp), self._swaps_s(work.recompute, sizes.sp)
                    forward, backward = forward + swaps_s, backward + swaps_s + again_s
                if layer.name in names:
                    there_s, back_s = (sum(copy_cost(kind, kept, self.machine)) for kind in get_args(CopyKind))
                    is_beside = self.machine.device.kind == "cuda"
                    forward = max(forward, there_s) if is_beside else forward + there_s
                    backward = max(backward, back_s) if is_beside else backward + back_s
                    kept, passing = 0, passing + kept
                rows.append((forward, backward, seconds.host_ways_s[0], kept, work.output_bytes, passing))
            return Layers(*np.array(rows, dtype=np.float64).T)

        return self._once(("layers", id(shape.activations), sizes.micro_size, sizes.sp), layers)

    def _swaps_s(self, operators: tuple[Operator, ...], sp: int) -> float:
        """Returns the seconds of the two exchanges around each attention in `operators`: of what it reads, and of what it
        writes.
        """
        each = [one.num_bytes for one in operators if one.name == ATTENTION]
        groups = all_groups(Topology(self.world, sp=sp), "sp", self.machine.links) if each else []
        return sum(2 * sum(slowest("swap", num_bytes // 2, groups, self.machine.links)) for num_bytes in each)

    def _shard_exchanges(self, shape: Shape) -> tuple[Floats, Floats]:
        """Returns the seconds of the gather of each layer's weights, and of the reduction of its gradients, [2, layers] each:
        what runs beside computing, and what does not.
        """

        def exchanges() -> tuple[Floats, Floats]:
            cut, topology = self._sharded(shape), Topology(self.world, wp=shape.sizes.wp)
            kinds: tuple[tuple[Collective, int], ...] = ("gather", self._working), ("reduce", self._gradient)
            each = [np.array([self._exchange(kind, count * size, topology, "wp") for count in cut]).T for kind, size in kinds]
            return each[0], each[1]

        return self._once(("shards", shape.sizes.wp, id(shape.weights)), exchanges)

    def _exchange(self, kind: Collective, num_bytes: float, topology: Topology, axis: str) -> tuple[float, float]:
        """Returns the seconds of an exchange in the slowest of the axis' groups: beside computing, and not; 0 of no bytes."""

        def seconds() -> tuple[float, float]:
            links = self.machine.links
            cost = slowest(kind, int(num_bytes), all_groups(topology, axis, links), links) if num_bytes else NOTHING
            return cost.latency_s + cost.work_s, cost.attended_s

        return self._once(("exchange", kind, num_bytes, topology, axis), seconds)

    def _of_stages(self, layout: Candidate, cut: StageCut) -> OfStages:
        """Returns what the stages take and hold whatever the micro-batches are."""
        shape, record = layout.shape, layout.reducer.record if layout.reducer else None
        is_shared = isinstance(record, GradientHandlerRecord) and record.result == "shard"

        def stages() -> OfStages:
            sizes, sharded = shape.sizes, cut.by_stage(self._sharded(shape))
            topology, ranks = Topology(self.world, sizes.pp, wp=sizes.wp), self.world // sizes.pp
            whole, shards = cut.by_stage(self._numel) - sharded, sharded / sizes.wp
            owned = shards / (ranks // sizes.wp) + whole / ranks if is_shared else shards + whole

            def exchanged(kind: Collective, itemsize: int) -> Floats:
                parts = [
                    [self._exchange(kind, count * itemsize, topology, axis) for count in counts]
                    for axis, counts in (("wdp", shards), ("stage", whole))
                ]
                return np.asarray(np.array(parts).sum(axis=0).T)

            sums = exchanged("reduce" if is_shared else "sum", self._gradient)
            gathers = exchanged("gather", self._working) if is_shared else np.zeros_like(sums)
            update_s, state_bytes = self._update(shape.offload)
            held = (shards + whole) * (self._working + self._gradient) + owned * state_bytes
            if sizes.wp > 1:  # whole at once are a layer that computes and the one that comes after it
                own = self._sharded(shape)
                largest = np.maximum.reduceat(own + np.append(own[1:], 0), cut.starts)[cut.places].max(axis=0)
                held = held + largest * (self._working + self._gradient)
            return OfStages(sums[0], gathers[0], sums[1] + gathers[1], owned * update_s, held)

        key = "stages", id(cut), shape.sizes.wp, id(shape.weights), is_shared, id(shape.offload)
        return self._once(key, stages)

    def _update(self, offload: Choice | None) -> tuple[float, float]:
        """Returns, per element that a rank steps, the seconds of norm and update with the copies that they need, and the bytes
        of master and states on the device between two steps.
        """
        device, states = self.machine.device, self._num_states * self._wide
        master = self._wide if self._wide != self._working else 0
        moved = moved_by_update(self.plan, self._num_states)
        here = moved / device.memory_bandwidth
        if offload is None:
            return here, master + states
        is_there = steps_on_host(offload.record)
        sizes = (self._gradient, self._working) if is_there else (states, states)
        each = [
            sum(copy_cost(kind, size * MANY, self.machine)) / MANY for kind, size in zip(get_args(CopyKind), sizes, strict=True)
        ]
        if is_there:
            each.append(on_host_s([Operator("update", moved * MANY)], self.machine) / MANY)
        if device.kind == "cpu":  # copies are work of their own
            return sum(each) + (0.0 if is_there else here), master + states if is_there else master
        return (max(here, *each), 0.0) if is_there else (here + max(each), master)

    def _end_s(self, pp: int) -> float:
        """Returns the seconds that end every step: a sum over all ranks if there are several stages, and the host's own."""
        return (sum(self._totals) if pp > 1 else 0.0) + self.machine.device.step_s

    @cached_property
    def _totals(self) -> tuple[float, ...]:
        return collective("sum", 64, range(self.world), self.machine.links)  # loss, norm, votes

    @cached_property
    def _trained(self) -> list[list[Any]]:
        """Returns the trained parameters of each layer, without those that a layer before it has, too."""
        seen: set[int] = set()
        found = []
        for layer in self.model.layers:
            found.append([one for one in layer.module.parameters() if one.requires_grad and id(one) not in seen])
            seen.update(map(id, found[-1]))
        return found

    @cached_property
    def _numel(self) -> Floats:
        return np.array([float(sum(one.numel() for one in some)) for some in self._trained])

    def _sharded(self, shape: Shape) -> Floats:
        """Returns how many trained elements of each layer the shape's weight communicator shards; zeros without one. It is
        built for two ranks and asked, as in a run.
        """
        if shape.weights is None:
            return np.zeros(len(self._numel))

        def sharded() -> Floats:
            plan = Candidate(replace(shape, sizes=Sizes(1, 1, 2, 1), attention=None), None, None).plan(self.plan, 2)
            assert plan.weights is not None, shape
            communicator = plan.weights.build()
            communicator.prepare(self.model.layers)
            places: dict[int, list[Any]] = defaultdict(list)
            for layer in self.model.layers:
                for module in layer.module.modules():
                    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                        places[id(parameter)].append((module, name))
            cut = {key for key, held in places.items() if communicator.shard_dim(held) is not None}
            return np.array([float(sum(one.numel() for one in some if id(one) in cut)) for some in self._trained])

        return self._once(("sharded", id(shape.weights)), sharded)

    def _cut(self, layout: Candidate) -> StageCut:
        """Returns how the layout's schedule cuts the model into stages; the same object for all of the same number of these."""
        pp = layout.shape.sizes.pp

        def cut() -> StageCut:
            sizes = replace(layout.shape.sizes, sp=1, wp=1, micro_size=1)  # none of these changes the cut
            shape = replace(layout.shape, sizes=sizes, weights=None, attention=None)
            plan = layout._replace(shape=shape).plan(self.plan, self.world)
            if pp > len(self.model.layers):
                raise PlanError("partition-empty", "there are more stages than layers")
            stage = stage_of(plan, plan.topology(self.world), 0, self.model, self._costs)
            placement, lists = stage.lists.placement, stage.lists
            starts = list(accumulate((len(part) for _, part in stage.stages), initial=0))[:-1]
            places = [[placement.position(number, chunk) for number in range(pp)] for chunk in range(placement.chunks)]
            try:
                waiting, more = ([most_waiting(one) for one in lists.computing(times * pp)] for times in (2, 3))
                least = [float(one) if one == other else np.inf for one, other in zip(waiting, more, strict=True)]
                even = Costs.even(placement.num_positions, forward=1 / 3, input_gradient=1 / 3, weight_gradient=1 / 3)
                end = simulate(lists.of_all_stages(2 * pp), placement, even).timeline.makespan_s
                bubble = end / placement.chunks - 2 * pp
            except SleyError:  # a schedule of a file has lists for its own number of micro-batches alone
                least, bubble = [np.inf] * pp, (pp - 1) / placement.chunks
            return StageCut(np.array(starts), np.array(places), tuple(placement.route), bubble, np.array(least))

        return self._once(("cut", pp, id(layout.schedule)), cut)

    def _check_slices(self, shape: Shape) -> bool:
        """Raises PlanError, as a run does, for a model or attention that cannot work on slices of a sequence."""
        one = replace(shape, sizes=replace(shape.sizes, pp=1, wp=1, micro_size=1), weights=None)
        draft_model(Candidate(one, None, None).plan(self.plan, shape.sizes.sp), self.dataset.info)
        return True

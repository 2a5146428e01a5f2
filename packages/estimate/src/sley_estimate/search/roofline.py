"""Estimates seconds and bytes of a layout by one formula, to order hundreds of thousands; the steps of the best decide.

    step    = slowest stage + bubble + messages of one micro-batch, both ways + the all-reduce that ends a step
    stage   = micro-batches x layers + exposed part of sums of gradients and gathers of weights + update
    layer   = the longer of computing (measured, in proportion, or counted) and exchanges of its shards
    bubble  = idle time of the schedule's lists if all parts of the model take equally long
    bytes   = weights, gradients, states + forwards waiting at once x bytes kept by layers + what one backward needs

A reducer sums all gradients of a stage once; a weight communicator gathers a layer before forward and backward and reduces its
gradients; an attention exchanges its inputs and outputs. Ties and padding are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sley_core.actions.simulate import Costs, simulate
from sley_core.assemble import DTYPES, build_meta_model, weight_dtypes
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.stage import build_stage, count_layer_parameters
from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import MAX_FORWARDS
from sley_core.plan.plan import Plan
from sley_core.protocols import Collective
from sley_core.records import GradientHandlerRecord, steps_on_host
from sley_core.topology import Topology
from sley_estimate.bytes.fake_world import CopyKind
from sley_estimate.bytes.stages import most_waiting
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.prices import NearestLayers
from sley_estimate.layers.variants import ATTENTION, LayerVariants, Variant, once
from sley_estimate.machine import MachineFile
from sley_estimate.search.layouts import Choice, Choices, Layout
from sley_estimate.step.estimate import count_states, moved_by_update
from sley_estimate.step.links import NOTHING, all_groups, collective, copy_cost, on_host_s, slowest, slowest_message

T = TypeVar("T")

Floats = NDArray[np.float64]

MANY = 1 << 24  # elements of the update that is priced, so that the start of a copy does not count
TOTALS_BYTES = 64  # loss, norm, votes


class Rough(NamedTuple):
    """Seconds of a step, and bytes of the rank that holds most, by the formula."""

    seconds: float
    num_bytes: float


class LayerCosts(NamedTuple):
    """Seconds of forward, of backward and of the host; bytes kept, handed on, and passing in the backward; each [layers]."""

    forward: Floats
    backward: Floats
    host: Floats
    saved: Floats
    output: Floats
    passing: Floats


class StageCut(NamedTuple):
    """How a schedule cuts the model. starts: the first layer of each position. places: positions, [chunks, stages]. route: the
    stage of each position. bubble: idle time, in micro-batches. waiting: most forwards of a stage at once; infinite where all.
    """

    starts: NDArray[np.intp]
    places: NDArray[np.intp]
    route: tuple[int, ...]
    bubble: float
    waiting: Floats

    def by_stage(self, values: Floats) -> Floats:
        """Returns sums over each stage, [..., stages], of values of layers, [..., layers]."""
        positions = np.add.reduceat(values, self.starts, axis=-1)
        return np.asarray(positions[..., self.places].sum(axis=-2))


class Roofline:
    """Estimates layouts of `plan`, which names its device. Raises PlanError for a model that cannot be made."""

    def __init__(self, plan: Plan, world: int, machine: MachineFile, choices: Choices) -> None:
        self.plan, self.world, self.machine = plan, world, machine
        self.dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        self.model = build_meta_model(plan, self.dataset.info)
        self._variants = LayerVariants(plan, self.model, self.dataset)
        self._nearest = NearestLayers(self._variants, machine, choices)
        self._costs = count_layer_parameters(self.model)
        self._working, self._wide = (dtype.itemsize for dtype in weight_dtypes(plan))
        self._gradient = DTYPES[plan.precision.gradients].itemsize
        self._num_states = count_states(plan)
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        value: T = once(self._known, key, make)
        return value

    def of(self, layout: Layout) -> Rough:
        """Returns the estimate of a layout. Raises SleyError for one that cannot be assembled or priced."""
        cut, micros = self._cut(layout), layout.micros(self.plan, self.world)
        if micros * len(cut.route) > MAX_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many micro-batches")
        choices = layout.activations, layout.weights, layout.attention
        key = "micro-batch", id(cut), layout.wp, layout.sp, layout.micro_size, *map(id, choices)
        forward, backward, host, held_bytes, ramp = self._once(key, lambda: self._micro_batch(layout, cut, micros))
        sums, gathers, attended, update, fixed_bytes = self._stages(layout, cut)
        exposed = np.maximum(sums - backward, 0) + np.maximum(gathers - forward, 0) + attended
        stages = micros * (forward + backward) + exposed + update
        bubble = cut.bubble * float((forward + backward).mean())
        end_s = (sum(self._totals) if layout.pp > 1 else 0.0) + self.machine.device.step_s
        seconds = max(float(stages.max()) + bubble + ramp + end_s, float(host.max()))
        return Rough(seconds, float((fixed_bytes + held_bytes).max()))

    def _micro_batch(self, layout: Layout, cut: StageCut, micros: int) -> tuple[Floats, Floats, Floats, Floats, float]:
        """Returns, [stages]: seconds of a micro-batch and of the host, bytes held by forwards; and the messages' seconds."""
        layers, (gather, reduce) = self._layers(layout), self._shard_exchanges(layout)
        forward = cut.by_stage(np.maximum(layers.forward, gather[0]) + gather[1])
        back = np.maximum(layers.backward, gather[0] + reduce[0]) + gather[1] + reduce[1]
        waiting = np.minimum(cut.waiting, micros * len(cut.places)) / len(cut.places)
        held_bytes = waiting * cut.by_stage(layers.saved)
        held_bytes = held_bytes + np.maximum.reduceat(layers.passing, cut.starts)[cut.places].min(axis=0)
        topology, links, ramp = Topology(self.world, layout.pp), self.machine.links, 0.0
        for last, ends in zip(cut.starts[1:] - 1, pairwise(cut.route), strict=True):
            if ends[0] != ends[1]:
                num_bytes = int(layers.output[last])
                cost = self._once(
                    ("message", num_bytes, ends, layout.pp), partial(slowest_message, num_bytes, ends, topology, links)
                )
                ramp += 2 * sum(cost)
        engine, host = self.machine.engine, cut.by_stage(layers.host) * micros
        if engine is not None:
            counts = cut.by_stage(np.array([float(len(parameters)) for parameters in self._trained]))
            host = host + [engine.seconds(int(count), micros) for count in counts]
        return forward, cut.by_stage(back), host, held_bytes, ramp

    def _layers(self, layout: Layout) -> LayerCosts:
        """Returns the costs of layers with whole weights."""
        variant = Variant(layout.activations, layout.micro_size, layout.sp)

        def layers() -> LayerCosts:
            if layout.attention is not None:
                # Raises PlanError, as a run does, for a model or attention that cannot work on slices of a sequence.
                whole = layout._replace(pp=1, wp=1, micro_size=1, schedule=None, reducer=None, weights=None)
                plan = partial(whole.plan, self.plan, layout.sp)
                self._once(("slices", id(layout.attention)), lambda: build_meta_model(plan(), self.dataset.info))
            works = self._variants.works(variant)
            rows = []
            copied = getattr(self._variants.policy(layout.activations), "names", ()) if layout.activations.copies else ()
            priced = self._nearest.priced(variant, works, layout.attention)
            for layer, work, (seconds, _) in zip(self.model.layers, works, priced, strict=True):
                # A backward has the gradient of the layer's output, at least.
                forward, backward, saved, passing = seconds.forward, seconds.backward, work.kept_bytes, work.output_bytes
                if layout.sp > 1:
                    swaps_s, again_s = self._swaps_s(work.forward, layout.sp), self._swaps_s(work.recompute, layout.sp)
                    forward, backward = forward + swaps_s, backward + swaps_s + again_s
                if layer.name in copied:
                    out_s, back_s = (sum(copy_cost(kind, saved, self.machine)) for kind in get_args(CopyKind))
                    is_beside = self.machine.device.kind == "cuda"
                    forward = max(forward, out_s) if is_beside else forward + out_s
                    backward = max(backward, back_s) if is_beside else backward + back_s
                    saved, passing = 0, passing + saved
                host_s = seconds.host_forward + seconds.host_backward
                rows.append((forward, backward, host_s, saved, work.output_bytes, passing))
            return LayerCosts(*np.array(rows, dtype=np.float64).T)

        return self._once(("layers", id(layout.activations), layout.micro_size, layout.sp), layers)

    def _swaps_s(self, operators: tuple[Operator, ...], sp: int) -> float:
        """Returns the seconds of the exchanges around each attention: of its inputs, and of its output."""
        sizes = [operator.num_bytes for operator in operators if operator.name == ATTENTION]
        groups = all_groups(Topology(self.world, sp=sp), "sp", self.machine.links) if sizes else []
        return sum(2 * sum(slowest("swap", num_bytes // 2, groups, self.machine.links)) for num_bytes in sizes)

    def _shard_exchanges(self, layout: Layout) -> tuple[Floats, Floats]:
        """Returns the seconds of each layer's gather and reduction, [2, layers] each: beside computing, and not."""

        def exchanges() -> tuple[Floats, Floats]:
            counts, topology = self._sharded(layout), Topology(self.world, wp=layout.wp)
            kinds: tuple[tuple[Collective, int], ...] = ("gather", self._working), ("reduce", self._gradient)
            gather, reduce = (
                np.array([self._exchange(kind, count * size, topology, "wp") for count in counts]).T for kind, size in kinds
            )
            return gather, reduce

        return self._once(("shards", layout.wp, id(layout.weights)), exchanges)

    def _exchange(self, kind: Collective, num_bytes: float, topology: Topology, axis: str) -> tuple[float, float]:
        """Returns the seconds of an exchange in the slowest group of the axis: beside computing, and not."""

        def seconds() -> tuple[float, float]:
            links = self.machine.links
            cost = slowest(kind, int(num_bytes), all_groups(topology, axis, links), links) if num_bytes else NOTHING
            return cost.latency_s + cost.work_s, cost.attended_s

        return self._once(("exchange", kind, num_bytes, topology, axis), seconds)

    def _stages(self, layout: Layout, cut: StageCut) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Returns costs of a step, [stages]: sums and gathers beside computing, their exposed part, update; bytes between
        steps.
        """
        record, wp = layout.reducer.record if layout.reducer else None, layout.wp
        is_shared = isinstance(record, GradientHandlerRecord) and record.result == "shard"

        def stages() -> tuple[Floats, Floats, Floats, Floats, Floats]:
            sharded = cut.by_stage(self._sharded(layout))
            topology, ranks = Topology(self.world, layout.pp, wp=wp), self.world // layout.pp
            whole, shards = cut.by_stage(self._numel) - sharded, sharded / wp
            owned = shards / (ranks // wp) + whole / ranks if is_shared else shards + whole

            def exchanged(kind: Collective, itemsize: int) -> Floats:
                parts = [
                    [self._exchange(kind, count * itemsize, topology, axis) for count in counts]
                    for axis, counts in (("wdp", shards), ("stage", whole))
                ]
                return np.asarray(np.array(parts).sum(axis=0).T)

            sums = exchanged("reduce" if is_shared else "sum", self._gradient)
            gathers = exchanged("gather", self._working) if is_shared else np.zeros_like(sums)
            update_s, state_bytes = self._update(layout.offload)
            held_bytes = (shards + whole) * (self._working + self._gradient) + owned * state_bytes
            if wp > 1:  # gathered at once: a layer that computes and the next one
                own = self._sharded(layout)
                largest = np.maximum.reduceat(own + np.append(own[1:], 0), cut.starts)[cut.places].max(axis=0)
                held_bytes = held_bytes + largest * (self._working + self._gradient)
            return sums[0], gathers[0], sums[1] + gathers[1], owned * update_s, held_bytes

        return self._once(("stages", id(cut), wp, id(layout.weights), is_shared, id(layout.offload)), stages)

    def _update(self, offload: Choice | None) -> tuple[float, float]:
        """Returns, per stepped element, seconds of norm, update and copies; and bytes of master and states on the device."""
        device, states = self.machine.device, self._num_states * self._wide
        master = self._wide if self._wide != self._working else 0
        moved = moved_by_update(self.plan, self._num_states)
        here = moved / device.memory_bandwidth
        if offload is None:
            return here, master + states
        is_on_host = steps_on_host(offload.record)
        sizes = (self._gradient, self._working) if is_on_host else (states, states)
        parts = [
            sum(copy_cost(kind, size * MANY, self.machine)) / MANY for kind, size in zip(get_args(CopyKind), sizes, strict=True)
        ]
        if is_on_host:
            parts.append(on_host_s([Operator("update", moved * MANY)], self.machine) / MANY)
        if device.kind == "cpu":  # copies are work of their own
            return sum(parts) + (0.0 if is_on_host else here), master + states if is_on_host else master
        return (max(here, *parts), 0.0) if is_on_host else (here + max(parts), master)

    @cached_property
    def _totals(self) -> tuple[float, ...]:
        return collective("sum", TOTALS_BYTES, range(self.world), self.machine.links)

    @cached_property
    def _trained(self) -> list[list[Any]]:
        """Returns the trained parameters of each layer, without those of a layer before it."""
        known_ids: set[int] = set()
        trained = []
        for layer in self.model.layers:
            trained.append([each for each in layer.module.parameters() if each.requires_grad and id(each) not in known_ids])
            known_ids.update(map(id, trained[-1]))
        return trained

    @cached_property
    def _numel(self) -> Floats:
        return np.array([float(sum(each.numel() for each in parameters)) for parameters in self._trained])

    def _sharded(self, layout: Layout) -> Floats:
        """Returns each layer's trained elements that the weight communicator shards: it is built for two ranks and asked."""
        if layout.weights is None:
            return np.zeros(len(self._numel))

        def sharded() -> Floats:
            pair = layout._replace(pp=1, sp=1, wp=2, micro_size=1, schedule=None, reducer=None, attention=None)
            plan = pair.plan(self.plan, 2)
            assert plan.weights is not None, layout
            communicator = plan.weights.build()
            communicator.prepare(self.model.layers)
            places: dict[int, list[Any]] = defaultdict(list)
            for layer in self.model.layers:
                for module in layer.module.modules():
                    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                        places[id(parameter)].append((module, name))
            cut = {key for key, owners in places.items() if communicator.shard_dim(owners) is not None}
            return np.array([float(sum(each.numel() for each in own if id(each) in cut)) for own in self._trained])

        return self._once(("sharded", id(layout.weights)), sharded)

    def _cut(self, layout: Layout) -> StageCut:
        """Returns the stages of a layout; the same object for all with its schedule and number of stages."""
        pp = layout.pp

        def cut() -> StageCut:
            plan = layout._replace(sp=1, wp=1, micro_size=1, weights=None, attention=None).plan(self.plan, self.world)
            if pp > len(self.model.layers):
                raise PlanError("partition-empty", "there are more stages than layers")
            stage = build_stage(plan, plan.topology(self.world), 0, self.model, self._costs)
            placement, lists = stage.lists.placement, stage.lists
            starts = list(accumulate((len(part) for _, part in stage.stages), initial=0))[:-1]
            places = [[placement.position(number, chunk) for number in range(pp)] for chunk in range(placement.chunks)]
            try:
                waiting, more = ([most_waiting(steps) for steps in lists.computing(times * pp)] for times in (2, 3))
                least = [float(few) if few == many else np.inf for few, many in zip(waiting, more, strict=True)]
                even = Costs.even(placement.num_positions, forward=1 / 3, input_gradient=1 / 3, weight_gradient=1 / 3)
                end = simulate(lists.of_all_stages(2 * pp), placement, even).timeline.makespan_s
                bubble = end / placement.chunks - 2 * pp
            except SleyError:  # a schedule of a file has lists for its own number of micro-batches alone
                least, bubble = [np.inf] * pp, (pp - 1) / placement.chunks
            return StageCut(np.array(starts), np.array(places), tuple(placement.route), bubble, np.array(least))

        return self._once(("cut", pp, id(layout.schedule)), cut)

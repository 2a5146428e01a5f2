"""Finds the fastest layouts that fit in memory. A formula ranks all layouts, and `estimate_plan` then verifies the best ones.

layouts ──formula──> ranked ──one of each group of nearly equal ones first──> the best `NUM_VERIFIED` verified ──> the fastest
            └──> too large

Both parts run in forked processes, so that this process never runs a backward: torch refuses a backward in a process that was
forked after one. The formula:

    step    = slowest stage + bubble + messages of one microbatch, both ways + the all-reduce that ends a step
    stage   = microbatches x layers + exposed part of sums of gradients and gathers of weights + update
    layer   = the longer of computing (measured, in proportion, or counted) and exchanges of its shards
    bubble  = idle time in the schedule's action lists if all parts of the model take the same time
    bytes   = weights, gradients, states + pending forwards x bytes saved by layers + bytes needed by one backward

A step takes at least as long as its slowest host. A reducer sums all gradients of a stage once per step. A weight communicator
gathers a layer before its forward and its backward, and reduces its gradients. Attention over slices exchanges its inputs and
outputs. The formula treats all weights as sharded, and ignores tied weights and padding.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sley_core.actions.simulate import Costs, simulate
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import Layer
from sley_core.optim.optimizers import set_training_mode
from sley_core.plan.check import MAX_FORWARDS, require_valid
from sley_core.plan.plan import Plan
from sley_core.protocols import Collective
from sley_core.records import GradientHandlerRecord, WeightCommunicatorRecord, steps_on_host
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import StageTooLargeError
from sley_estimate.bytes.rank import build_rank0_draft, max_pending_forwards, run_calls
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.times import ATTENTION, LayerTimes, Source, Variant, host_operators_s, memoize
from sley_estimate.machine import CopyDirection, MachineFile, collective_cost, copy_cost, slowest_cost, slowest_message_cost
from sley_estimate.search.layouts import Choice, Choices, Layout, Layouts, component_hint
from sley_estimate.step.estimate import estimate_plan, plan_for_machine
from sley_trainer.assemble import DTYPES, build_meta_model, weight_dtypes
from sley_trainer.stepper import ActionLists, build_stage, count_layer_parameters
from train_cli.main import disable_gc

Floats = NDArray[np.float64]

UPDATE_NUMEL = 1 << 24  # elements for which the time of an update is computed; so many that the latency of copies is negligible
TOTALS_BYTES = 64  # the size in bytes of the all-reduce that ends a step: the loss, the gradient norm and the votes to stop


class RooflineEstimate(NamedTuple):
    """An estimate of a layout by the formula: the time of a step in seconds, and the largest memory of a rank in bytes."""

    seconds: float
    num_bytes: float


class LayerCosts(NamedTuple):
    """The costs of a model's layers on one microbatch. Each array has one element per layer. forward, backward: the times on
    the device in seconds. host: the time in seconds that the host needs to launch the forward and the backward. saved_bytes:
    the size of the tensors saved for the backward. output_bytes: the size of the output. backward_bytes: the additional memory
    that the backward needs.
    """

    forward: Floats
    backward: Floats
    host: Floats
    saved_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats


class StageSplit(NamedTuple):
    """The division of a model into stages by a schedule. A stage runs chunks of consecutive layers, and positions number the
    chunks of all stages in the order of the model. starts: the index of the first layer at each position. positions: the
    position of each chunk of each stage, [chunks, stages]. route: the stage at each position. bubble: the idle time of a stage
    in a step, in units of its time for one microbatch. max_pending: for each stage, the maximum number of forwards that wait
    for their backwards, [stages]; infinite if it is unknown or grows with the number of microbatches.
    """

    starts: NDArray[np.intp]
    positions: NDArray[np.intp]
    route: tuple[int, ...]
    bubble: float
    max_pending: Floats

    def by_stage(self, values: Floats) -> Floats:
        """Returns an array [..., stages]: the sums of `values`, [..., layers], over the layers of each stage."""
        positions = np.add.reduceat(values, self.starts, axis=-1)
        return np.asarray(positions[..., self.positions].sum(axis=-2))


class Roofline:
    """Estimates layouts of `plan` on `world_size` ranks by the formula at the top of this file. `run.device` of the plan must
    be the type of device of `machine`. Raises PlanError if the model cannot be built, or if `machine` lacks a figure.
    """

    def __init__(self, plan: Plan, world_size: int, machine: MachineFile, choices: Choices) -> None:
        self.plan, self.world_size, self.machine, self.choices = plan, world_size, machine, choices
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        self._data_info, self.model = dataset.info, build_meta_model(plan, dataset.info)
        self._layer_times = LayerTimes(plan, self.model, dataset, machine, choices.policies)
        self._weight_bytes, self._master_bytes = (dtype.itemsize for dtype in weight_dtypes(plan))
        self._gradient_bytes = DTYPES[plan.precision.gradients].itemsize
        trained = trained_parameters(self.model.layers)
        self._num_weights = np.array([float(len(parameters)) for parameters in trained])
        self._num_trained = np.array([float(sum(param.numel() for param in parameters)) for parameters in trained])
        self._update_s, self._state_bytes = self._update_costs()
        self._totals_s = sum(collective_cost("sum", TOTALS_BYTES, range(world_size), machine.links)) if world_size > 1 else 0.0

    def estimate(self, layout: Layout) -> RooflineEstimate:
        """Returns the estimate of `layout`. Raises SleyError if the layout is invalid, or if its time cannot be computed."""
        record = layout.reducer.record if layout.reducer else None
        is_shared = isinstance(record, GradientHandlerRecord) and record.result == "shard"
        return self._estimate(layout._replace(reducer=None), is_shared)

    @memoize
    def _estimate(self, layout: Layout, is_shared: bool) -> RooflineEstimate:
        """Returns the estimate of `layout`, whose `reducer` is None. is_shared: see `_stage_costs`."""
        pp, schedule, wp = layout.pp, layout.schedule, layout.wp
        split, num_microbatches = self._split_stages(pp, schedule), layout.num_microbatches(self.plan, self.world_size)
        host_s, ramp_s, pending_bytes = self._unsharded_costs(layout._replace(wp=1, weights=None))
        forward, backward, mean_s = self._microbatch_costs(layout)
        sums, gathers, attended, update, fixed_bytes = self._stage_costs(pp, schedule, wp, is_shared)
        exposed = np.maximum(sums - backward, 0) + np.maximum(gathers - forward, 0) + attended
        stages = num_microbatches * (forward + backward) + exposed + update
        end_s = self._totals_s if pp > 1 else 0.0
        seconds = max(float(stages.max()) + split.bubble * mean_s + ramp_s + end_s, host_s)
        return RooflineEstimate(seconds, float((fixed_bytes + pending_bytes).max()))

    @memoize
    def _unsharded_costs(self, layout: Layout) -> tuple[float, float, Floats]:
        """Returns what does not depend on shards of weights: the time in seconds of the slowest host in a step, the time of all
        messages that one microbatch needs between stages in both directions, and the memory in bytes that pending forwards and
        one backward hold, [stages]. Raises PlanError "schedule-too-long" for too many microbatches.
        """
        split = self._split_stages(layout.pp, layout.schedule)
        num_microbatches = layout.num_microbatches(self.plan, self.world_size)
        if num_microbatches * len(split.route) > MAX_FORWARDS:
            raise PlanError("schedule-too-long", "the step has too many microbatches")
        layers = self._layer_costs(layout.activations, layout.micro_size, layout.sp, layout.attention)
        pending = np.minimum(split.max_pending, num_microbatches * len(split.positions)) / len(split.positions)
        pending_bytes = pending * split.by_stage(layers.saved_bytes)
        pending_bytes += np.maximum.reduceat(layers.backward_bytes, split.starts)[split.positions].min(axis=0)
        ramp_s = sum(
            2 * self._message_s(int(layers.output_bytes[last]), ends, layout.pp)
            for last, ends in zip(split.starts[1:] - 1, pairwise(split.route), strict=True)
            if ends[0] != ends[1]
        )
        engine, host = self.machine.engine, split.by_stage(layers.host) * num_microbatches
        if engine is not None:
            host = host + [engine.step_seconds(int(count), num_microbatches) for count in split.by_stage(self._num_weights)]
        return float(host.max()), ramp_s, pending_bytes

    @memoize
    def _microbatch_costs(self, layout: Layout) -> tuple[Floats, Floats, float]:
        """Returns the times in seconds of the forward and of the backward of one microbatch, both [stages], with exchanges of
        sharded weights, and the mean over all stages of their sum.
        """
        split = self._split_stages(layout.pp, layout.schedule)
        layers = self._layer_costs(layout.activations, layout.micro_size, layout.sp, layout.attention)
        gather, reduce = self._shard_exchanges(layout.wp, layout.weights)
        forward = split.by_stage(np.maximum(layers.forward, gather[0]) + gather[1])
        backward = split.by_stage(np.maximum(layers.backward, gather[0] + reduce[0]) + gather[1] + reduce[1])
        return forward, backward, float((forward + backward).mean())

    @memoize
    def _message_s(self, num_bytes: int, stages: tuple[int, int], pp: int) -> float:
        """Returns the time in seconds of the slowest message of `num_bytes` bytes between `stages`, two of `pp` stages."""
        return sum(slowest_message_cost(num_bytes, stages, Topology(self.world_size, pp), self.machine.links))

    @memoize
    def _layer_costs(self, activations: Choice, micro_size: int, sp: int, attention: Choice | None) -> LayerCosts:
        """Returns the costs of all layers, without exchanges of sharded weights. sp: the number of ranks that split each
        sequence. attention: the choice that exchanges their slices; None if `sp` is 1.
        """
        if attention is not None:
            self._check_slices(attention, sp)
        variant, machine = Variant(activations, micro_size, sp), self.machine
        layer_work, layer_seconds = self._layer_times.layer_work(variant), self._layer_times.seconds(variant)
        copied = getattr(self._layer_times.policy(activations), "names", ()) if activations.offloads_activations else ()
        overlaps = machine.device.kind == "cuda"
        rows = []
        for layer, work, (seconds, _) in zip(self.model.layers, layer_work, layer_seconds, strict=True):
            # A backward needs at least the memory for the gradient of the layer's output.
            forward, backward = seconds.forward, seconds.backward
            saved, backward_bytes = work.saved_bytes, work.output_bytes
            if sp > 1:
                swaps_s = self._swaps_s(work.forward, sp)
                forward, backward = forward + swaps_s, backward + swaps_s + self._swaps_s(work.recompute, sp)
            if layer.name in copied:
                offload_s, reload_s = (sum(copy_cost(direction, saved, machine)) for direction in get_args(CopyDirection))
                forward = max(forward, offload_s) if overlaps else forward + offload_s
                backward = max(backward, reload_s) if overlaps else backward + reload_s
                saved, backward_bytes = 0, backward_bytes + saved
            host_s = seconds.host_forward + seconds.host_backward
            rows.append((forward, backward, host_s, saved, work.output_bytes, backward_bytes))
        return LayerCosts(*np.array(rows, dtype=np.float64).T)

    @memoize
    def _check_slices(self, attention: Choice, sp: int) -> None:
        """Raises PlanError, as a run does, if the model or `attention` cannot work on slices of a sequence."""
        layout = Layout(1, sp, 1, 1, None, self.choices.policies[0], None, attention=attention)
        build_meta_model(layout.apply(self.plan, sp), self._data_info)

    def _swaps_s(self, operators: tuple[Operator, ...], sp: int) -> float:
        """Returns the time in seconds to exchange inputs and outputs of all attentions in `operators` over `sp` ranks."""
        topology, links = Topology(self.world_size, sp=sp), self.machine.links
        sizes = [operator.num_bytes // 2 for operator in operators if operator.name == ATTENTION]
        return sum(2 * sum(slowest_cost("swap", num_bytes, topology, "sp", links)) for num_bytes in sizes)

    @memoize
    def _shard_exchanges(self, wp: int, weights: Choice | None) -> tuple[Floats, Floats]:
        """Returns the times in seconds to gather the weights of each layer, and to reduce its gradients, over `wp` ranks. Both
        are arrays [2, layers]: row 0 can overlap with computing, and row 1 cannot. weights: None if `wp` is 1; then both are 0.
        """
        if weights is None:
            none = np.zeros((2, len(self._num_trained)))
            return none, none
        gathered, topology = float(self._weight_bytes), Topology(self.world_size, wp=wp)
        if isinstance(weights.record, WeightCommunicatorRecord):
            gathered = weights.record.gather_bytes_per_element(weights.config, self._weight_bytes)
        return (
            self._exchange_s("gather", self._num_trained * gathered, topology, "wp"),
            self._exchange_s("reduce", self._num_trained * self._gradient_bytes, topology, "wp"),
        )

    def _exchange_s(self, collective: Collective, sizes: Floats, topology: Topology, axis: str) -> Floats:
        """Returns the times [2, sizes] of exchanges of `sizes` bytes: row 0 can overlap with computing, and row 1 cannot."""
        costs = {size: slowest_cost(collective, int(size), topology, axis, self.machine.links) for size in sizes}
        return np.array([(costs[size].latency_s + costs[size].transfer_s, costs[size].member_work_s) for size in sizes]).T

    @memoize
    def _stage_costs(
        self, pp: int, schedule: Choice | None, wp: int, is_shared: bool
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Returns five arrays [stages] for a step: the times in seconds of sums of gradients, and of gathers of updated
        weights, that can overlap with computing; the exposed time of both; the time of the update; and the memory in bytes held
        between steps. is_shared: whether each replica of a stage holds only a part of the reduced gradients and of the states.
        """
        split, topology = self._split_stages(pp, schedule), Topology(self.world_size, pp, wp=wp)
        shards = split.by_stage(self._num_trained) / wp
        owned = shards / topology.wdp if is_shared else shards
        sums = self._exchange_s("reduce" if is_shared else "sum", shards * self._gradient_bytes, topology, "wdp")
        gathers = self._exchange_s("gather", shards * self._weight_bytes, topology, "wdp") if is_shared else np.zeros_like(sums)
        held_bytes = shards * (self._weight_bytes + self._gradient_bytes) + owned * self._state_bytes
        if wp > 1:  # the computing layer and the next layer are whole at the same time
            two_layers = self._num_trained + np.append(self._num_trained[1:], 0)
            largest = np.maximum.reduceat(two_layers, split.starts)[split.positions].max(axis=0)
            held_bytes = held_bytes + largest * (self._weight_bytes + self._gradient_bytes)
        return sums[0], gathers[0], sums[1] + gathers[1], owned * self._update_s, held_bytes

    def _update_costs(self) -> tuple[float, float]:
        """Returns the time of an update in seconds, and the device's bytes of master weights and states, per weight element."""
        plan, num_states = self.plan, count_states(self.plan)
        offload = next((manager for manager in plan.offload if component_hint(manager).moves_every_step(manager.config)), None)
        device, states = self.machine.device, num_states * self._master_bytes
        master = self._master_bytes if self._master_bytes != self._weight_bytes else 0
        update_bytes = update_bytes_per_element(plan, num_states)
        on_device_s = update_bytes / device.memory_bandwidth
        if offload is None:
            return on_device_s, master + states
        is_on_host = steps_on_host(offload.record)
        sizes = (self._gradient_bytes, self._weight_bytes) if is_on_host else (states, states)
        seconds = [
            sum(copy_cost(direction, size * UPDATE_NUMEL, self.machine)) / UPDATE_NUMEL
            for direction, size in zip(get_args(CopyDirection), sizes, strict=True)
        ]
        if is_on_host:
            seconds.append(host_operators_s([Operator("update", update_bytes * UPDATE_NUMEL)], self.machine) / UPDATE_NUMEL)
        if device.kind == "cpu":  # copies do not overlap with other work
            return sum(seconds) + (0.0 if is_on_host else on_device_s), master + states if is_on_host else master
        return (max(on_device_s, *seconds), 0.0) if is_on_host else (on_device_s + max(seconds), master)

    @memoize
    def _split_stages(self, pp: int, schedule: Choice | None) -> StageSplit:
        """Returns the division of the model by `schedule`. Raises PlanError "partition-empty" for more stages than layers."""
        reducer = self.choices.reducers[0] if self.world_size > pp else None
        plan = Layout(pp, 1, 1, 1, schedule, self.choices.policies[0], reducer).apply(self.plan, self.world_size)
        if pp > len(self.model.layers):
            raise PlanError("partition-empty", "there are more stages than layers")
        stage = build_stage(plan, plan.topology(self.world_size), 0, self.model, count_layer_parameters(self.model))
        placement, lists = stage.action_lists.placement, stage.action_lists
        starts = list(accumulate((len(part) for _, part in stage.layers_by_position), initial=0))[:-1]
        positions = [[placement.position(number, chunk) for number in range(pp)] for chunk in range(placement.chunks)]
        try:
            pending, longer = (np.array([max_pending_forwards(steps) for steps in lists.generate(n * pp)]) for n in (2, 3))
            max_pending = np.where(pending == longer, pending, np.inf)
            even = Costs.uniform(placement.num_positions, forward=1 / 3, input_gradient=1 / 3, weight_gradient=1 / 3)
            end = simulate(lists.lower_all_stages(2 * pp), placement, even).timeline.makespan_s
            bubble = end / placement.chunks - 2 * pp
        except SleyError:  # a schedule from a file has lists only for its own number of microbatches
            max_pending, bubble = np.full(pp, np.inf), (pp - 1) / placement.chunks
        return StageSplit(np.array(starts), np.array(positions), tuple(placement.route), bubble, max_pending)


def trained_parameters(layers: Sequence[Layer]) -> list[list[nn.Parameter]]:
    """Returns the trained parameters of each layer. A shared parameter belongs only to the first layer that has it."""
    known_ids: set[int] = set()
    trained = []
    for layer in layers:
        trained.append([param for param in layer.module.parameters() if param.requires_grad and id(param) not in known_ids])
        known_ids.update(map(id, trained[-1]))
    return trained


def update_bytes_per_element(plan: Plan, num_states: int) -> int:
    """Returns the bytes per weight element that an update with `num_states` optimizer states moves, with clipping."""
    config: Any = plan.optimizer.config
    times = 2 if config.clip_norm is None else 4
    working, master = weight_dtypes(plan)
    copy = working.itemsize if master != working else 0
    gradients = DTYPES[plan.precision.gradients]
    widened = 2 * master.itemsize if gradients != master else 0
    return times * gradients.itemsize + widened + master.itemsize * (2 + 2 * num_states) + copy


def count_states(plan: Plan) -> int:
    """Returns the number of tensors of a weight's shape that are kept per weight: the optimizer states after one step on the
    CPU, and the average of `[averaging]`. Raises PlanError "estimate-seconds" if the optimizer fails on a 4 x 4 weight.
    """
    weight = nn.Parameter(torch.zeros(4, 4))
    try:
        optimizer: Any = set_training_mode(plan.optimizer.build([{"params": [weight]}], torch.device("cpu")))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    except Exception as error:
        message = f"`{plan.optimizer.name}` cannot update one small weight: {type(error).__name__}: {error}"
        raise PlanError("estimate-seconds", message, path=("optimizer",)) from error
    states = (value for value in optimizer.state[weight].values() if torch.is_tensor(value))
    return sum(value.shape == weight.shape for value in states) + (plan.averaging is not None)


NUM_VERIFIED = 30  # the number of layouts that `estimate_plan` verifies in a round, the best ones first
MAX_ROUNDS = 4  # the maximum number of rounds of a search; another round follows while too few verified layouts fit
SIMILARITY = 0.01  # two layouts are nearly equal if their times and their memory differ by at most about this share


class VerifiedLayout(NamedTuple):
    """A layout that `estimate_plan` verified. seconds: the time of a step. num_bytes: the peak memory of the stage that needs
    the most. sources: the sources of the layers' times.
    """

    layout: Layout
    seconds: float
    num_bytes: int
    sources: frozenset[Source]


@dataclass
class SearchResult:
    """The result of a search. num_layouts: the number of all layouts. num_too_large: the number of layouts that are too large
    by the formula. refusals: the number of invalid layouts by reason. fastest_layouts: the layouts that fit, the fastest first.
    smallest_layout, min_bytes: the layout that needs the least memory by the formula, and this memory in bytes; None and
    infinity if no layout is valid. num_verified: the number of layouts given to `estimate_plan`. num_dropped: the number of
    these layouts that turned out to be too large.
    """

    num_layouts: int = 0
    num_too_large: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    fastest_layouts: list[VerifiedLayout] = field(default_factory=list)
    smallest_layout: Layout | None = None
    min_bytes: float = math.inf
    num_verified: int = 0
    num_dropped: int = 0

    def count_refusal(self, error: SleyError) -> None:
        """Counts a layout as invalid because of `error`."""
        problem = error.diagnostics[0]
        self.refusals[f"{problem.code}: {problem.message}" + (f" (hint: {problem.hint})" if problem.hint else "")] += 1


def search_layouts(
    space: Layouts,
    machine: MachineFile,
    *,
    max_bytes: float = math.inf,
    top: int = 5,
    cores: int = 1,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Searches for the `top` fastest layouts of `space` that need at most `max_bytes` bytes on every rank. cores: the
    number of parallel processes. report_progress: called after each verified layout with the number of layouts verified so far,
    and the number that the search will have verified at the end of the round. Replaces `space.plan` by a plan for the device
    type of `machine`. Raises PlanError for a model or dataset that cannot be built.
    """
    space.plan = plan_for_machine(space.plan, machine)
    ((_, (result, best, smallest)),) = run_calls([partial(rank_layouts, space, machine, max_bytes)], cores)
    numbers = {smallest, *(number for number, _ in best)}
    layouts = {number: layout for number, layout in enumerate(space.all_layouts()) if number in numbers}
    result.smallest_layout = layouts.get(smallest)
    ordered = order_by_variety([(layouts[number], estimate) for number, estimate in best], space)
    candidates = (layout for layout in ordered if _check_layout(layout, space, result))
    verified: list[VerifiedLayout] = []

    lists_by_schedule: dict[Hashable, ActionLists] = {}  # layouts with the same schedule share their action lists

    def estimate_layout(layout: Layout) -> tuple[float, int, frozenset[Source]] | StageTooLargeError | SleyError:
        try:
            plan = layout.apply(space.plan, space.world_size)
            draft = build_rank0_draft(plan, space.world_size)
            lists = lists_by_schedule.setdefault((layout.pp, layout.schedule), draft.stage.action_lists)
            draft = replace(draft, stage=replace(draft.stage, action_lists=lists))
            estimate = estimate_plan(plan, space.world_size, machine, draft=draft, max_bytes=max_bytes)
        except (StageTooLargeError, SleyError) as error:
            return error
        num_bytes = max(stage.peak for stage in estimate.stage_bytes)
        return estimate.step.seconds, num_bytes, frozenset(layer.source for layer in estimate.layers)

    while len(verified) < top and (next_layouts := list(islice(candidates, NUM_VERIFIED))):
        total = result.num_verified + len(next_layouts)
        for index, estimate in run_calls([partial(estimate_layout, layout) for layout in next_layouts], cores):
            result.num_verified += 1
            report_progress(result.num_verified, total)
            if isinstance(estimate, SleyError):
                result.count_refusal(estimate)
            elif isinstance(estimate, StageTooLargeError):
                result.num_dropped += 1
            else:
                verified.append(VerifiedLayout(next_layouts[index], *estimate))
    verified.sort(key=lambda verified_result: verified_result.seconds)
    result.fastest_layouts = verified[:top]
    return result


def rank_layouts(
    space: Layouts, machine: MachineFile, max_bytes: float
) -> tuple[SearchResult, list[tuple[int, RooflineEstimate]], int]:
    """Ranks all layouts by the formula. Returns a result with the counts of layouts; the fastest layouts that fit, in order,
    with their estimates; and the layout that needs the least memory, or -1 if no layout is valid. Each layout is returned as
    its index in `Layouts.all_layouts`, since records of plugins may not be picklable.
    """
    result, roofline = SearchResult(), Roofline(space.plan, space.world_size, machine, space.choices)
    smallest, ranked = -1, list[tuple[int, RooflineEstimate]]()
    with disable_gc():
        for number, layout in enumerate(space.all_layouts()):
            result.num_layouts = number + 1
            try:
                estimate = roofline.estimate(layout)
            except SleyError as error:
                result.count_refusal(error)
                continue
            if estimate.num_bytes < result.min_bytes:
                smallest, result.min_bytes = number, estimate.num_bytes
            if estimate.num_bytes <= max_bytes:
                ranked.append((number, estimate))
            else:
                result.num_too_large += 1
    return result, nsmallest(NUM_VERIFIED * MAX_ROUNDS, ranked, key=lambda pair: pair[1].seconds), smallest


def order_by_variety(best: Sequence[tuple[Layout, RooflineEstimate]], space: Layouts) -> list[Layout]:
    """Returns the layouts of `best` in a new order: the first of each group of nearly equal layouts, then all others. Nearly
    equal layouts need about the same time and memory, and differ only in `sp`, in `micro_size` or, with one microbatch, in the
    options of the weight communicator.
    """
    groups: dict[Hashable, list[Layout]] = defaultdict(list)
    for layout, estimate in best:
        options = None if layout.num_microbatches(space.plan, space.world_size) == 1 else str(layout.weights)
        choices = layout._replace(sp=1, micro_size=1, weights=None), layout.weights and layout.weights.name, options
        groups[str(choices), *(round(math.log(cost) / SIMILARITY) for cost in estimate)].append(layout)
    leaders = [group[0] for group in groups.values()]
    return [*leaders, *(layout for layout, _ in best if layout not in leaders)]


def _check_layout(layout: Layout, space: Layouts, result: SearchResult) -> bool:
    """Returns whether the layout passes the checks of a plan. Counts it as invalid in `result` if it does not."""
    try:
        require_valid(layout.apply(space.plan, space.world_size), space.world_size)
    except SleyError as error:
        result.count_refusal(error)
        return False
    return True

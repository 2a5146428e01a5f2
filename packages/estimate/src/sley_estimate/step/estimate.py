"""Estimates how long a step of a plan takes on a machine, before a run, for `train-cli estimate --machine`.

plan ── draft ──> layers, timed one by one ───────────────────────────────────┐
     ── a rank of each distinct stage runs steps without values: bytes, and ──┼──> programs ──> simulated step
        its operators, exchanges and updates                                  │
     ── schedule ──> lists of all stages, lowered ────────────────────────────┘

A stage's program is its recorded step, with times computed from the figures of the machine. Messages between stages come from
the action lists; all other exchanges come from the recorded step, in its order. One rank represents its whole stage, since the
ranks of a stage do the same work at the same time.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from sley_core.actions.action import Action, Delivery, Kind, LoweredList, Placement, Transfer, direction_of, select_actions
from sley_core.optim.optimizers import can_skip_on_device
from sley_core.plan.load import replace_values
from sley_core.plan.plan import Plan
from sley_core.protocols import Collective
from sley_core.records import steps_on_host
from sley_estimate.bytes.rank import RankBytes, build_rank0_draft, representative_stages, run_stages
from sley_estimate.layers import times
from sley_estimate.layers.operators import Operator
from sley_estimate.machine import CopyDirection, Cost, MachineFile, copy_cost, slowest_cost, slowest_message_cost
from sley_estimate.step.record import BeginEvent, ComputeEvent, Events, ExchangeReference, Queue, RankRecord, expand_step
from sley_estimate.step.simulate import Await, Compute, Exchange, Instruction, StepTime, simulate_programs
from sley_trainer.assemble import Draft

MeasuredSeconds = Mapping[tuple[int, int], Sequence[times.LayerSeconds]]  # the times of a chunk's layers, by (stage, chunk)


class ActionScale(NamedTuple):
    """The rule for how long an action's operators take. runs_ahead: whether the host launches operators ahead of the device, so
    that launches add nothing to the device's time. factor: multiplies the operators' times. launch_s: the time in seconds that
    the host needs to launch each operator. fixed_s: the time of a measured action without operators, else 0.
    """

    runs_ahead: bool = False
    factor: float = 1.0
    launch_s: float = 0.0
    fixed_s: float = 0.0


class _OperatorSeconds(NamedTuple):
    """The times of consecutive operators. host_s: the operators on the host's cores. device_s, launched_s: the operators on the
    device, without and with their launches. num_on_device: the number of operators on the device.
    """

    host_s: float
    device_s: float
    launched_s: float
    num_on_device: int


@dataclass(eq=False)
class _ProgramBuilder:
    """Builds the programs of stages from their recorded steps. If every layer of a chunk was measured, the operators of each
    action of this chunk together take the measured time. host_waits: whether the host waits for its device before each update.
    """

    records: Sequence[RankRecord]
    placement: Placement
    machine: MachineFile
    measured: MeasuredSeconds
    num_microbatches: int
    host_waits: bool
    _seconds_by_id: dict[int, _OperatorSeconds] = field(default_factory=dict)  # by `id` of the operators, which stay alive

    def program(self, stage: int, entries: LoweredList) -> Iterator[Instruction]:
        """Yields a stage's program: exchanges of earlier steps, the opening, the messages and actions of `entries`, the
        closing, and the host's time outside the layers.
        """
        record = self.records[stage]
        compute_actions = [action for action in select_actions(entries) if action.kind is not Kind.CHUNK_DONE]
        step = expand_step(record.step, compute_actions)
        exchanges: dict[Queue, list[Exchange]] = defaultdict(list)
        counts: Counter[str] = Counter()

        def find(reference: ExchangeReference | None) -> Exchange | None:
            """Returns None for no exchange: events of a later action may refer to one before the first of this step."""
            queue = [] if reference is None else exchanges[reference.queue]
            return queue[-reference.distance] if reference is not None and reference.distance <= len(queue) else None

        def begin(event: BeginEvent) -> Exchange:
            exchange = self._make_exchange(event, stage, counts, find(event.after))
            exchanges[event.queue].append(exchange)
            return exchange

        def instructions(events: Events, action: Action | None) -> Iterator[Instruction]:
            scale = self._action_scale(events, stage, action)
            if scale.fixed_s:
                yield Compute(scale.fixed_s, action)
            for event in events:
                if isinstance(event, ComputeEvent):
                    part = self._operator_seconds(event.operators)
                    seconds = part.host_s + (part.device_s if scale.runs_ahead else part.launched_s) * scale.factor
                    host_s = part.host_s + scale.launch_s * part.num_on_device
                    yield Compute(seconds, action, 0.0 if self.machine.device.kind == "cpu" else host_s)
                elif isinstance(event, BeginEvent):
                    yield begin(event)
                elif (exchange := find(event.exchange)) is not None:
                    yield Await(exchange.key)

        yield from map(begin, step.carried_exchanges)
        yield from instructions(step.opening, None)
        events = dict(step.actions)
        yield from list_instructions(
            stage, entries, self.placement, self._message_cost, lambda action: instructions(events[action], action)
        )
        yield from instructions(step.closing, None)
        waited_s = self._engine_s(stage, 0) if self.host_waits else 0.0
        yield Compute(waited_s, None, self._engine_s(stage, self.num_microbatches))

    def _engine_s(self, stage: int, num_microbatches: int) -> float:
        """Returns the time in seconds of the stage's host outside the layers; 0 if the machine file has no `[engine]`."""
        engine = self.machine.engine
        return engine.step_seconds(self.records[stage].num_trained, num_microbatches) if engine else 0.0

    def _action_scale(self, events: Events, stage: int, action: Action | None) -> ActionScale:
        """Returns the rule for how long the operators in `events` take. action: None for events outside the action list."""
        engine = self.machine.engine
        if action is None:  # the time in `[engine]` includes the launches of these operators
            return ActionScale(runs_ahead=engine is not None)
        layers = self.measured.get((stage, action.chunk))
        if layers is None:
            return ActionScale(launch_s=self.machine.device.launch_s if engine else 0.0)
        parts = [self._operator_seconds(event.operators) for event in events if isinstance(event, ComputeEvent)]
        runs_ahead = any(layer.host_forward for layer in layers)
        counted_s = sum(part.device_s if runs_ahead else part.launched_s for part in parts)
        measured_s = sum(layer.action_s(action.kind) for layer in layers)
        if not counted_s:
            return ActionScale(runs_ahead, fixed_s=measured_s)
        launch_s = self.machine.device.launch_s if engine else 0.0
        if runs_ahead:
            launch_s = sum(layer.host_action_s(action.kind) for layer in layers) / sum(part.num_on_device for part in parts)
        return ActionScale(runs_ahead, measured_s / counted_s, launch_s)

    def _operator_seconds(self, operators: tuple[Operator, ...]) -> _OperatorSeconds:
        """Returns the times of `operators`. Computes them once for each tuple."""
        if id(operators) not in self._seconds_by_id:
            device = self.machine.device
            on_host = [operator for operator in operators if operator.is_on_host]
            on_device = [operator for operator in operators if not operator.is_on_host]
            host_s = times.host_operators_s(on_host, self.machine) if on_host else 0.0
            self._seconds_by_id[id(operators)] = _OperatorSeconds(
                host_s, times.device_operators_s(on_device, device), times.operators_s(on_device, device), len(on_device)
            )
        return self._seconds_by_id[id(operators)]

    def _make_exchange(self, event: BeginEvent, stage: int, counts: Counter[str], previous: Exchange | None) -> Exchange:
        """Returns the exchange or copy that `event` begins. counts: the numbers of exchanges of this stage so far, by axis;
        the number for the axis becomes part of the key, and is incremented. previous: an exchange that must end first, or None.
        """
        channel, members, cost, ports = self._exchange_parts(event.kind, event.axis, event.channel, event.num_bytes, stage)
        key: Hashable = event.axis, counts[event.axis], stage if len(members) == 1 else None
        counts[event.axis] += 1
        return Exchange(key, channel, members, *cost, links=ports, after=None if previous is None else previous.key)

    @times.memoize
    def _exchange_parts(
        self, kind: Collective | CopyDirection, axis: str, channel: str, num_bytes: int, stage: int
    ) -> tuple[str, tuple[int, ...], Cost, tuple[tuple[str, int], ...]]:
        """Returns the channel, the members, the cost and the links of an exchange or a copy of `stage`."""
        record = self.records[stage]
        members: tuple[int, ...] = (stage,)
        directions: tuple[str, ...] = (kind,)
        if kind == "to_host" or kind == "to_device":
            cost = copy_cost(kind, num_bytes, self.machine)
        else:
            group = record.groups[axis]
            cost = slowest_cost(kind, num_bytes, record.topology, axis, self.machine.links, group)
            members = tuple(sorted({record.topology.coordinates(rank).stage for rank in group}))
            directions = ("sends", "receives")
        ports = tuple((direction, member) for member in members for direction in directions)
        return f"{'all' if axis == 'all' else kind} {axis}.{channel}", members, cost, ports

    @times.memoize
    def _message_cost(self, position: int) -> Cost:
        ends = self.placement.holder(position).stage, self.placement.holder(position + 1).stage
        first = self.records[0]
        return slowest_message_cost(first.message_bytes[position], ends, first.topology, self.machine.links)


def list_instructions(
    stage: int,
    entries: LoweredList,
    placement: Placement,
    message_cost: Callable[[int], Cost],
    action_instructions: Callable[[Action], Iterable[Instruction]],
) -> Iterator[Instruction]:
    """Yields the program of a stage's action list: its messages, and for each action the wait for its input and its own
    instructions. message_cost: returns the cost of a message between a position and the next one.
    """
    for entry in entries:
        if isinstance(entry, Transfer):
            if entry.op == "send":
                position, sender, receiver = placement.position(entry.peer, entry.peer_chunk), stage, entry.peer
            else:
                position, sender, receiver = placement.position(stage, entry.chunk), entry.peer, stage
            message = Delivery(entry.flow, position, entry.micro)
            channel = f"{direction_of(sender, receiver)} {sender}>{receiver}"
            ports, cost = (
                (("sends", sender), ("receives", receiver)),
                message_cost(min(message.position, message.source_position)),
            )
            yield Exchange(message, channel, (sender, receiver), *cost, links=ports)
        elif entry.kind is not Kind.CHUNK_DONE:
            delivery = placement.input_of(entry, placement.position(stage, entry.chunk))
            if delivery is not None and placement.holder(delivery.source_position).stage != stage:
                yield Await(delivery)
            yield from action_instructions(entry)


@dataclass(frozen=True)
class PlanEstimate:
    """The estimated step of a plan, its layers in the order of the model, and the memory of each stage whose steps ran."""

    step: StepTime
    layers: Sequence[times.LayerEstimate]
    stage_bytes: Sequence[RankBytes]


def plan_for_machine(plan: Plan, machine: MachineFile) -> Plan:
    """Returns `plan` with `run.device` set to the machine's type of device."""
    device_type = machine.device.kind
    return plan if plan.run.device == device_type else replace_values(plan, {("run", "device"): device_type})


def estimate_plan(
    plan: Plan,
    world_size: int,
    machine: MachineFile,
    cores: int = 1,
    *,
    draft: Draft | None = None,
    all_stages: bool = False,
    max_bytes: float = math.inf,
) -> PlanEstimate:
    """Returns the estimate of a step of `plan` on `world_size` ranks of `machine`. A chunk takes its measured time if the times
    of all its layers are known, and the time of its operators otherwise.

    cores: the number of parallel processes. draft: rank 0's draft of `plan_for_machine(plan, machine)`; None builds it.
    all_stages: whether to run the steps of every stage, not only of one stage per kind of work. max_bytes: the limit of each
    rank's memory in bytes.

    Raises PlanError for each failed check of the plan; the errors of `run_stages`; PlanError "machine-matmul", "machine-links"
    or "machine-host" for a missing part of the machine file; PlanError "estimate-seconds" for an action that was not recorded.
    """
    plan = plan_for_machine(plan, machine)
    draft = draft or build_rank0_draft(plan, world_size)
    memory, records = record_stages(plan, world_size, draft, cores, all_stages=all_stages, max_bytes=max_bytes)
    layers = times.estimate_layers(plan, draft.model, draft.dataset, machine)
    seconds = {layer.name: layer.seconds for layer in layers if layer.seconds is not None}
    measured: MeasuredSeconds = {
        (stage, chunk): [seconds[layer.name] for layer in chunk_layers]
        for stage in range(len(records))
        for chunk, chunk_layers in enumerate(draft.stage.for_stage(stage).chunks)
        if all(layer.name in seconds for layer in chunk_layers)
    }
    num_microbatches, lists = plan.num_microbatches(plan.topology(world_size)), draft.stage.action_lists
    host_waits = machine.engine is not None and waits_before_updates(plan)
    builder = _ProgramBuilder(records, lists.placement, machine, measured, num_microbatches, host_waits)
    entries_by_stage = lists.lower_all_stages(num_microbatches)
    step = simulate_programs([list(builder.program(stage, entries)) for stage, entries in enumerate(entries_by_stage)])
    return PlanEstimate(step, layers, memory)


def record_stages(
    plan: Plan, world_size: int, draft: Draft, cores: int = 1, *, all_stages: bool = False, max_bytes: float = math.inf
) -> tuple[list[RankBytes], list[RankRecord]]:
    """Returns the memory of each stage whose steps ran, and a record for every stage. Raises the errors of `run_stages`."""
    representatives = representative_stages(plan, plan.topology(world_size), draft)
    stages = range(len(representatives)) if all_stages else sorted(set(representatives))
    results = run_stages(plan, world_size, stages, draft, cores, max_bytes=max_bytes)
    recorded = {stage: record for stage, (_, record) in zip(stages, results, strict=True)}
    records = [recorded[representative].for_stage(stage) for stage, representative in enumerate(representatives)]
    return [memory for memory, _ in results], records


def waits_before_updates(plan: Plan) -> bool:
    """Returns whether the host waits for its device before each update. It does if the update runs on the host, if there is a
    loss scale, or if the optimizer cannot skip an update on the device.
    """
    if plan.precision.loss_scale is not None or any(steps_on_host(manager.record) for manager in plan.offload):
        return True
    groups = [{"params": [nn.Parameter(torch.zeros(4, 4))]}]
    return not can_skip_on_device(plan.optimizer.build(groups, torch.device("cpu")))

"""Makes the programs of a simulated step from recorded steps, one per stage, and prices them on a machine.

Messages between stages come from the lists; other exchanges are those that the rank began, in its order. A rank stands for its
whole stage, since the ranks of a stage do the same at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sley_core.actions.action import Action, Kind, Lowered, Placement, Transfer, actions_of, direction_of
from sley_core.actions.simulate import Delivery, taken
from sley_estimate.layers.prices import LayerSeconds, device_seconds_of, seconds_of
from sley_estimate.layers.variants import once
from sley_estimate.step.lanes import Await, Begin, Compute, Exchange, Instruction, StepSeconds, simulate_programs
from sley_estimate.step.links import Cost, Ranks, copy_cost, groups_at_once, on_host_s, slowest, slowest_message
from sley_estimate.step.record import HOST, Awaited, Began, Computed, Events, RankRecord, expanded

if TYPE_CHECKING:
    from sley_core.engine.stage import Lists
    from sley_core.errors import SleyError
    from sley_estimate.layers.operators import Operator
    from sley_estimate.machine import MachineFile

Measured = Mapping[tuple[int, int], Sequence[LayerSeconds]]
"""Measured seconds of each layer, by stage and chunk."""


class Records(NamedTuple):
    """A recorded step of the first rank of each stage, and the lists of all stages for any number of micro-batches."""

    ranks: Sequence[RankRecord]
    lists: Lists


class Scale(NamedTuple):
    """How the measured seconds of an action are spread over its operators: a factor of their own seconds, seconds of an action
    without operators, and the host's seconds to start each.
    """

    factor: float = 1.0
    rest_s: float = 0.0
    start_s: float = 0.0


class _OperatorSeconds(NamedTuple):
    """Seconds of consecutive operators: on the host's cores, of which the host of a GPU takes started_s; on the device, and
    there with their starts. number: of the latter.
    """

    on_host_s: float
    started_s: float
    device_s: float
    with_starts_s: float
    number: int


def seconds_of_records(
    records: Records, num_micros: int, machine: MachineFile, measured: Measured | None = None, *, waits: bool = False
) -> StepSeconds:
    """Returns the simulated step of `num_micros` micro-batches.

    measured: seconds of layers, to which operators are scaled. waits: whether the host waits for its device before an update.
    Raises PlanError "machine-matmul", "machine-links" and "machine-host" for what the machine file lacks, "estimate-seconds"
    for an action that was not recorded.
    """
    pricing = _Pricing(records, machine, measured or {}, num_micros, waits=waits)
    lists = records.lists.of_all_stages(num_micros)
    return simulate_programs([list(pricing.program(stage, entries)) for stage, entries in enumerate(lists)])


class _Pricing:
    """Prices recorded steps. Where all layers of a chunk were measured, the operators of an action share their seconds."""

    def __init__(self, records: Records, machine: MachineFile, measured: Measured, num_micros: int, *, waits: bool) -> None:
        self.records = records.ranks
        self.placement = records.lists.placement
        self.machine = machine
        self.num_micros = num_micros
        self.waits = waits
        self._members: dict[tuple[str, int], tuple[int, ...] | SleyError] = {}
        self._groups: dict[tuple[str, int], list[Ranks] | SleyError] = {}
        self._measured = measured
        self._with_host = {place for place, layers in measured.items() if any(layer.host_forward for layer in layers)}
        self._known: dict[int, _OperatorSeconds | SleyError] = {}  # by `id` of operators, which the records hold

    def program(self, stage: int, entries: Lowered) -> Iterator[Instruction]:
        """Yields a stage's program: exchanges that the step before began, the opening, messages and actions of the lowered
        list, the closing, and the engine's seconds.
        """
        record = self.records[stage]
        computing = [action for action in actions_of(entries) if action.kind is not Kind.CHUNK_DONE]
        step = expanded(record.step, computing, record.more)
        awaited = {event.number for event in step.events if isinstance(event, Awaited)}
        begun: dict[int, Exchange] = {}
        counts: Counter[str] = Counter()

        def begin(began: Began) -> Begin:
            begun[began.number] = exchange = self._exchange(began, stage, counts, begun)
            return Begin(exchange)

        def instructions(events: Events, action: Action | None) -> Iterator[Instruction]:
            scale = Scale() if action is None else self._scale(events, stage, action)
            if scale.rest_s:
                yield Compute(scale.rest_s, action)
            for event in events:
                if isinstance(event, Computed):
                    seconds, host_s = self._computed_s(event.operators, stage, action, scale)
                    yield Compute(seconds, action, host_s)
                elif isinstance(event, Awaited):
                    yield Await(begun[event.number].key)
                elif event.number in awaited:  # others are awaited in the next step, at whose beginning they are `carried`
                    yield begin(event)

        yield from map(begin, step.carried)
        yield from instructions(step.opening, None)
        recorded = iter(step.actions)
        for entry in entries:
            if isinstance(entry, Transfer):
                yield Begin(message_exchange(entry, stage, self.placement, self._message))
            elif entry.kind is not Kind.CHUNK_DONE:
                action, events = next(recorded)
                assert action == entry, (action, entry)
                needed = taken(action, self.placement.position(stage, action.chunk), self.placement)
                if needed is not None and self.placement.holder(needed.origin).stage != stage:
                    yield Await(needed)
                yield from instructions(events, action)
        yield from instructions(step.closing, None)
        waited_s = self._engine_s(stage, 0) if self.waits else 0.0
        yield Compute(self.machine.device.step_s + waited_s, None, self._engine_s(stage, self.num_micros))

    def _engine_s(self, stage: int, num_micros: int) -> float:
        engine = self.machine.engine
        return engine.seconds(self.records[stage].num_trained, num_micros) if engine else 0.0

    def _scale(self, events: Events, stage: int, action: Action) -> Scale:
        layers = self._measured.get((stage, action.chunk))
        if layers is None:
            return Scale()
        parts = [self._operators_s(event.operators) for event in events if isinstance(event, Computed)]
        has_host = (stage, action.chunk) in self._with_host
        counted_s = sum(part.device_s if has_host else part.with_starts_s for part in parts)
        measured_s = sum(layer.of(action.kind) for layer in layers)
        if not counted_s:
            return Scale(1.0, measured_s)
        host_s = sum(layer.host_of(action.kind) for layer in layers)
        return Scale(measured_s / counted_s, 0.0, host_s / sum(part.number for part in parts))

    def _computed_s(
        self, operators: tuple[Operator, ...], stage: int, action: Action | None, scale: Scale
    ) -> tuple[float, float]:
        """Returns the seconds of consecutive operators, and the host's to start them where it runs ahead."""
        part, machine = self._operators_s(operators), self.machine
        if action is None:  # the engine's seconds include the host's for these
            device_s = part.device_s if machine.engine is not None else part.with_starts_s
            return part.on_host_s + device_s, part.started_s
        has_host = (stage, action.chunk) in self._with_host
        seconds = part.on_host_s + (part.device_s if has_host else part.with_starts_s) * scale.factor
        if machine.device.kind == "cpu":
            return seconds, 0.0
        start_s = scale.start_s if has_host else machine.device.launch_s if machine.engine else 0.0
        return seconds, part.started_s + start_s * part.number

    def _operators_s(self, operators: tuple[Operator, ...]) -> _OperatorSeconds:
        def price() -> _OperatorSeconds:
            device = self.machine.device
            on_host = [operator for operator in operators if operator.is_on_host]
            others = [operator for operator in operators if not operator.is_on_host]
            host_s = on_host_s(on_host, self.machine) if on_host else 0.0
            started_s = 0.0 if device.kind == "cpu" else host_s
            return _OperatorSeconds(
                host_s, started_s, device_seconds_of(others, device), seconds_of(others, device), len(others)
            )

        return once(self._known, id(operators), price)

    def _exchange(self, began: Began, stage: int, counts: Counter[str], begun: Mapping[int, Exchange]) -> Exchange:
        """Returns an exchange or copy. Members of a group over several stages begin its exchanges in one order, so its key is
        the axis and their count there.
        """
        record = self.records[stage]
        is_copy = began.axis == HOST
        members = (stage,) if is_copy else once(self._members, (began.axis, stage), lambda: _stages_of(record, began.axis))
        key: Hashable = ("exchange", stage, began.number)
        if len(members) > 1:
            key = began.axis, counts[began.axis]
            counts[began.axis] += 1
        links = self.machine.links
        if began.kind == "to_host" or began.kind == "to_device":
            cost = copy_cost(began.kind, began.num_bytes, self.machine)
        else:
            groups = once(
                self._groups,
                (began.axis, stage),
                lambda: groups_at_once(record.topology, began.axis, record.groups[began.axis], links),
            )
            cost = slowest(began.kind, began.num_bytes, groups, links)
        ways: tuple[str, ...] = (began.kind,) if is_copy else ("sends", "receives")
        before = begun.get(began.after) if began.after is not None else None
        return Exchange(
            key,
            f"{'all' if began.axis == 'all' else began.kind} {began.axis}.{began.lane}",
            members,
            *cost,
            links=tuple((way, member) for member in members for way in ways),
            after=None if before is None else before.key,
        )

    def _message(self, position: int) -> Cost:
        ends = self.placement.holder(position).stage, self.placement.holder(position + 1).stage
        first = self.records[0]
        return slowest_message(first.messages[position], ends, first.topology, self.machine.links)


def _stages_of(record: RankRecord, axis: str) -> tuple[int, ...]:
    return tuple(sorted({record.topology.coordinates(rank).stage for rank in record.groups[axis]}))


def message_exchange(entry: Transfer, stage: int, placement: Placement, cost: Callable[[int], Cost]) -> Exchange:
    """Returns the message of which `entry` is one end, at `stage`; equal at both ends. cost: by its lower position."""
    if entry.op == "send":
        position, sender, receiver = placement.position(entry.peer, entry.peer_chunk), stage, entry.peer
    else:
        position, sender, receiver = placement.position(stage, entry.chunk), entry.peer, stage
    delivery = Delivery(entry.flow, position, entry.micro)
    lane = f"{direction_of(sender, receiver)} {sender}>{receiver}"
    ports = ("sends", sender), ("receives", receiver)
    return Exchange(delivery, lane, (sender, receiver), *cost(min(delivery.position, delivery.origin)), links=ports)

"""Records one step of a rank, action by action: its operators, the starts of its exchanges, and its waits for them.

opening      before the first action
F0.0         ComputeEvent, BeginEvent(gather of the next layer), ComputeEvent, WaitEvent(gather), ComputeEvent ...
B0.0         ... ComputeEvent, BeginEvent(reduction), ComputeEvent
closing      waits of gradient handlers, norm, update, and the gathers that the next step waits for

`expand_step` builds a step with many microbatches from a recorded step with few.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sley_core.actions.action import Action, Kind, Transfer
from sley_core.comm.device import storage_id
from sley_core.errors import PlanError
from sley_core.protocols import Collective
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.layers.operators import Operator, describe_operator
from sley_estimate.machine import CopyDirection
from sley_trainer.run import Run

HOST = "host"  # replaces the axis of a process group in records of copies between a device and its host
MESSAGES = "pp"  # the axis of messages between stages, which are not recorded, since the action lists contain them


@dataclass(frozen=True)
class ComputeEvent:
    """An event of a recorded step: the rank ran `operators` one after another."""

    operators: tuple[Operator, ...]


Queue = tuple[str, str]  # axis and channel; exchanges of one queue run one after another


class ExchangeReference(NamedTuple):
    """Refers to an exchange by its distance from the end of its queue at the event. The newest exchange has distance 1."""

    queue: Queue
    distance: int


@dataclass(frozen=True)
class BeginEvent:
    """An event of a recorded step: the rank began an exchange on `channel` of its group along `axis`. With the `HOST` axis, it
    began a copy on the stream with the number `channel`. num_bytes: the size of the full tensors. after: a copy that must end
    first, or None.
    """

    kind: Collective | CopyDirection
    axis: str
    channel: str
    num_bytes: int
    after: ExchangeReference | None = None

    @property
    def queue(self) -> Queue:
        """Returns the axis and the channel of the exchange."""
        return self.axis, self.channel


@dataclass(frozen=True)
class WaitEvent:
    """An event of a recorded step: the rank waited for `exchange`. Later waits for the same exchange are not recorded."""

    exchange: ExchangeReference


Event = ComputeEvent | BeginEvent | WaitEvent
Events = tuple[Event, ...]


@dataclass(frozen=True)
class RecordedStep:
    """The events of one step of one rank. opening, closing: the events before the first action and after the action list.
    carried_exchanges: for each queue, the first exchange of an earlier step for which this step waited, and all after it.
    """

    opening: Events
    actions: Sequence[tuple[Action, Events]]
    closing: Events
    carried_exchanges: Sequence[BeginEvent] = ()


@dataclass(frozen=True)
class RankRecord:
    """A recorded step of a rank, and facts about its run. groups: the global ranks of the rank's groups, by axis.
    message_bytes: the size of the output of each position (a chunk's place in the model) except the last. num_trained: the
    number of parameter tensors that the rank trains.
    """

    step: RecordedStep
    topology: Topology
    groups: Mapping[str, tuple[int, ...]]
    message_bytes: Sequence[int]
    num_trained: int

    def for_stage(self, stage: int) -> "RankRecord":
        """Returns a copy of this record for the first rank of `stage`. `stage` must do the same work as the recorded stage."""
        stage_ranks = set(self.groups["stage"])
        shift = stage * self.topology.ranks_per_stage - min(stage_ranks)
        groups = {
            axis: tuple(rank + shift for rank in ranks) if stage_ranks.issuperset(ranks) else ranks
            for axis, ranks in self.groups.items()
        }
        return replace(self, groups=groups)


class Recording:
    """Records a step of a fake run, from `begin` to `end`. Numbers earlier exchanges too, since the step may wait for them."""

    def __init__(self, tensors: FakeTensors) -> None:
        self._tensors = tensors
        self._exchanges: list[BeginEvent] = []
        self._queues: dict[Queue, list[int]] = defaultdict(list)
        self._carried: dict[Queue, int] = {}
        self._awaited: set[int] = set()
        self._first = 0
        self._is_recording = False
        self._host_storage_ids: set[int] = set()
        self._operator_by_key: dict[Hashable, Operator | None] = {}
        self._entry: object = None
        self._operators: list[Operator] = []
        self._opening: list[Event] = []
        self._closing: list[Event] = []
        self._actions: list[tuple[Action, list[Event]]] = []
        self._events = self._opening

    def begin(self, run: Run) -> None:
        """Starts recording. Call it before a step of `run`."""
        master_weights = run.stepper.update.masters
        if master_weights.device is not None:
            self._host_storage_ids = {storage_id(entry.parameter) for entry in master_weights.local_params}
        self._first = len(self._exchanges)
        self._is_recording = True
        run.groups.progress.step_progress.on_entry = self._record_entry
        self._tensors.listener = self._record_operator

    def end(self, run: Run) -> RankRecord:
        """Stops recording, and returns the record of the step."""
        self._tensors.listener = None
        self._flush_operators()
        self._is_recording = False
        numbers = (
            number for queue, first in self._carried.items() for number in self._queues[queue] if first <= number < self._first
        )
        step = RecordedStep(
            tuple(self._opening),
            [(action, tuple(events)) for action, events in self._actions],
            tuple(self._closing),
            [self._exchanges[number] for number in sorted(numbers)],
        )
        placement, describe_output = run.stepper.lists.placement, run.parts.describe_output
        message_bytes = []
        if describe_output is not None:
            for position in range(placement.num_positions - 1):
                leaves = describe_output(*placement.holder(position)).leaves
                message_bytes.append(sum(leaf.num_bytes for leaf in leaves if leaf.same_as is None))
        groups = {axis: group.ranks for axis, group in run.groups.items()}
        return RankRecord(step, run.topology, groups, message_bytes, len(run.parts.registry.trainable))

    def _reference(self, number: int) -> ExchangeReference:
        """Returns a reference to exchange `number` that is valid at the next event."""
        queue = self._exchanges[number].queue
        return ExchangeReference(queue, len(self._queues[queue]) - self._queues[queue].index(number))

    def record_kernel(self, operator: Operator) -> None:
        """Records a kernel that torch does not see as one operator, if it runs between `begin` and `end`."""
        if self._is_recording:
            self._operators.append(operator)

    def on_exchange(self, collective: Collective, axis: str, channel: str, num_bytes: int) -> Callable[[], None]:
        """Records the start of an exchange of `num_bytes` bytes. Returns a function to call when the rank waits for it."""
        if axis == MESSAGES:
            return lambda: None
        number = self._record_exchange(BeginEvent(collective, axis, channel, num_bytes))
        return lambda: self.on_wait(number)

    def on_copy(self, direction: CopyDirection, stream: int, num_bytes: int, previous: int | None) -> int:
        """Records a copy on a stream, and returns the copy's number. previous: the copy that must end first, or None."""
        is_in_step = previous is not None and previous >= self._first
        after = self._reference(previous) if previous is not None and is_in_step else None
        return self._record_exchange(BeginEvent(direction, HOST, str(stream), num_bytes, after))

    def on_wait(self, number: int) -> None:
        """Records the first wait of the device or the host for exchange or copy `number`. Ignores all later waits for it."""
        if number in self._awaited:
            return
        self._awaited.add(number)
        if self._is_recording:
            self._flush_operators()
            reference = self._reference(number)
            if number < self._first:
                self._carried[reference.queue] = min(number, self._carried.get(reference.queue, number))
            self._events.append(WaitEvent(reference))

    def _record_entry(self, entry: object) -> None:
        """Handles the start of `entry`: an action, a transfer, or the name of a part of the step outside the action list."""
        self._flush_operators()
        self._entry = entry
        if isinstance(entry, Action):
            if entry.kind is not Kind.CHUNK_DONE:  # exchanges that start in CHUNK_DONE belong to the chunk's last action
                self._actions.append((entry, []))
            self._events = self._actions[-1][1]
        elif not isinstance(entry, Transfer) and self._actions:
            self._events = self._closing

    def _record_operator(self, key: Hashable | None, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records one call of torch's `func`, except in transfers. key: equal for calls with equal work; None if unknown."""
        if isinstance(self._entry, Transfer):
            return
        try:
            operator = self._operator_by_key[key]
        except KeyError:
            operator = describe_operator(func, args, kwargs, result)
            if key is not None:
                self._operator_by_key[key] = operator
        if operator is not None:
            is_on_host = bool(self._host_storage_ids) and any(
                isinstance(leaf, Tensor) and storage_id(leaf) in self._host_storage_ids for leaf in tree_leaves(args)
            )
            self.record_kernel(replace(operator, is_on_host=True) if is_on_host else operator)

    def _record_exchange(self, event: BeginEvent) -> int:
        """Numbers the exchange or copy of `event`, and returns its number. Records `event` if it is in the recorded step."""
        number = len(self._exchanges)
        if self._is_recording:
            self._flush_operators()
            self._events.append(event)
        self._exchanges.append(event)
        self._queues[event.queue].append(number)
        return number

    def _flush_operators(self) -> None:
        """Records the operators since the last event as one ComputeEvent, if there are any."""
        if self._operators:
            self._events.append(ComputeEvent(tuple(self._operators)))
            self._operators = []


def expand_step(step: RecordedStep, actions: Sequence[Action]) -> RecordedStep:
    """Returns a copy of `step` in which `actions` replace its actions. Each action gets the events of a recorded action of the
    same kind and chunk, preferably of the same action, else of one that has the same neighbours and the same place, first or
    last, in its chunk. Raises PlanError "estimate-seconds" if no action of this kind and chunk was recorded.
    """
    if list(actions) == [action for action, _ in step.actions]:
        return step
    recorded_keys = _neighbour_keys([action for action, _ in step.actions])
    events_by_key = {key: events for (_, events), keys in zip(step.actions, recorded_keys, strict=True) for key in keys}
    expanded_actions = []
    for action, keys in zip(actions, _neighbour_keys(actions), strict=True):
        key = next((key for key in keys if key in events_by_key), None)
        if key is None:
            raise PlanError("estimate-seconds", f"no action like {action} was recorded")
        expanded_actions.append((action, events_by_key[key]))
    return replace(step, actions=expanded_actions)


def _neighbour_keys(actions: Sequence[Action]) -> Iterator[list[Hashable]]:
    """Yields, for each action, the keys by which to look up a similar action, the most specific first."""
    last = {action.chunk: index for index, action in enumerate(actions) if action.kind.makes_gradients}
    first: dict[tuple[Kind, int], int] = {}
    for index, action in enumerate(actions):
        first.setdefault((action.kind, action.chunk), index)
    action_keys = [None, *((action.kind, action.chunk) for action in actions), None]
    for index, action in enumerate(actions):
        action_key = action.kind, action.chunk
        ends = first[action_key] == index, last.get(action.chunk) == index
        yield [
            (action, ends, *actions[max(0, index - 1) : index + 2]),
            (action_key, ends, action_keys[index], action_keys[index + 2]),
            (action_key, ends, action_keys[index + 2]),
            (action_key, ends),
            action_key,
        ]

"""Records one step of a rank, action by action: the operators that ran, the exchanges that began, the waits for them.

opening      before the first action
F0.0         Computed, Began(gather of the next layer), Computed, Awaited(gather), Computed ...
B0.0         ... Computed, Began(reduction), Computed
closing      handlers' waits, norm, update, and the gathers that the next step waits for

`expanded` makes a step of many micro-batches from a recorded one of few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sley_core.actions.action import Action, Kind, Transfer
from sley_core.comm.copies import storage_id
from sley_core.errors import PlanError
from sley_core.protocols import Collective
from sley_core.run import Run
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.fake_world import CopyKind, FakeDevice, StepListener, TakenSteps
from sley_estimate.layers.operators import Operator, operator_of

HOST = "host"  # the axis of copies between a device and its host: no group, the rank alone
MESSAGES = "pp"  # the axis of messages, which the lists have already


@dataclass(frozen=True)
class Computed:
    """The rank ran `operators`, one after the other."""

    operators: tuple[Operator, ...]


Queue = tuple[str, str]  # axis and lane: exchanges of one queue run one after another


class Earlier(NamedTuple):
    """An exchange that began before: the `back`-th from the end of its queue at that time; 1 is the last."""

    queue: Queue
    back: int


@dataclass(frozen=True)
class Began:
    """The rank began an exchange of `num_bytes` (of whole tensors) on a lane of its group of `axis`, or a copy on stream `lane`
    of the axis `HOST`. after: a copy that comes first.
    """

    kind: Collective | CopyKind
    axis: str
    lane: str
    num_bytes: int
    after: Earlier | None = None

    @property
    def queue(self) -> Queue:
        return self.axis, self.lane


@dataclass(frozen=True)
class Awaited:
    """The rank waited for an exchange, for the first time."""

    exchange: Earlier


_Raw = Computed | tuple[Literal["began", "awaited"], int]  # operators, or what was done with the exchange of a number

Event = Computed | Began | Awaited
Events = tuple[Event, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank. actions: with their events. carried: exchanges of the step before that this one waited for."""

    opening: Events
    actions: Sequence[tuple[Action, Events]]
    closing: Events
    carried: Sequence[Began] = ()

    @property
    def events(self) -> list[Event]:
        return [*self.opening, *(event for _, events in self.actions for event in events), *self.closing]


@dataclass(frozen=True)
class RankRecord:
    """A recorded step, and facts of the run. groups: global ranks of this rank's groups, by axis. messages: bytes that each
    position of the model but the last hands on. layers: names, by chunk. num_trained: parameters. more: steps of alike stages.
    """

    step: RecordedStep
    topology: Topology
    groups: Mapping[str, tuple[int, ...]]
    messages: Sequence[int]
    layers: Sequence[Sequence[str]]
    num_trained: int
    more: Sequence[RecordedStep] = ()

    def on_stage(self, stage: int, layers: Sequence[Sequence[str]], more: Sequence[RecordedStep]) -> RankRecord:
        """Returns the record of the first rank of an alike stage, with the names of its layers."""
        size = self.topology.ranks_per_stage
        here = min(self.groups["stage"])
        own, shift = range(here, here + size), stage * size - here
        shifted = {
            axis: tuple(rank + shift for rank in ranks) if set(ranks) <= set(own) else ranks
            for axis, ranks in self.groups.items()
        }
        return replace(self, groups=shifted, layers=layers, more=more)


class Recording(StepListener):
    """Records the last step of a fake run: `follow` the run, `begin` and `end` around the step, then read `record`. Exchanges
    before it are numbered too, since the step may wait for them.
    """

    record: RankRecord

    def follow(self, run: Run, tensors: FakeTensors) -> None:
        """Listens to `run`, which has taken no step yet; forgets an earlier run."""
        self._run, self._tensors = run, tensors
        self._all: list[Began] = []
        self._after: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._first = 0
        self._is_recording = False
        self._on_host: set[int] = set()
        self._known: dict[Hashable, Operator | None] = {}
        self._entry: object = None
        self._operators: list[Operator] = []
        self._opening: list[_Raw] = []
        self._closing: list[_Raw] = []
        self._actions: list[tuple[Action, list[_Raw]]] = []
        self._events = self._opening
        device, simulation = run.world.device, run.world.simulation
        assert isinstance(device, FakeDevice), device
        assert isinstance(simulation, TakenSteps), simulation
        simulation.listener = device.copies.listener = self

    def begin(self) -> None:
        masters = self._run.stepper.update.masters
        if masters.home is not None:
            self._on_host = {storage_id(each.parameter) for each in masters.stepped}
        self._first = len(self._all)
        self._is_recording = True
        self._run.groups.progress.step_progress.follow = self._entered
        self._tensors.listener = self._ran

    def end(self) -> None:
        run, self._tensors.listener = self._run, None
        self._end_work()
        self._is_recording = False
        step = self._step()
        placement, described = run.stepper.lists.placement, run.parts.foretold
        messages = []
        if described is not None:
            for position in range(placement.num_positions - 1):
                leaves = described(*placement.holder(position)).leaves
                messages.append(sum(leaf.num_bytes for leaf in leaves if leaf.same_as is None))
        self.record = RankRecord(
            step,
            run.topology,
            {axis: group.ranks for axis, group in run.groups.items()},
            messages,
            [[layer.name for layer in chunk] for chunk in run.stepper.executor.chunks],
            len(run.parts.registry.trainable),
        )
        del self._run

    def _step(self) -> RecordedStep:
        """Returns what was recorded, with each exchange that is referred to as a place in its queue."""
        lists = [self._opening, *(events for _, events in self._actions), self._closing]
        raw = [each for events in lists for each in events if not isinstance(each, Computed)]
        carried = [number for what, number in raw if what == "awaited" and number < self._first]
        queues: dict[Queue, list[int]] = defaultdict(list)
        for number in carried:
            queues[self._all[number].queue].append(number)

        def earlier(number: int | None) -> Earlier | None:
            queue = queues[self._all[number].queue] if number is not None else []
            return Earlier(self._all[number].queue, len(queue) - queue.index(number)) if number in queue else None

        def event(each: _Raw) -> Event:
            if isinstance(each, Computed):
                return each
            what, number = each
            if what == "awaited":
                exchange = earlier(number)
                assert exchange is not None, self._all[number]
                return Awaited(exchange)
            began = replace(self._all[number], after=earlier(self._after.get(number)))
            queues[began.queue].append(number)
            return began

        opening, *actions, closing = [tuple(map(event, events)) for events in lists]
        named = [(action, events) for (action, _), events in zip(self._actions, actions, strict=True)]
        return RecordedStep(opening, named, closing, [self._all[number] for number in carried])

    def note(self, operator: Operator) -> None:
        """Records a kernel that torch does not see as one operator; ignored before `begin`."""
        if self._is_recording:
            self._operators.append(operator)

    def began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        if axis == MESSAGES:
            return lambda: None
        number = self._begin(Began(kind, axis, lane, num_bytes))
        return lambda: self.awaited(number)

    def copied(self, kind: CopyKind, stream: int, num_bytes: int, after: int | None) -> int:
        if after is not None:
            self._after[len(self._all)] = after
        return self._begin(Began(kind, HOST, str(stream), num_bytes))

    def awaited(self, number: int) -> None:
        if number in self._awaited:
            return
        self._awaited.add(number)
        if self._is_recording:
            self._end_work()
            self._events.append(("awaited", number))

    def _entered(self, entry: object) -> None:
        """Is called when another entry of the step begins: an action, a transfer, or a text for a part after the list."""
        self._end_work()
        self._entry = entry
        if isinstance(entry, Action):
            if entry.kind is not Kind.CHUNK_DONE:  # what begins there belongs to the chunk's last action
                self._actions.append((entry, []))
            self._events = self._actions[-1][1]
        elif not isinstance(entry, Transfer) and self._actions:
            self._events = self._closing

    def _ran(self, key: Hashable | None, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records one call of torch's operator `func`, outside of transfers. key: equal for equal calls on equal shapes."""
        if isinstance(self._entry, Transfer):
            return
        try:
            operator = self._known[key]
        except KeyError:
            operator = operator_of(func, args, kwargs, result)
            if key is not None:
                self._known[key] = operator
        if operator is not None:
            is_on_host = bool(self._on_host) and any(
                isinstance(leaf, Tensor) and storage_id(leaf) in self._on_host for leaf in tree_leaves(args)
            )
            self.note(replace(operator, is_on_host=True) if is_on_host else operator)

    def _begin(self, began: Began) -> int:
        number = len(self._all)
        self._all.append(began)
        if self._is_recording:
            self._end_work()
            self._events.append(("began", number))
        return number

    def _end_work(self) -> None:
        if self._operators:
            self._events.append(Computed(tuple(self._operators)))
            self._operators = []


def expanded(step: RecordedStep, actions: Sequence[Action], more: Sequence[RecordedStep] = ()) -> RecordedStep:
    """Returns `step` as a step of the compute actions `actions`; itself if these are its own. Pure.

    Each action gets the events of a recorded one with the same neighbours and the same place (first or last) in its chunk; else
    of the last recorded one of its kind and chunk. Waits keep their distance in the queue. more: steps of alike stages, for
    places that `step` does not have. Raises PlanError "estimate-seconds" for an action of a kind or chunk that was not
    recorded.
    """
    if list(actions) == [action for action, _ in step.actions]:
        return step
    known: dict[Hashable, Events] = {}
    for each in (*more, step):
        for (_, events), places in zip(each.actions, _places([action for action, _ in each.actions]), strict=True):
            for place in places:
                known[place] = events
    expanded_actions = []
    for action, places in zip(actions, _places(actions), strict=True):
        place = next((place for place in places if place in known), None)
        if place is None:
            raise PlanError("estimate-seconds", f"no action like {action} was recorded")
        expanded_actions.append((action, known[place]))
    return replace(step, actions=expanded_actions)


def _places(actions: Sequence[Action]) -> Iterator[list[Hashable]]:
    """Yields for each action keys of its place, the most exact first."""
    last = {action.chunk: at for at, action in enumerate(actions) if action.kind.makes_gradients}
    first: dict[tuple[Kind, int], int] = {}
    for at, action in enumerate(actions):
        first.setdefault((action.kind, action.chunk), at)
    kinds = [None, *((action.kind, action.chunk) for action in actions), None]
    for at, action in enumerate(actions):
        own = action.kind, action.chunk
        ends = first[own] == at, last.get(action.chunk) == at
        yield [(own, ends, kinds[at], kinds[at + 2]), (own, ends, kinds[at + 2]), (own, ends), own]

"""Makes programs of all stages from their lowered lists: the same lists that run, with what each action takes.

The ranks of a stage do the same at the same time, so one of them stands for all. Stages meet in the messages between them, in
sums of what several hold, and in the norm at the end of the step.

    list of a stage   post B0 > F0.0 > send F0 > ... > B0.3 > C0
    program           Begin   Compute  Begin     ...   Await, Compute, Begin(sum) ... Await(sum), Compute(update)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Lowered, Placement, Transfer, direction_of
from sley_core.actions.simulate import Delivery, taken
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import NOTHING, Cost
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange, Word

Use = tuple[int, int]
"""A layer of a stage: its chunk, and its number within that."""


@dataclass(frozen=True)
class GradientExchange:
    """What a stage exchanges of gradients or weights, once a step.

    handler: exchanges that start at the end of the list do so handler by handler. starts: after the last backwards of all of
    `uses` ("ready"), at the end of the list ("finish"), or with the step ("updated"): weights that the step before has
    updated, which come before the first forwards of `uses`. lane: its communicator. members: the stages that hold it, with
    `key` alike on all of them; () for this one alone.
    """

    cost: Cost
    starts: Literal["ready", "finish", "updated"] = "finish"
    uses: tuple[Use, ...] = ()
    handler: int = 0
    lane: str = "reduce"
    members: tuple[int, ...] = ()
    key: Hashable = None


@dataclass(frozen=True)
class StepWork:
    """What a step does, beside its lists. parts: layers of each position of the model, in order.

    messages: cost of the value between position i and i + 1, and of its gradient. gradients, update_s: of each stage.
    together: cost of what all stages sum before the update (norm, loss). after_s: seconds of every stage at the end. host_s:
    seconds of the host of each stage beside its layers.
    """

    parts: Sequence[Sequence[LayerSeconds]]
    messages: Sequence[Cost]
    gradients: Mapping[int, Sequence[GradientExchange]] = field(default_factory=dict)
    update_s: Mapping[int, float] = field(default_factory=dict)
    together: Cost = NOTHING
    after_s: float = 0.0
    host_s: Mapping[int, float] = field(default_factory=dict)


def programs_of(lists: Sequence[Lowered], placement: Placement, work: StepWork) -> list[list[Word]]:
    """Returns one program per stage: its list, with the seconds, messages and exchanges of `work`. Pure."""
    found = []
    for stage, steps in enumerate(lists):
        first, last = firsts_of(steps), lasts_of(steps)
        found.append(list(StageWords(stage, placement, work, len(lists), first, last).words(steps)))
    return found


def firsts_of(steps: Lowered) -> dict[int, Action]:
    """Returns the first forward of each chunk of a list, by chunk."""
    return {step.chunk: step for step in reversed(steps) if isinstance(step, Action) and step.kind is Kind.FORWARD}


def lasts_of(steps: Lowered) -> dict[int, Action]:
    """Returns the last action of each chunk of a list that changes gradients, by chunk."""
    return {step.chunk: step for step in steps if isinstance(step, Action) and step.kind in GRADIENT_KINDS}


class StageWords:
    """The words of a stage's program, piece by piece. first, last: of each chunk its first forward and its last action that
    changes gradients; where these stand, exchanges of weights are waited for, and sums start.
    """

    def __init__(
        self,
        stage: int,
        placement: Placement,
        work: StepWork,
        stages: int,
        first: Mapping[int, Action],
        last: Mapping[int, Action],
    ) -> None:
        self.stage = stage
        self.placement = placement
        self.work = work
        self.stages = stages
        self.first = first
        self.last = last
        self.gradients = work.gradients.get(stage, ())
        self.left = {number: set(one.uses) for number, one in enumerate(self.gradients) if one.starts == "ready"}
        self.awaited: set[int] = set()
        self._of_use: dict[tuple[str, Use], list[int]] = defaultdict(list)
        for number, one in enumerate(self.gradients):
            for use in dict.fromkeys(one.uses):
                self._of_use[one.starts, use].append(number)

    def words(self, steps: Lowered) -> Iterator[Word]:
        """Yields the whole program of `steps`, the stage's lowered list: what comes before it, messages and actions, what comes
        after.
        """
        yield from self.head()
        for step in steps:
            if isinstance(step, Transfer):
                yield Begin(message_exchange(step, self.stage, self.placement, self.work.messages.__getitem__))
            elif step.kind is not Kind.CHUNK_DONE:
                yield from self.action(step)
        yield from self.tail()

    def head(self) -> Iterator[Word]:
        """Yields what comes before the list: the beginnings of exchanges of weights that the step before has updated."""
        yield from self._begin_all("updated", range(len(self.gradients)))

    def tail(self) -> Iterator[Word]:
        """Yields what comes after the list, whose actions must have been yielded: handler by handler, the exchanges that start
        there and the waits for all of its; the sum over all stages; the seconds of the update.
        """
        assert not any(self.left.values()), f"gradients of {self.left} never came"
        for handler in sorted({one.handler for one in self.gradients}):
            own = [number for number, one in enumerate(self.gradients) if one.handler == handler]
            yield from self._begin_all("finish", own)
            yield from self._wait_for(own)
        if self.stages > 1:
            everyone = Exchange("norm", "all", tuple(range(self.stages)), *self.work.together)
            yield from (Begin(everyone), Await(everyone.key))
        rest, host_s = (
            self.work.update_s.get(self.stage, 0.0) + self.work.after_s,
            self.work.host_s.get(self.stage, 0.0),
        )
        if rest or host_s:
            yield Compute(rest, None, host_s)

    def _begin_all(self, starts: str, numbers: Iterable[int]) -> Iterator[Word]:
        """Yields the beginnings of those of the exchanges `numbers` that start at `starts`."""
        yield from (Begin(self._exchange(number)) for number in numbers if self.gradients[number].starts == starts)

    def _wait_for(self, numbers: Iterable[int]) -> Iterator[Word]:
        """Yields a wait for each of the exchanges `numbers` that was not waited for before, and notes that it was."""
        for number in numbers:
            if number not in self.awaited:
                self.awaited.add(number)
                yield Await(self._exchange(number).key)

    def action(self, action: Action) -> Iterator[Word]:
        """Yields an action: the wait for a message that it needs, the seconds of its layers, and between them waits for weights
        at the first forward of a chunk, and beginnings of sums at the last action that changes the chunk's gradients.
        """
        position = self.placement.position(self.stage, action.chunk)
        needed = taken(action, position, self.placement)
        if needed is not None and self.placement.holder(needed.origin).stage != self.stage:
            yield Await(needed)
        layers = self.work.parts[position]
        numbers = range(len(layers))
        pending_s = host_s = 0.0
        for at in numbers if action.kind is Kind.FORWARD else reversed(numbers):
            use = action.chunk, at
            before = list(self._wait_for(self._due(use))) if self.first.get(action.chunk) == action else []
            if before:
                yield Compute(pending_s, action, host_s)
                yield from before
                pending_s = host_s = 0.0
            pending_s += layers[at].of(action.kind)
            host_s += layers[at].host_of(action.kind)
            ready = self._ready(use) if self.last.get(action.chunk) == action else []
            if ready:
                yield Compute(pending_s, action, host_s)
                yield from (Begin(self._exchange(number)) for number in ready)
                pending_s = host_s = 0.0
        yield Compute(pending_s, action, host_s)

    def _due(self, use: Use) -> list[int]:
        """Returns the numbers of the exchanges of weights for which the first forward of a layer waits. use: its chunk, and its
        number there.
        """
        return self._of_use.get(("updated", use), [])

    def _ready(self, use: Use) -> list[int]:
        """Returns the numbers of the exchanges that may start now that the last backward of a layer is done: those of which it
        was the last layer. Notes that it is done.
        """
        found = []
        for number in self._of_use.get(("ready", use), []):
            left = self.left[number]
            left.discard(use)
            if not left:
                found.append(number)
        return found

    def _exchange(self, number: int) -> Exchange:
        """Returns exchange number `number` of the stage as the simulator takes it: with its members, its key, equal on all of
        them, and the links of each member in both directions.
        """
        one = self.gradients[number]
        members = one.members or (self.stage,)
        key: Hashable = ("gradients", self.stage, number) if one.key is None else one.key
        ports = [(way, member) for member in members for way in ("sends", "receives")]
        return Exchange(key, one.lane, members, *one.cost, links=tuple(ports))


def message_exchange(entry: Transfer, stage: int, placement: Placement, cost: Callable[[int], Cost]) -> Exchange:
    """Returns the message of which `entry` is one end, at `stage`; equal at both of its ends.

    cost: of what crosses between positions i and i + 1 of the model, given i.
    """
    if entry.op == "send":
        position, sender, receiver = placement.position(entry.peer, entry.peer_chunk), stage, entry.peer
    else:
        position, sender, receiver = placement.position(stage, entry.chunk), entry.peer, stage
    delivery = Delivery(entry.flow, position, entry.micro)
    lane = f"{direction_of(sender, receiver)} {sender}>{receiver}"
    ports = ("sends", sender), ("receives", receiver)
    return Exchange(delivery, lane, (sender, receiver), *cost(min(delivery.position, delivery.origin)), links=ports)

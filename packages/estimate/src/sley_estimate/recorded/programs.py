"""Makes programs for the simulator from recorded steps, one of each stage: what was written down, with what it takes on a
machine.

Messages between stages come from the lists themselves; all other exchanges are those that the rank began, in its own order. A
rank stands for all of its stage: what it exchanges with them starts when it starts it, since they do the same at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sley_core.actions.action import Action, Kind, Lowered, Placement, Transfer, actions_of, direction_of
from sley_core.actions.simulate import Delivery, taken
from sley_estimate.layers.operators import Operator
from sley_estimate.recorded.expand import expanded
from sley_estimate.recorded.words import HOST, Awaited, Began, RecordedStep, Words, Worked
from sley_estimate.seconds.links import Cost
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange, Program
from sley_estimate.seconds.program import Word as ProgramWord


class Share(NamedTuple):
    """What an action's operators have of its measured seconds: the factor of what they take by themselves; seconds beside them,
    of an action without operators, as one that takes time and changes no tensor; seconds of the host to start each.
    """

    factor: float
    rest_s: float
    start_s: float


NOT_MEASURED = Share(1.0, 0.0, 0.0)
"""Operators take what they take by themselves."""


@dataclass(frozen=True)
class Prices:
    """Tells what things take. share: the share of an action's words in its measured seconds. worked: seconds of operators that
    follow each other on a stage, in an action with this share or (None) outside of any, and of the host, where it runs ahead,
    to start them.

    exchange: cost of an exchange that a stage began. members: the stages that meet in the group of an axis that a stage is in.
    message: cost of the value between positions i and i + 1. after_s: seconds of a stage that end its step and belong to
    nothing else. host_s: of the host of a stage for what belongs to no operator.
    """

    share: Callable[[Words, int, Action], Share]
    worked: Callable[[tuple[Operator, ...], int, Action | None, Share], tuple[float, float]]
    exchange: Callable[[Began, int], Cost]
    members: Callable[[str, int], tuple[int, ...]]
    message: Callable[[int], Cost]
    after_s: Callable[[int], float]
    host_s: Callable[[int], float]


def recorded_programs(
    steps: Mapping[int, Sequence[RecordedStep]], lists: Sequence[Lowered], placement: Placement, prices: Prices
) -> list[Program]:
    """Returns one program per stage: its lowered list in `lists`, with what the recorded step of the stage did in each action,
    and what that takes. Pure.

    steps: by stage, of it or of alike ones, of any number of micro-batches. Raises PlanError "estimate-seconds" for an action
    of a kind or chunk that was not recorded.
    """
    return [
        list(
            _RecordedStage(
                stage, expanded(steps[stage][0], _computing(entries), steps[stage][1:]), entries, placement, prices
            ).program()
        )
        for stage, entries in enumerate(lists)
    ]


def _computing(entries: Lowered) -> list[Action]:
    """Returns the actions of a list that compute."""
    return [action for action in actions_of(entries) if action.kind is not Kind.CHUNK_DONE]


class _RecordedStage:
    def __init__(self, stage: int, step: RecordedStep, entries: Lowered, placement: Placement, prices: Prices) -> None:
        self.stage = stage
        self.step = step
        self.entries = entries
        self.placement = placement
        self.prices = prices
        self.begun: dict[int, Exchange] = {}
        self.meetings: Counter[str] = Counter()
        awaited = {word.number for word in step.words if isinstance(word, Awaited)}
        # what nobody waits for in this step, the next one waits for: it stands at the beginning of a step, not at its end
        self.left = {word.number for word in step.words if isinstance(word, Began)} - awaited

    def program(self) -> Iterator[ProgramWord]:
        """Yields the stage's program: exchanges that the step before began, the opening, messages and actions of the list, the
        closing, and the seconds that belong to nothing else.
        """
        for one in self.step.carried:
            yield self._begin(one)
        yield from self._words(self.step.opening, None)
        done = iter(self.step.actions)
        for entry in self.entries:
            if isinstance(entry, Transfer):
                yield Begin(message_exchange(entry, self.stage, self.placement, self.prices.message))
            elif entry.kind is not Kind.CHUNK_DONE:
                action, words = next(done)
                assert action == entry, (action, entry)
                yield from self._needs(action)
                yield from self._words(words, action)
        yield from self._words(self.step.closing, None)
        yield Compute(self.prices.after_s(self.stage), None, self.prices.host_s(self.stage))

    def _needs(self, action: Action) -> Iterator[ProgramWord]:
        """Yields the wait for the message that an action needs from another stage, if it needs one."""
        needed = taken(action, self.placement.position(self.stage, action.chunk), self.placement)
        if needed is not None and self.placement.holder(needed.origin).stage != self.stage:
            yield Await(needed)

    def _words(self, words: Words, action: Action | None) -> Iterator[ProgramWord]:
        """Yields recorded words as those of a program. An exchange that nobody waits for in this step is left out: the next
        step's beginning stands for it.
        """
        share = NOT_MEASURED if action is None else self.prices.share(words, self.stage, action)
        if share.rest_s:
            yield Compute(share.rest_s, action)
        for word in words:
            if isinstance(word, Worked):
                seconds, host_s = self.prices.worked(word.operators, self.stage, action, share)
                yield Compute(seconds, action, host_s)
            elif isinstance(word, Began):
                if word.number not in self.left:
                    yield self._begin(word)
            else:
                yield Await(self.begun[word.number].key)

    def _begin(self, one: Began) -> Begin:
        """Returns the beginning of an exchange or copy, with its cost and links, and notes it for the wait. Members of a group
        of several stages know it by its axis and a count of the exchanges there, so that its key is equal on all of them.
        """
        members = self.prices.members(one.axis, self.stage)
        key: Hashable = ("exchange", self.stage, one.number)
        if len(members) > 1:  # all of them come to the exchanges of such a group in one order
            key = one.axis, self.meetings[one.axis]
            self.meetings[one.axis] += 1
        is_copy = one.axis == HOST
        ways: tuple[str, ...] = (one.kind,) if is_copy else ("sends", "receives")
        ports = [(way, member) for member in members for way in ways]
        cost = self.prices.exchange(one, self.stage)
        before = self.begun.get(one.after) if one.after is not None else None
        exchange = Exchange(
            key,
            f"{'all' if one.axis == 'all' else one.kind} {one.axis}.{one.lane}",
            members,
            *cost,
            links=tuple(ports),
            after=None if before is None else before.key,
        )
        self.begun[one.number] = exchange
        return Begin(exchange)


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

"""Turns the lists of a step into numbers, made once and timed with the costs of many layouts.

    list of a stage    post B0 > F0.0 > send F0 > ...     actions, transfers
    beats of a stage   (begins, awaited, seconds), ...    of each: exchanges that it begins, the one that it then waits for, and
                                                          where in a table it stands how long it computes

What layouts with the same lists have in common is here: which messages there are, their order, and how long which action of
which part of the model takes, as a place in a table. What differs (costs, exchanges of gradients and weights) is put in by
`fill`, which asks `step.py` for the words of the few actions that they change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sley_core.actions.action import Action, Kind, Lowered, Placement, Transfer
from sley_core.actions.simulate import Delivery, taken
from sley_estimate.seconds.layer_seconds import KINDS, LayerSeconds
from sley_estimate.seconds.links import Cost
from sley_estimate.seconds.program import Await, Begin, Exchange, Word
from sley_estimate.seconds.step import StageWords, StepWork, firsts_of, lasts_of

COLUMNS = {kind: number for number, kind in enumerate(KINDS)}

NONE = -1
"""In place of an exchange: nothing is waited for, nothing follows."""


class Beat(NamedTuple):
    """What a stage does from one end of computing to the next: it begins exchanges, waits for one, and computes.

    seconds: the number of an entry of `Filled.seconds`.
    """

    begins: tuple[int, ...]
    awaited: int
    seconds: int


@dataclass
class Exchanges:
    """All exchanges of a step, by their numbers.

    costs: of each the number of its cost. missing: how much must be before it starts: it is begun by every member, and at each
    the exchange before it on its lane is over. followers: those that come after it there. ports: numbers of the links that it
    shares with others.
    """

    costs: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)
    ports: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, members: Sequence[int], cost: int, *, shared: bool = True) -> int:
        """Adds an exchange of the stages `members` and returns its number; it waits until each of them has begun it.

        cost: the number of its cost. shared: whether it uses the links of its members in both directions.
        """
        self.costs.append(cost)
        self.missing.append(len(members))
        self.followers.append([])
        self.ports.append(tuple(port for at in members for port in (2 * at, 2 * at + 1)) if shared else ())
        return len(self.costs) - 1

    def follow(self, before: int, after: int) -> None:
        """Makes the exchange `after` wait for `before`, which a member has begun before it on the same lane; numbers."""
        self.followers[before].append(after)
        self.missing[after] += 1


@dataclass
class Filled:
    """Holds a step with its costs. beats: of each stage. seconds: what numbers of seconds in beats stand for. costs: what
    numbers of costs in exchanges stand for.
    """

    beats: list[list[Beat]]
    exchanges: Exchanges
    seconds: list[float]
    costs: list[Cost]


class Outline:
    """The numbers of lowered lists. Pure: `fill` changes nothing here. beats: of each stage. messages: between stages.

    special: of each stage, by number of beat, the first forward of each chunk, and its last action that changes gradients.
    """

    def __init__(self, lists: Sequence[Lowered], placement: Placement) -> None:
        self.lists = lists
        self.placement = placement
        self.messages = Exchanges()
        self._numbers: dict[Delivery, int] = {}
        self._firsts = [firsts_of(steps) for steps in lists]
        self._lasts = [lasts_of(steps) for steps in lists]
        self.special: list[dict[int, Action]] = []
        orders: list[dict[tuple[int, int], list[int]]] = []
        self.beats = [self._of_stage(stage, orders) for stage in range(len(lists))]
        self._chain(orders)

    def _of_stage(self, stage: int, orders: list[dict[tuple[int, int], list[int]]]) -> list[Beat]:
        """Returns the beats of a stage, with numbers for its messages; the last one begins what is left, and computes nothing.

        Appends to `orders` the numbers of the messages that the stage begins, in order, by (sender, receiver), and to
        `special` the actions, by number of beat, at which weights are waited for or sums may start.
        """
        position_of = [self.placement.position(stage, chunk) for chunk in range(self.placement.chunks)]
        stage_of = self.placement.route
        special = {id(one) for one in (*self._firsts[stage].values(), *self._lasts[stage].values())}
        order: dict[tuple[int, int], list[int]] = {}
        changed: dict[int, Action] = {}
        beats: list[Beat] = []
        begins: list[int] = []
        for step in self.lists[stage]:
            if isinstance(step, Transfer):
                number, lane = self._message(step, stage)
                begins.append(number)
                order.setdefault(lane, []).append(number)
            elif step.kind is not Kind.CHUNK_DONE:
                position = position_of[step.chunk]
                needed = taken(step, position, self.placement)
                away = needed is not None and stage_of[needed.origin] != stage
                if id(step) in special:
                    changed[len(beats)] = step
                awaited = self._number(needed) if away and needed is not None else NONE
                beats.append(Beat(tuple(begins), awaited, position * len(KINDS) + COLUMNS[step.kind]))
                begins = []
        beats.append(Beat(tuple(begins), NONE, self.nothing))
        orders.append(order)
        self.special.append(changed)
        return beats

    @property
    def nothing(self) -> int:
        """Returns the number of the entry of `seconds` that is 0: the one behind all positions and kinds of actions."""
        return self.placement.num_positions * len(KINDS)

    @cached_property
    def complete(self) -> NDArray[np.intp]:
        """Returns the positions of each stage in the order in which their last gradients come: [chunk, stage]."""
        lasts = [[one.chunk for one in some.values() if one.kind is not Kind.FORWARD] for some in self.special]
        placement = self.placement
        return np.array([[placement.position(stage, chunk) for chunk in some] for stage, some in enumerate(lasts)]).T

    def _number(self, delivery: Delivery) -> int:
        """Returns the number of the message that brings `delivery` from one stage to another; the first time, adds it to the
        exchanges.
        """
        found = self._numbers.get(delivery)
        if found is None:
            sender, receiver = self.placement.route[delivery.origin], self.placement.route[delivery.position]
            found = self.messages.add((sender, receiver), min(delivery.position, delivery.origin))
            self.messages.ports[found] = 2 * sender, 2 * receiver + 1  # it is sent here, and received there
            self._numbers[delivery] = found
        return found

    def _message(self, entry: Transfer, stage: int) -> tuple[int, tuple[int, int]]:
        """Returns the number of the message of which `entry` is one end, at `stage`, and (sender, receiver)."""
        if entry.op == "send":
            position, lane = self.placement.position(entry.peer, entry.peer_chunk), (stage, entry.peer)
        else:
            position, lane = self.placement.position(stage, entry.chunk), (entry.peer, stage)
        return self._number(Delivery(entry.flow, position, entry.micro)), lane

    def _chain(self, orders: Sequence[dict[tuple[int, int], list[int]]]) -> None:
        """Makes each message wait for the one before it on its lane, (sender, receiver): at the sender, and at the receiver, in
        the order in which each begins them. orders: of each stage, its messages by lane.
        """
        lanes = {lane for order in orders for lane in order}
        for lane in sorted(lanes):
            for end in lane:
                begun = orders[end].get(lane, [])
                for before, after in pairwise(begun):
                    self.messages.follow(before, after)

    def fill(self, work: StepWork) -> Filled:
        """Returns the step with the costs, exchanges and seconds of `work`, for `Timed`, which uses it up. Changes nothing
        here.
        """
        return _Outlined(self, work).filled()


class _Outlined:
    """Puts what `work` has into an outline. orders: the last exchange of each lane at each member, but messages."""

    def __init__(self, outline: Outline, work: StepWork) -> None:
        self.outline = outline
        self.work = work
        messages = outline.messages
        self.exchanges = Exchanges(
            messages.costs.copy(), messages.missing.copy(), messages.followers.copy(), messages.ports.copy()
        )
        self.seconds = [_in_turn(layers, kind) for layers in work.parts for kind in KINDS]
        self.seconds.append(0.0)
        self.costs = list(work.messages)
        self._numbers: dict[Hashable, int] = {}
        self._latest: dict[tuple[str, int], int] = {}

    def filled(self) -> Filled:
        """Returns the step of all stages; to be called once."""
        beats = [self._of_stage(stage) for stage in range(len(self.outline.lists))]
        return Filled(beats, self.exchanges, self.seconds, self.costs)

    def _of_stage(self, stage: int) -> list[Beat]:
        """Returns the beats of a stage: those of the outline, but where exchanges of gradients and weights begin or are waited
        for, those of the words that `StageWords` gives.
        """
        outline, plain = self.outline, self.outline.beats[stage]
        firsts, lasts = outline._firsts[stage], outline._lasts[stage]
        words = StageWords(stage, outline.placement, self.work, len(outline.lists), firsts, lasts)
        made = _Beats(self, stage)
        made.put(words.head())
        at = 0
        for number, action in outline.special[stage].items():
            made.copy(plain[at:number])
            made.begin(plain[number].begins)
            made.put(words.action(action))
            at = number + 1
        made.copy(plain[at:-1])
        made.begin(plain[-1].begins)
        made.put(words.tail())
        return made.closed()

    def number(self, exchange: Exchange, stage: int) -> int:
        """Returns the number of an exchange that `stage` begins now, behind what it began before on the same lane; adds it if
        new.
        """
        found = self._numbers.get(exchange.key)
        if found is None:
            found = self.exchanges.add(exchange.members, len(self.costs), shared=bool(exchange.links))
            self.costs.append(Cost(exchange.latency_s, exchange.work_s, exchange.attended_s))
            self._numbers[exchange.key] = found
        before = self._latest.get((exchange.lane, stage))
        if before is not None:
            self.exchanges.follow(before, found)
        self._latest[exchange.lane, stage] = found
        return found

    def awaited(self, key: Hashable) -> int:
        """Returns the number of the exchange that `key` names: a message, or an exchange that a stage has begun."""
        return self.outline._numbers[key] if isinstance(key, Delivery) else self._numbers[key]

    def place(self, seconds: float) -> int:
        """Adds an entry to `seconds` and returns its number; of 0 seconds, the number of the entry that is there already."""
        if not seconds:
            return self.outline.nothing
        self.seconds.append(seconds)
        return len(self.seconds) - 1


class _Beats:
    """The beats of a stage as they are made. begins, awaited: of the one that is open."""

    def __init__(self, filling: _Outlined, stage: int) -> None:
        self.filling = filling
        self.stage = stage
        self.beats: list[Beat] = []
        self.begins: list[int] = []
        self.awaited = NONE

    def copy(self, plain: Sequence[Beat]) -> None:
        """Adds beats of the outline as they are; first closes the beat that is open, if it begins or awaits something."""
        if plain and (self.begins or self.awaited != NONE):
            self._close(self.filling.outline.nothing)
        self.beats += plain

    def begin(self, numbers: Iterable[int]) -> None:
        """Adds exchanges to those that the open beat begins; first closes one that waits, since waiting comes after."""
        if self.awaited != NONE:
            self._close(self.filling.outline.nothing)
        self.begins += numbers

    def put(self, words: Iterable[Word]) -> None:
        """Adds words of a program: what they begin and await goes into the open beat, and computing closes it."""
        for word in words:
            if isinstance(word, Begin):
                self.begin([self.filling.number(word.exchange, self.stage)])
            elif isinstance(word, Await):
                if self.awaited != NONE:
                    self._close(self.filling.outline.nothing)
                self.awaited = self.filling.awaited(word.key)
            else:
                self._close(self.filling.place(word.seconds))

    def closed(self) -> list[Beat]:
        """Closes the beat that is open, if it begins or awaits something, and returns all beats."""
        if self.begins or self.awaited != NONE:
            self._close(self.filling.outline.nothing)
        return self.beats

    def _close(self, seconds: int) -> None:
        """Adds the open beat, with `seconds` the number of an entry, and opens an empty one."""
        self.beats.append(Beat(tuple(self.begins), self.awaited, seconds))
        self.begins, self.awaited = [], NONE


def _in_turn(layers: Sequence[LayerSeconds], kind: Kind) -> float:
    """Returns the seconds that layers take one after the other in an action of `kind`, added in the order in which they run:
    `sum`, or another order, would round in another way.
    """
    total = 0.0
    for layer in layers if kind is Kind.FORWARD else reversed(layers):
        total += layer.of(kind)
    return total

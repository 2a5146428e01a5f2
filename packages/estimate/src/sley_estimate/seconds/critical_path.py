"""Finds the critical path of a step: the chain of actions and exchanges, each of which waits for the one before it, that
decides how long the step takes.

    stage 0   F0  F1 ....... B0        this path: F at position 0, there, F and B at position 1, back, B at position 0
                \\           ^
                 v         /           With other costs another path may decide. But what waits here waits there too: so no
    stage 1       F0  B0               step of the same lists is shorter than what this path takes with its costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sley_core.actions.action import Kind
from sley_estimate.seconds.links import Cost
from sley_estimate.seconds.outline import NONE, Outline

Floats = NDArray[np.float64]

NO_SECONDS = np.zeros(1)
"""The entry of `Filled.seconds` behind those of actions."""

Reached = tuple[float, int]
"""A time in seconds, and the number of the link of a path that was over then; `NONE` before the first."""


def path_costs(seconds: Floats, messages: Sequence[Cost], heads_s: Floats, tails_s: Floats) -> Floats:
    """Returns what a path adds up, in one array.

    seconds: of each kind of action of each position, [4, positions], as `KINDS` has them. messages: from each position to the
    next. heads_s, tails_s: what is before the first forward of each position, and behind its last gradient; [positions].
    """
    between = np.array(messages, dtype=np.float64).reshape(-1, 3).T
    return np.concatenate([seconds.T.ravel(), NO_SECONDS, between[0] + between[1], between[2], heads_s, tails_s])


def critical_path(outline: Outline, costs: Floats) -> NDArray[np.int64]:
    """Returns the critical path of the lists of `outline`, which come to an end, if each message has links of its own: how
    often it has each entry of `costs`. Pure.

    costs: as `path_costs` returns them.
    """
    return _Walk(outline, costs).path()


class _Walk:
    """One walk through the lists, each as far as what it waits for has come. links: of paths, each with the number of the one
    before it and that of its entry in `costs`. ends: where paths may end.
    """

    def __init__(self, outline: Outline, costs: Floats) -> None:
        messages, positions = outline.messages, outline.placement.num_positions
        self.outline = outline
        self.costs = costs.tolist()
        self.alone = [outline.nothing + 1 + place for place in messages.costs]
        self.attended = [positions - 1 + place for place in self.alone]
        self.head = outline.nothing + 1 + 2 * (positions - 1)
        self.tail = self.head + positions
        self.missing = messages.missing.copy()
        self.links: list[tuple[int, int]] = []
        self.since: list[Reached] = [(0.0, NONE)] * len(self.alone)
        self.ended: list[Reached | None] = [None] * len(self.alone)
        self.waiting: list[list[int]] = [[] for _ in self.alone]
        self.ends: list[Reached] = []
        self.stages = [self._stage(stage) for stage in range(len(outline.beats))]
        self.ready = list(range(len(self.stages)))

    def path(self) -> NDArray[np.int64]:
        """Walks to the end, and returns the path that came there last; to be called once."""
        while self.ready:
            next(self.stages[self.ready.pop()], None)
        counts = np.zeros(len(self.costs), dtype=np.int64)
        _, at = max(self.ends)
        while at != NONE:
            at, entry = self.links[at]
            counts[entry] += 1
        return counts

    def _stage(self, stage: int) -> Iterator[None]:
        """Walks through the list of a stage; yields where it waits for a message that is not there."""
        reached: Reached = (0.0, NONE)
        special = self.outline.special[stage]
        for number, (begins, awaited, place) in enumerate(self.outline.beats[stage]):
            for one in begins:
                self._begin(one, reached)
            if awaited != NONE:
                while (ended := self.ended[awaited]) is None:
                    self.waiting[awaited].append(stage)
                    yield
                reached = self._linked(max(reached, ended), self.attended[awaited])
            if (action := special.get(number)) is None:
                reached = self._linked(reached, place)
                continue
            position = self.outline.placement.position(stage, action.chunk)
            if action.kind is Kind.FORWARD:
                reached = max(reached, self._linked((0.0, NONE), self.head + position))
            reached = self._linked(reached, place)
            if action.kind is not Kind.FORWARD:
                self.ends.append(self._linked(reached, self.tail + position))
        self.ends.append(reached)

    def _begin(self, message: int, reached: Reached) -> None:
        """Notes that an end of a message has begun it; once nothing is missing, ends it and begins those that follow."""
        begun = [(message, reached)]
        while begun:
            one, reached = begun.pop()
            self.since[one] = max(self.since[one], reached)
            self.missing[one] -= 1
            if not self.missing[one]:
                ended = self.ended[one] = self._linked(self.since[one], self.alone[one])
                self.ready += self.waiting[one]
                begun += [(after, ended) for after in self.outline.messages.followers[one]]

    def _linked(self, reached: Reached, entry: int) -> Reached:
        """Adds a link with this entry behind `reached`, and returns when it is over."""
        at_s, before = reached
        self.links.append((before, entry))
        return at_s + self.costs[entry], len(self.links) - 1

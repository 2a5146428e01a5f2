"""Lists to lower: the plainest pipeline, and any that can run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from sley_core.actions.action import Action, Kind
from sley_core.actions.placement import Placement

Lists = list[list[Action]]


@pytest.fixture(scope="session")
def breadth_first() -> Callable[[Placement, int], Lists]:
    """All forwards, chunk by chunk, then all backwards."""

    def lists(placement: Placement, micros: int) -> Lists:
        chunks = range(placement.chunks)
        forwards = [Action(Kind.FORWARD, chunk, micro) for chunk in chunks for micro in range(micros)]
        backwards = [Action(Kind.BACKWARD, chunk, micro) for chunk in reversed(chunks) for micro in range(micros)]
        return [forwards + backwards for _ in range(placement.stages)]

    return lists


@pytest.fixture(scope="session")
def any_lists() -> Callable[[Placement, int, Random], Lists]:
    """The lists of a walk that does whatever could be done next, backwards whole or split: they can run, that is all."""

    def lists(placement: Placement, micros: int, chance: Random) -> Lists:
        made: Lists = [[] for _ in range(placement.stages)]
        last = placement.num_positions - 1
        ready = [(Kind.FORWARD, 0, micro) for micro in range(micros)]
        while ready:
            kind, position, micro = ready.pop(chance.randrange(len(ready)))
            stage, chunk = placement.holder(position)
            made[stage].append(Action(kind, chunk, micro))
            if kind is Kind.FORWARD and position < last:
                ready.append((Kind.FORWARD, position + 1, micro))
            elif kind is Kind.FORWARD:
                ready.append((chance.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), last, micro))
            elif kind is not Kind.WEIGHT_GRADIENT and position > 0:
                ready.append((chance.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), position - 1, micro))
            if kind is Kind.INPUT_GRADIENT:
                ready.append((Kind.WEIGHT_GRADIENT, position, micro))
        return made

    return lists

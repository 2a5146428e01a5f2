"""Makes lists of actions for tests: any that can run, on any placement."""

from __future__ import annotations

from random import Random

from sley_core.actions.action import Action, Kind, Placement


def any_lists(placement: Placement, micros: int, chance: Random) -> list[list[Action]]:
    """Returns the lists of a walk that does whatever could be done next, backwards whole or split: they can
    run, that is all.
    """
    made: list[list[Action]] = [[] for _ in range(placement.stages)]
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

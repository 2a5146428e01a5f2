"""Places weight gradients where a stage would wait: no other action needs them, so they can fill bubbles.

A stage of ZB-H1 without them, and with:

    stage 2  ......F0-F1-...D0=F2-D1=F3-D2=...D3=
    stage 2  ......F0-F1-...D0=F2-D1=F3-D2=W0~D3=W1~W2~W3~
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sley_core.api.actions import Action, Delivery, Kind, Placement, given, taken


def with_weight_gradients(lists: Sequence[Sequence[Action]], placement: Placement, most: int) -> list[list[Action]]:
    """Returns `lists` of F and D with a W added for every D, so that no stage holds more than `most` pairs.

    Simulates all stages in step, one tick per action. A stage does the next action of its list if that action's input
    was made in an earlier tick, else its oldest W. It does a W first if it holds `most` pairs, but not between an F and
    the D that follows: earlier stages are waiting for that D.
    """
    fillings = [_Filling(actions, stage, placement, most) for stage, actions in enumerate(lists)]
    made: set[Delivery] = set()
    moving = True
    while moving:
        ticks = [filling.tick(made) for filling in fillings]
        made.update(*ticks)
        moving = any(filling.moved for filling in fillings)
    assert not any(filling.rest for filling in fillings), f"no way on: {[filling.rest for filling in fillings]}"
    return [filling.done for filling in fillings]


class _Filling:
    """Holds the state of one stage: `rest` of its list, `done` so far, and the W that it still has to do, oldest first."""

    def __init__(self, actions: Sequence[Action], stage: int, placement: Placement, most: int) -> None:
        self.rest = deque(actions)
        self.done: list[Action] = []
        self.moved = False
        self._stage = stage
        self._placement = placement
        self._most = most
        self._owed: deque[Action] = deque()
        self._held = 0

    def tick(self, made: set[Delivery]) -> set[Delivery]:
        """Does one action or none; returns its output for another action, if any. made: the outputs of earlier ticks."""
        self.moved = True
        if self.rest and not self._is_full() and self._has_come(made):
            return self._do(self.rest.popleft())
        if self._owed:
            self._held -= 1
            self.done.append(self._owed.popleft())
        else:
            self.moved = False
        return set()

    def _is_full(self) -> bool:
        """Returns whether a W must come before the next action to stay within `most`."""
        between = self.done and self.done[-1].kind is Kind.FORWARD and self.rest[0].kind is Kind.INPUT_GRADIENT
        return bool(self._owed) and self._held >= self._most and not between

    def _has_come(self, made: set[Delivery]) -> bool:
        """Returns whether the input of the next action was made in an earlier tick."""
        action = self.rest[0]
        delivery = taken(action, self._placement.position(self._stage, action.chunk), self._placement)
        return delivery is None or delivery in made

    def _do(self, action: Action) -> set[Delivery]:
        """Does an F or a D and queues the W of a D; returns its output for another action, if any."""
        self.done.append(action)
        if action.kind is Kind.FORWARD:
            self._held += 1
        else:
            self._owed.append(Action(Kind.WEIGHT_GRADIENT, action.chunk, action.micro))
        delivery = given(action, self._placement.position(self._stage, action.chunk), self._placement)
        return set() if delivery is None else {delivery}

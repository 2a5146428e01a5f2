"""From what a schedule wants to what a rank does: checked, and with the marks that the readers need.

`lower` refuses a list whose actions are missing, repeated or out of order, so that no reader has to.
"""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind
from sley_core.errors import PlanError

BEFORE = {
    Kind.FORWARD: (),
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.INPUT_GRADIENT: (Kind.FORWARD,),
    Kind.WEIGHT_GRADIENT: (Kind.INPUT_GRADIENT,),
}
"""What must have happened to the same chunk and micro-batch first."""


def lower(actions: Sequence[Action], *, chunks: int, micros: int, training: bool = True) -> list[Action]:
    """The rank's list with `CHUNK_DONE` after each chunk's last gradient action.

    actions: compute actions of one rank over `chunks` model chunks and `micros` micro-batches.
    training: whether every forward must meet its backward (whole or split); else there is none.
    Raises PlanError `schedule-wrong` with the first bad action and its place in the list.
    """
    _check_order(actions, chunks, micros)
    _check_complete(actions, chunks, micros, training)
    last = {action.chunk: at for at, action in enumerate(actions) if action.kind in GRADIENT_KINDS}
    lowered: list[Action] = []
    for at, action in enumerate(actions):
        lowered.append(action)
        if last.get(action.chunk) == at:
            lowered.append(Action(Kind.CHUNK_DONE, action.chunk))
    return lowered


def _check_order(actions: Sequence[Action], chunks: int, micros: int) -> None:
    seen: set[Action] = set()
    for at, action in enumerate(actions):
        if action.kind not in BEFORE:
            raise _wrong(action, at, "is not a compute action")
        if not (0 <= action.chunk < chunks and 0 <= action.micro < micros):
            raise _wrong(action, at, f"is outside {chunks} chunks and {micros} micro-batches")
        if action in seen:
            raise _wrong(action, at, "is repeated")
        for kind in BEFORE[action.kind]:
            if Action(kind, action.chunk, action.micro) not in seen:
                raise _wrong(action, at, f"comes before its {Action(kind, action.chunk, action.micro)}")
        seen.add(action)


def _check_complete(actions: Sequence[Action], chunks: int, micros: int, training: bool) -> None:
    present = set(actions)
    for chunk in range(chunks):
        for micro in range(micros):
            whole = Action(Kind.BACKWARD, chunk, micro) in present
            split = Action(Kind.WEIGHT_GRADIENT, chunk, micro) in present
            if Action(Kind.FORWARD, chunk, micro) not in present:
                raise _wrong(Action(Kind.FORWARD, chunk, micro), len(actions), "is missing")
            if training and whole == split:
                fault = "is there whole and split" if whole else "is missing"
                raise _wrong(Action(Kind.BACKWARD, chunk, micro), len(actions), fault)
            if not training and (whole or split):
                raise _wrong(Action(Kind.BACKWARD, chunk, micro), len(actions), "stands in a forward-only list")


def _wrong(action: Action, at: int, fault: str) -> PlanError:
    return PlanError(
        "schedule-wrong",
        f"the schedule's action {action} (number {at + 1} of its list) {fault}",
        path=("pipeline", "use"),
    )

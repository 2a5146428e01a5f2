"""Checks compute lists on each stage: no action may be missing, repeated, unknown, or before one that it needs there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sley_core.actions.action import GRADIENT_KINDS, SENDS_GRADIENT, Action, Kind, Placement
from sley_core.errors import PlanError

NEEDS = {
    Kind.FORWARD: None,
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT_GRADIENT: Kind.FORWARD,
    Kind.WEIGHT_GRADIENT: Kind.INPUT_GRADIENT,
}
"""What must have happened to the same chunk and micro-batch first."""

EXCLUDES = {Kind.BACKWARD: Kind.INPUT_GRADIENT, Kind.INPUT_GRADIENT: Kind.BACKWARD}
"""A backward is whole or split."""


def check_lists(lists: Sequence[Sequence[Action]], placement: Placement, micros: int, *, training: bool) -> None:
    """Checks that each list holds every action that a step of `micros` micro-batches needs, once, in a possible order.

    Dependencies between stages are not checked here. Raises PlanError "schedule-wrong" with the first bad action.
    """
    if len(lists) != placement.stages:
        raise PlanError(
            "schedule-wrong",
            f"the schedule has {len(lists)} lists for {placement.stages} stages",
            path=("pipeline", "use"),
        )
    for stage, actions in enumerate(lists):
        seen = _check_order(actions, stage, placement, micros, training)
        for missing in _missing(seen, placement.chunks, micros, training):
            raise _wrong(f"{missing} is missing from stage {stage}'s list")


def _check_order(
    actions: Sequence[Action], stage: int, placement: Placement, micros: int, training: bool
) -> set[Action]:
    """Returns the set of a stage's actions. Raises PlanError "schedule-wrong" for the first one that is not possible at its
    place.
    """
    seen: set[Action] = set()
    for at, action in enumerate(actions):
        fault = _fault(action, seen, stage, placement, micros, training)
        if fault:
            raise _wrong(f"{action} (number {at + 1} of stage {stage}'s list) {fault}")
        seen.add(action)
    return seen


def _fault(
    action: Action, seen: set[Action], stage: int, placement: Placement, micros: int, training: bool
) -> str | None:
    """Returns what is wrong with `action` after the actions `seen`; None if nothing is."""
    kind, chunk, micro = action.kind, action.chunk, action.micro
    if kind not in NEEDS:
        return "is not a compute action"
    if not (0 <= chunk < placement.chunks and 0 <= micro < micros):
        return f"is outside {placement.chunks} chunks and {micros} micro-batches"
    if action in seen:
        return "is repeated"
    if kind in GRADIENT_KINDS and not training:
        return "stands in a forward-only list"
    needed = NEEDS[kind]
    # looked up as the tuples that actions equal, which are made faster: a search looks for a million
    if needed and (needed, chunk, micro) not in seen:
        return f"comes before its {Action(needed, chunk, micro)}"
    if kind in EXCLUDES and (EXCLUDES[kind], chunk, micro) in seen:
        return f"makes the backward whole and split: there is {Action(EXCLUDES[kind], chunk, micro)} too"
    return _local_fault(action, seen, stage, placement)


def _local_fault(action: Action, seen: set[Action], stage: int, placement: Placement) -> str | None:
    """Returns what is wrong if `action` needs a value from another chunk of its own stage that was not made yet; else None."""
    if action.kind is Kind.FORWARD:
        neighbour, kinds = placement.previous(stage, action.chunk), frozenset({Kind.FORWARD})
    elif action.kind in SENDS_GRADIENT:
        neighbour, kinds = placement.next(stage, action.chunk), SENDS_GRADIENT
    else:
        return None
    if neighbour is None or neighbour.stage != stage:
        return None
    if any((kind, neighbour.chunk, action.micro) in seen for kind in kinds):
        return None
    kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
    return f"comes before {Action(kind, neighbour.chunk, action.micro)}, which it continues"


def _missing(seen: set[Action], chunks: int, micros: int, training: bool) -> Iterator[Action]:
    """Yields the actions that a complete list would have besides those `seen`."""
    for chunk in range(chunks):
        for micro in range(micros):
            if (Kind.FORWARD, chunk, micro) not in seen:
                yield Action(Kind.FORWARD, chunk, micro)
            if not training or (Kind.BACKWARD, chunk, micro) in seen:
                continue
            if (Kind.INPUT_GRADIENT, chunk, micro) not in seen:
                yield Action(Kind.BACKWARD, chunk, micro)
            elif (Kind.WEIGHT_GRADIENT, chunk, micro) not in seen:
                yield Action(Kind.WEIGHT_GRADIENT, chunk, micro)


def _wrong(fault: str) -> PlanError:
    return PlanError("schedule-wrong", f"the schedule's action {fault}", path=("pipeline", "use"))

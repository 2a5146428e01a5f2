"""What schedules are written with: patterns of words, numbered afterwards, and refusals of what a pattern cannot do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sley_core.api.actions import Action, Kind
from sley_core.errors import PlanError

Word = tuple[Kind, int]
"""A kind and a chunk: an action whose micro-batch is not said yet."""

F: Word = (Kind.FORWARD, 0)
B: Word = (Kind.BACKWARD, 0)
D: Word = (Kind.INPUT_GRADIENT, 0)
"""The words of a schedule with one chunk per stage."""


def numbered(words: Iterable[Word]) -> list[Action]:
    """The actions of a pattern: the first F of a chunk is of micro-batch 0, its second of 1, and so for every word."""
    seen: Counter[Word] = Counter()
    actions = []
    for kind, chunk in words:
        actions.append(Action(kind, chunk, seen[kind, chunk]))
        seen[kind, chunk] += 1
    return actions


def wrong_chunks(name: str, wanted: str, chunks: int, hint: str | None = None) -> PlanError:
    """The error "schedule-chunks" of the schedule `name`, which needs `wanted` per stage and is given `chunks`."""
    message = f"`{name}` needs {wanted} per stage, not {chunks}"
    return PlanError("schedule-chunks", message, path=("pipeline", "use"), hint=hint)

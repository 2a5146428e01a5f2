"""Helpers for writing schedules: patterns of words, whose micro-batches are numbered afterwards, and errors for bad sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sley_core.api.actions import Action, Kind
from sley_core.errors import PlanError

Word = tuple[Kind, int]
"""A kind and a chunk: an action without its micro-batch."""

F: Word = (Kind.FORWARD, 0)
B: Word = (Kind.BACKWARD, 0)
D: Word = (Kind.INPUT_GRADIENT, 0)
"""The words of a schedule with one chunk per stage."""


def numbered(words: Iterable[Word]) -> list[Action]:
    """Returns the actions of a pattern: the first F of a chunk is of micro-batch 0, its second of 1, and so for every word."""
    seen: Counter[Word] = Counter()
    actions = []
    for kind, chunk in words:
        actions.append(Action(kind, chunk, seen[kind, chunk]))
        seen[kind, chunk] += 1
    return actions


def wrong_chunks(name: str, wanted: str, chunks: int, hint: str | None = None) -> PlanError:
    """Returns the PlanError "schedule-chunks" for schedule `name`, which needs `wanted` per stage but is given `chunks`."""
    message = f"`{name}` needs {wanted} per stage, not {chunks}"
    return PlanError("schedule-chunks", message, path=("pipeline", "use"), hint=hint)

"""A timeline as text, for a terminal of any width.

    stage 0  F0-F1-F2-F3-.........B0====B1====B2====B3====
    stage 1  ...F0-F1-F2-......B0====F3-B1====B2====B3====...

Every stage is a row, time goes to the right. An action begins with its letter and its micro-batch, as far as there is room,
and fills its time; dots are time in which nothing is computed.
"""

from __future__ import annotations

from sley_core.actions.action import Action, Kind
from sley_core.actions.timeline import Timeline

FILL = {
    Kind.FORWARD: "-",
    Kind.BACKWARD: "=",
    Kind.INPUT_GRADIENT: "=",
    Kind.WEIGHT_GRADIENT: "~",
    Kind.CHUNK_DONE: " ",
}
NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT_GRADIENT: "D input gradients",
    Kind.WEIGHT_GRADIENT: "W weight gradients",
}
COLUMNS_PER_ACTION = 3
"""Columns of the shortest action where the width allows it: room for a label of two characters."""


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Returns rows of at most `width` columns, one per stage, with each stage's idle share, and a legend. Ends with a
    newline.
    """
    names = [f"stage {stage}  " for stage in range(timeline.stages)]
    notes = [f"  {timeline.idle(stage):4.0%} idle" for stage in range(timeline.stages)]
    indent = max(map(len, names))
    room = max(1, width - indent - max(map(len, notes)))
    scale = _columns_per_second(timeline, room)
    rows = []
    for stage, (name, note) in enumerate(zip(names, notes, strict=True)):
        rows.append(name.ljust(indent) + _row(timeline, stage, scale) + note)
    return "\n".join([*rows, *_legend(timeline)]) + "\n"


def label(action: Action) -> str:
    """Returns letter and micro-batch, `F3`; the letter is lower case for every chunk but the first."""
    letter = action.kind.value if action.chunk == 0 else action.kind.value.lower()
    return f"{letter}{action.micro}"


def _columns_per_second(timeline: Timeline, room: int) -> float:
    """Returns the scale that fits into `room` columns.

    The shortest action gets a whole number of columns if it gets one at all, so that equal actions look equal.
    """
    lengths = [span.end_s - span.start_s for span in timeline.spans if span.end_s > span.start_s]
    if not lengths:
        return 0.0
    columns = min(COLUMNS_PER_ACTION, room * min(lengths) / timeline.makespan_s)
    return (int(columns) if columns >= 1 else columns) / min(lengths)


def _row(timeline: Timeline, stage: int, scale: float) -> str:
    """Returns one stage's row of characters."""
    cells = ["."] * round(timeline.makespan_s * scale)
    for span in timeline.of_stage(stage):
        first, end = round(span.start_s * scale), round(span.end_s * scale)
        text = label(span.action)
        text = text[0] * (end - first) if end - first < len(text) else text.ljust(end - first, FILL[span.action.kind])
        cells[first:end] = text
    return "".join(cells)


def _legend(timeline: Timeline) -> list[str]:
    kinds = {span.action.kind for span in timeline.spans}
    words = [name for kind, name in NAMES.items() if kind in kinds]
    if any(span.action.chunk for span in timeline.spans):
        words.append("small letters: chunk 1 and later")
    return [", ".join(words)] if words else []

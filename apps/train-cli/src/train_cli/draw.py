"""Draws a timeline as text for a terminal of any width.

    stage 0  F0-F1-F2-F3-.........B0====B1====B2====B3====
    stage 1  ...F0-F1-F2-......B0====F3-B1====B2====B3====...

Every stage is a row, and time goes to the right. An action begins with its letter and its microbatch, if they fit, and fills
its time. Dots are time in which no action runs. With two chunks, small letters are the second chunk. With more, each chunk has
a row, which is blank while the stage works on another chunk. The middle of a step with too many actions for the width is
omitted.
"""

from __future__ import annotations

from sley_core.actions.action import Action, Kind
from sley_core.actions.simulate import Timeline

FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT_GRADIENT: "=", Kind.WEIGHT_GRADIENT: "~", Kind.CHUNK_DONE: " "}
NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT_GRADIENT: "I input gradients",
    Kind.WEIGHT_GRADIENT: "W weight gradients",
}
COLUMNS_PER_ACTION = 3
"""The number of columns of the shortest action, if the width allows it: room for a label of two characters."""

CUT = " / "
"""Marks the omitted middle of a long step."""

LEAST_ROOM = 16
"""The least number of columns of a shortened row."""


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Returns a text drawing with a legend: one row per stage, or one per chunk if a stage has three chunks or more."""
    chunks = 1 + max((span.action.chunk for span in timeline.spans), default=0)
    own_rows: list[int | None] = [None] if chunks <= 2 else list(range(chunks))
    rows = [(stage, chunk) for stage in range(timeline.stages) for chunk in own_rows]
    names = [_row_label(stage, chunk) for stage, chunk in rows]
    notes = ["" if chunk else f"  {timeline.idle_share(stage):4.0%} idle" for stage, chunk in rows]
    indent = max(map(len, names))
    max_columns = max(1, width - indent - max(map(len, notes)))
    scale = _columns_per_second(timeline, max_columns)
    drawn = [_shorten(_draw_row(timeline, stage, chunk, scale), max_columns) for stage, chunk in rows]
    lines = [f"{name:{indent}}{row}{note}".rstrip() for name, row, note in zip(names, drawn, notes, strict=True)]
    legend = _legend_lines(timeline, chunks)
    if (columns := round(timeline.makespan_s * scale)) > max_columns:
        legend.append(
            f"/: {columns - max_columns + len(CUT)} of {columns} columns are hidden; use a wider terminal to see more"
        )
    return "\n".join([*lines, *legend]) + "\n"


def action_label(action: Action) -> str:
    """Returns letter and microbatch, such as `F3`. The letter is lower case for every chunk but the first."""
    letter = action.kind.value if action.chunk == 0 else action.kind.value.lower()
    return f"{letter}{action.micro}"


def _row_label(stage: int, chunk: int | None) -> str:
    if chunk is None:
        return f"stage {stage}  "
    return f"{f'stage {stage}' if chunk == 0 else '':9}chunk {chunk}  "


def _columns_per_second(timeline: Timeline, max_columns: int) -> float:
    """Returns the number of columns per second. The drawing may be wider than `max_columns`.

    The shortest action gets an integer number of columns if it gets at least one, so that equal actions look equal.
    """
    lengths = [span.end_s - span.start_s for span in timeline.spans if span.end_s > span.start_s]
    if not lengths:
        return 0.0
    columns = min(COLUMNS_PER_ACTION, max_columns * min(lengths) / timeline.makespan_s)
    if columns < 1 and max_columns >= LEAST_ROOM and min(lengths) >= max(lengths) / 10:
        columns = 1
    return (int(columns) if columns >= 1 else columns) / min(lengths)


def _draw_row(timeline: Timeline, stage: int, chunk: int | None, scale: float) -> str:
    cells = ["."] * round(timeline.makespan_s * scale)
    for span in timeline.stage_spans(stage):
        first, end = round(span.start_s * scale), round(span.end_s * scale)
        text = action_label(span.action) if chunk is None else action_label(span.action).upper()
        text = text[0] * (end - first) if end - first < len(text) else text.ljust(end - first, FILL[span.action.kind])
        cells[first:end] = text if chunk in (None, span.action.chunk) else " " * (end - first)
    return "".join(cells)


def _shorten(row: str, max_columns: int) -> str:
    """Returns `row` without its middle, so that it fits in `max_columns` columns."""
    if len(row) <= max_columns:
        return row
    tail = (max_columns - len(CUT)) // 2
    return row[: max_columns - len(CUT) - tail] + CUT + row[len(row) - tail :]


def _legend_lines(timeline: Timeline, chunks: int) -> list[str]:
    kinds = {span.action.kind for span in timeline.spans}
    words = [name for kind, name in NAMES.items() if kind in kinds]
    if chunks == 2:
        words.append("small letters are chunk 1")
    return [", ".join(words)] if words else []

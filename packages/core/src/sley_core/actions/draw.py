"""Draws timelines: as text for a terminal of any width, as an SVG picture, and as a Chrome trace.

    stage 0  F0-F1-F2-F3-.........B0====B1====B2====B3====
    stage 1  ...F0-F1-F2-......B0====F3-B1====B2====B3====...

Every stage is a row, time goes to the right. An action begins with its letter and its micro-batch, as far as there is room, and
fills its time; dots are time in which no action runs. With two chunks, small letters are the second one's. With more, each
chunk has a row of its own, blank while the stage works on another chunk. A step of too many actions for the width loses its
middle, so that how it starts and how it ends can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from sley_core.actions.action import Action, Kind
from sley_core.actions.costs import TimedAction, Timeline

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

CUT = " / "
"""Stands for the middle of a step that is too long."""

LEAST_ROOM = 16
"""Columns below which nothing is cut out: too little would be left to read."""


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Returns rows of at most `width` columns, one per stage, with each stage's idle share, and a legend. Ends with a
    newline.

    With three chunks or more a stage has a row per chunk.
    """
    chunks = 1 + max((span.action.chunk for span in timeline.spans), default=0)
    own_rows: list[int | None] = [None] if chunks <= 2 else list(range(chunks))
    rows = [(stage, chunk) for stage in range(timeline.stages) for chunk in own_rows]
    names = [_name(stage, chunk) for stage, chunk in rows]
    notes = ["" if chunk else f"  {timeline.idle(stage):4.0%} idle" for stage, chunk in rows]
    indent = max(map(len, names))
    room = max(1, width - indent - max(map(len, notes)))
    scale = _columns_per_second(timeline, room)
    drawn = [_cut(_row(timeline, stage, chunk, scale), room) for stage, chunk in rows]
    lines = [f"{name:{indent}}{row}{note}".rstrip() for name, row, note in zip(names, drawn, notes, strict=True)]
    legend = _legend(timeline, chunks)
    if (columns := round(timeline.makespan_s * scale)) > room:
        legend.append(f"/: {columns - room + len(CUT)} of {columns} columns are left out; a wider terminal shows more")
    return "\n".join([*lines, *legend]) + "\n"


def label(action: Action) -> str:
    """Returns letter and micro-batch, `F3`; the letter is lower case for every chunk but the first."""
    letter = action.kind.value if action.chunk == 0 else action.kind.value.lower()
    return f"{letter}{action.micro}"


def _name(stage: int, chunk: int | None) -> str:
    if chunk is None:
        return f"stage {stage}  "
    return f"{f'stage {stage}' if chunk == 0 else '':9}chunk {chunk}  "


def _columns_per_second(timeline: Timeline, room: int) -> float:
    """Returns the scale that fits into `room` columns, or that of a drawing whose middle must be cut out.

    The shortest action gets a whole number of columns if it gets one at all, so that equal actions look equal. Where it
    gets none, actions are drawn to scale if the others are much longer, and else at one column each.
    """
    lengths = [span.end_s - span.start_s for span in timeline.spans if span.end_s > span.start_s]
    if not lengths:
        return 0.0
    columns = min(COLUMNS_PER_ACTION, room * min(lengths) / timeline.makespan_s)
    if columns < 1 and room >= LEAST_ROOM and min(lengths) >= max(lengths) / 10:
        columns = 1
    return (int(columns) if columns >= 1 else columns) / min(lengths)


def _row(timeline: Timeline, stage: int, chunk: int | None, scale: float) -> str:
    """Returns one row of characters: a stage's, or those of one chunk of it."""
    cells = ["."] * round(timeline.makespan_s * scale)
    for span in timeline.of_stage(stage):
        first, end = round(span.start_s * scale), round(span.end_s * scale)
        text = label(span.action) if chunk is None else label(span.action).upper()
        text = text[0] * (end - first) if end - first < len(text) else text.ljust(end - first, FILL[span.action.kind])
        cells[first:end] = text if chunk in (None, span.action.chunk) else " " * (end - first)
    return "".join(cells)


def _cut(row: str, room: int) -> str:
    """Returns `row` with its middle cut out as far as it is longer than `room`."""
    if len(row) <= room:
        return row
    tail = (room - len(CUT)) // 2
    return row[: room - len(CUT) - tail] + CUT + row[len(row) - tail :]


def _legend(timeline: Timeline, chunks: int) -> list[str]:
    """Returns at most one line that names the kinds of action drawn."""
    kinds = {span.action.kind for span in timeline.spans}
    words = [name for kind, name in NAMES.items() if kind in kinds]
    if chunks == 2:
        words.append("small letters: chunk 1")
    return [", ".join(words)] if words else []


COLOURS = {
    Kind.FORWARD: ("#4c78a8", "#9ecae9"),
    Kind.BACKWARD: ("#54a24b", "#b5dfae"),
    Kind.INPUT_GRADIENT: ("#e39c37", "#f6d39b"),
    Kind.WEIGHT_GRADIENT: ("#9d755d", "#d8b5a5"),
    Kind.CHUNK_DONE: ("#666666", "#666666"),
}
"""Of the first chunk and of the last; those between them get shades between these."""

ROW, GAP, TITLE, LEFT = 22, 4, 24, 110
"""Pixels: of a stage's row, between rows, of a title, of the stages' names with their idle share."""

NUM_TICKS = 5
"""Times that are written below the pictures, the first of them 0."""

SECONDS_FROM_S = 10.0
"""How long a step is whose times are given in seconds."""

LETTER = 7
"""Pixels that a letter of a label takes: one without room is left out."""


def draw_svg(timelines: Mapping[str, Timeline], width: int = 1200) -> str:
    """Returns an SVG picture `width` pixels wide: each of `timelines` under its title, with time ticks and a legend
    below.

    The tooltip of an action says what it is and when it ran.
    """
    body, height = timeline_elements(timelines, 0, width)
    return picture(body, width, height)


def picture(body: Iterable[str], width: int, height: int) -> str:
    """Returns SVG elements as the text of a file."""
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, *body, "</svg>"]) + "\n"


def timeline_elements(timelines: Mapping[str, Timeline], top: int, width: int) -> tuple[list[str], int]:
    """Returns the elements of timelines from `top` pixels on, and where they end."""
    longest = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    scale = (width - LEFT) / longest if longest > 0 else 0.0
    last_chunk = max((span.action.chunk for timeline in timelines.values() for span in timeline.spans), default=0)
    body: list[str] = []
    for title, timeline in timelines.items():
        body.append(f'<text x="0" y="{top + TITLE - 8}" font-weight="bold">{escape(title)}</text>')
        top += TITLE
        for stage in range(timeline.stages):
            body += _svg_row(timeline, stage, top, scale, last_chunk)
            top += ROW + GAP
    if scale:
        body += _ticks(longest, top, scale)
        body += _svg_legend(timelines.values(), top + TITLE, last_chunk)
        top += 2 * TITLE
    return body, top


def _svg_row(timeline: Timeline, stage: int, top: int, scale: float, last_chunk: int) -> Iterator[str]:
    """Yields the SVG elements of one stage."""
    length = timeline.makespan_s * scale
    yield f'<text x="0" y="{top + ROW - 7}">stage {stage}, {timeline.idle(stage):.0%} idle</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{length:.2f}" height="{ROW}" fill="#f2f2f2"/>'
    for span in timeline.of_stage(stage):
        yield _box(span, top, scale, last_chunk)


def _ticks(longest_s: float, top: int, scale: float) -> Iterator[str]:
    """Yields the time labels below the pictures, in ms, or in s where they would be many."""
    unit, per_s = ("ms", 1e3) if longest_s < SECONDS_FROM_S else ("s", 1.0)
    for number in range(NUM_TICKS):
        time_s = longest_s * number / (NUM_TICKS - 1)
        anchor = "end" if number == NUM_TICKS - 1 else "start"
        x = LEFT + time_s * scale
        yield f'<text x="{x:.2f}" y="{top + TITLE - 10}" text-anchor="{anchor}">{time_s * per_s:.4g} {unit}</text>'


def _svg_legend(timelines: Iterable[Timeline], top: int, last_chunk: int) -> Iterator[str]:
    """Yields a coloured box and a name for each kind of action that occurs, and what the shades mean."""
    kinds = {span.action.kind for timeline in timelines for span in timeline.spans}
    x = LEFT
    for kind, name in NAMES.items():
        if kind in kinds:
            yield f'<rect x="{x}" y="{top + 2}" width="12" height="12" fill="{COLOURS[kind][0]}"/>'
            yield f'<text x="{x + 18}" y="{top + 12}">{name}</text>'
            x += 18 + LETTER * (len(name) + 3)
    if last_chunk:
        yield f'<text x="{x}" y="{top + 12}">the lighter, the later the chunk: 0 to {last_chunk}</text>'


def _shade(kind: Kind, chunk: int, last_chunk: int) -> str:
    """Returns the colour of `kind` for a chunk, `#rrggbb`."""
    dark, light = COLOURS[kind]
    share = chunk / last_chunk if last_chunk else 0.0
    ends = [(int(dark[at : at + 2], 16), int(light[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(first + share * (last - first)):02x}" for first, last in ends)


def _box(span: TimedAction, top: int, scale: float, last_chunk: int) -> str:
    """Returns one action as a rectangle with a tooltip, and a label if there is room."""
    x, length = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    colour = _shade(span.action.kind, span.action.chunk, last_chunk)
    told = f"{span.action} on stage {span.stage}, {span.start_s:.6g} s to {span.end_s:.6g} s"
    rect = f'<rect x="{x:.2f}" y="{top}" width="{length:.2f}" height="{ROW}" fill="{colour}" stroke="white"/>'
    text = label(span.action)
    word = f'<text x="{x + 3:.2f}" y="{top + ROW - 7}">{text}</text>' if length >= LETTER * len(text) + 3 else ""
    return f"<g><title>{told}</title>{rect}{word}</g>"


MICROSECONDS = 1e6


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Returns JSON text: each of `timelines` is a process of that name, each of its stages a thread."""
    events: list[dict[str, Any]] = []
    for number, (title, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        for stage in range(timeline.stages):
            name = {"name": f"stage {stage}"}
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": stage, "args": name})
        for span in timeline.spans:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "pid": number,
                    "tid": span.stage,
                    "ts": span.start_s * MICROSECONDS,
                    "dur": (span.end_s - span.start_s) * MICROSECONDS,
                    "args": {"chunk": action.chunk, "micro": action.micro},
                }
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

"""Timelines as an SVG picture, one above the other on one scale: a measured step stands under its prediction. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

from sley_core.actions.action import Kind
from sley_core.actions.draw import NAMES, label
from sley_core.actions.simulate import TimedAction, Timeline

PICTURE = "timeline.svg"
"""The file in a run's folder."""

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
    tooltip = f"{span.action} on stage {span.stage}, {span.start_s:.6g} s to {span.end_s:.6g} s"
    rect = f'<rect x="{x:.2f}" y="{top}" width="{length:.2f}" height="{ROW}" fill="{colour}" stroke="white"/>'
    text = label(span.action)
    word = f'<text x="{x + 3:.2f}" y="{top + ROW - 7}">{text}</text>' if length >= LETTER * len(text) + 3 else ""
    return f"<g><title>{tooltip}</title>{rect}{word}</g>"

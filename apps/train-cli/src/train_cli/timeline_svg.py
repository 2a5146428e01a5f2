"""Timelines as an SVG picture, one above the other on one scale: a measured step stands under its prediction. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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

WIDTH, ROW, GAP, TITLE, LEFT = 1200, 22, 4, 24, 110
"""Pixels: of the picture, of a stage's row, between rows, of a title, of the stages' names with their idle share."""

NUM_TICKS = 5
"""Times that are written below the pictures, the first of them 0."""

SECONDS_FROM_S = 10.0
"""How long a step is whose times are given in seconds."""

LETTER = 7
"""Pixels that a letter of a label takes: one without room is left out."""


def draw_svg(timelines: Mapping[str, Timeline]) -> str:
    """Returns an SVG picture of `timelines`, each under its title, with time ticks and a legend below.

    The tooltip of an action says what it is and when it ran.
    """
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    scale = (WIDTH - LEFT) / longest_s if longest_s > 0 else 0.0
    actions = [span.action for timeline in timelines.values() for span in timeline.spans]
    last_chunk = max((action.chunk for action in actions), default=0)
    body, top = list[str](), 0
    for title, timeline in timelines.items():
        body.append(f'<text x="0" y="{top + TITLE - 8}" font-weight="bold">{escape(title)}</text>')
        top += TITLE
        length = timeline.makespan_s * scale
        for stage in range(timeline.stages):
            body.append(f'<text x="0" y="{top + ROW - 7}">stage {stage}, {timeline.idle(stage):.0%} idle</text>')
            body.append(f'<rect x="{LEFT}" y="{top}" width="{length:.2f}" height="{ROW}" fill="#f2f2f2"/>')
            body += [_box(span, top, scale, last_chunk) for span in timeline.of_stage(stage)]
            top += ROW + GAP
    if scale:
        body += _ticks(longest_s, top, scale)
        body += _svg_legend({action.kind for action in actions}, top + TITLE, last_chunk)
        top += 2 * TITLE
    size = f'width="{WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _ticks(longest_s: float, top: int, scale: float) -> Iterator[str]:
    """Yields the time labels below the pictures, in ms, or in s where they would be many."""
    unit, per_s = ("ms", 1e3) if longest_s < SECONDS_FROM_S else ("s", 1.0)
    for number in range(NUM_TICKS):
        time_s = longest_s * number / (NUM_TICKS - 1)
        anchor = "end" if number == NUM_TICKS - 1 else "start"
        x = LEFT + time_s * scale
        yield f'<text x="{x:.2f}" y="{top + TITLE - 10}" text-anchor="{anchor}">{time_s * per_s:.4g} {unit}</text>'


def _svg_legend(kinds: Collection[Kind], top: int, last_chunk: int) -> Iterator[str]:
    """Yields a coloured box and a name for each kind of action that occurs, and what the shades mean."""
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

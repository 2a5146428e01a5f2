"""One step of a run, read back from `timeline.json`: when each stage did what, and who waited for whom.

stage 0   F0.0 F0.1 ........ B0.0        a gap before an action is a wait for what the action takes:
stage 1        F0.0 ---B0.0              for the stage that makes it, until it was made (compute),
          ^^^^ waits for stage 0         and from then on for the message (way)
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sley_core.actions.action import Action, Kind, Placement
from sley_core.actions.draw import MICROSECONDS
from sley_core.actions.simulate import TimedAction, Timeline, given, taken

INCHES = (6.0, 3.0)

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
LINES = ("solid", "dashed")
"""A run has the colour and the line of its number; with more than these give, two would look alike."""

MAX_RUNS = len(COLOURS) * len(LINES)

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "path.simplify": True,
}
_NOTHING = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""Metadata that would make two pages of one run differ, or look like addresses."""


@dataclass(frozen=True)
class Curve:
    """Holds the points of one run. run: its number in the report, from 0. steps: ascending, counted from 1. values: as many;
    None where the number was not finite, which breaks the line.
    """

    run: int
    steps: Sequence[int]
    values: Sequence[float | None]


def chart(name: str, unit: str, curves: Sequence[Curve], most_points: int) -> str:
    """Returns an `<svg>` element with all curves, each with at most `most_points` of its points.

    name: of the number, which no other chart of the page has: ids within the picture are made from it. unit: of the axis.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            steps, values = thinned(curve.steps, curve.values, most_points)
            numbers = [math.nan if value is None else value for value in values]
            colour, line = look(curve.run)
            axes.plot(steps, numbers, color=colour, linestyle=line, linewidth=1.2, marker="." if len(steps) < 30 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NOTHING)
    return text.getvalue()[text.getvalue().index("<svg") :]


def look(run: int) -> tuple[str, str]:
    """Returns colour and style of a run's line, as CSS and matplotlib call them; `run` is below MAX_RUNS."""
    return COLOURS[run % len(COLOURS)], LINES[run // len(COLOURS)]


def thinned(steps: Sequence[int], values: Sequence[float | None], most: int) -> tuple[Sequence[int], Sequence[float | None]]:
    """Returns at most `most` (6 or more) of the points: of each stretch of steps the lowest and the highest, and a gap if it
    has one, so that no peak is lost.
    """
    if len(steps) <= most:
        return steps, values
    size = math.ceil(len(steps) / (most // 3))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        places = range(start, min(start + size, len(steps)))
        known = [(value, place) for place in places if (value := values[place]) is not None]
        gaps = [place for place in places if values[place] is None]
        kept += sorted({place for _, place in (min(known), max(known))} | set(gaps[:1]) if known else gaps[:1])
    return [steps[place] for place in kept], [values[place] for place in kept]


TRACE = "timeline.json"
MEASURED, PREDICTED = "measured", "predicted"
"""How the titles of timelines begin."""


@dataclass(frozen=True)
class StageTimes:
    """Holds what one stage did in a step, in seconds, which add up to the step's.

    computing_s: in actions. waiting_s: by stage, until that stage had made what was waited for. way_s: from there until this
    stage went on: the message, and what the host did. end_s: after its last action, until the last stage had done its own.
    other_s: gaps before actions that take nothing from another stage.
    """

    stage: int
    computing_s: float
    waiting_s: Mapping[int, float]
    way_s: float
    end_s: float
    other_s: float


def read_trace(path: Path) -> dict[str, Timeline]:
    """Returns the timelines in the file by title, in its order. Raises OSError, ValueError and KeyError for another file."""
    titles: dict[int, str] = {}
    stages: dict[int, int] = {}
    spans: dict[int, list[TimedAction]] = {}
    for event in json.loads(path.read_text("utf-8"))["traceEvents"]:
        number = event["pid"]
        if event["name"] == "process_name":
            titles[number] = event["args"]["name"]
            stages[number], spans[number] = 0, []
        elif event["name"] == "thread_name":
            stages[number] += 1
        else:
            spans[number].append(_span(event))
    return {title: Timeline.of(stages[number], spans[number]) for number, title in titles.items()}


def _span(event: Mapping[str, Any]) -> TimedAction:
    action = Action(Kind[event["cat"].upper()], event["args"]["chunk"], event["args"]["micro"])
    start_s = event["ts"] / MICROSECONDS
    return TimedAction(event["tid"], action, start_s, start_s + event["dur"] / MICROSECONDS)


def placement_of(predicted: Timeline) -> Placement:
    """Returns which stage holds which part of the model, from the route that the first micro-batch takes in simulated time,
    where each forward begins when the one before it has ended.
    """
    forwards = [span for span in predicted.spans if span.action.kind is Kind.FORWARD and span.action.micro == 0]
    return Placement(tuple(span.stage for span in sorted(forwards, key=lambda span: (span.start_s, span.end_s))))


def times_of_stages(measured: Timeline, placement: Placement) -> list[StageTimes]:
    """Returns what each stage did and waited for. placement: of the model's parts, from `placement_of`."""
    made = {}
    for span in measured.spans:
        if (delivery := given(span.action, placement.position(span.stage, span.action.chunk), placement)) is not None:
            made[delivery] = span
    return [_times(measured, stage, placement, made) for stage in range(measured.stages)]


def _times(measured: Timeline, stage: int, placement: Placement, made: Mapping[Any, TimedAction]) -> StageTimes:
    """Returns how long a stage computed and waited in a drawn step: for other stages, for messages, and for itself.

    made: the action that made each delivery.
    """
    computing_s = way_s = other_s = now_s = 0.0
    waiting_s: dict[int, float] = {}
    for span in measured.of_stage(stage):
        gap_s = max(0.0, span.start_s - now_s)
        maker = made.get(taken(span.action, placement.position(stage, span.action.chunk), placement))
        if maker is None or maker.stage == stage:
            other_s += gap_s
        else:
            # Clocks of two machines may be a little apart: what was made "later" than it was taken counts as waited for.
            unmade_s = min(gap_s, max(0.0, maker.end_s - now_s))
            waiting_s[maker.stage] = waiting_s.get(maker.stage, 0.0) + unmade_s
            way_s += gap_s - unmade_s
        computing_s += span.end_s - max(span.start_s, now_s)
        now_s = max(now_s, span.end_s)
    return StageTimes(stage, computing_s, waiting_s, way_s, measured.makespan_s - now_s, other_s)


def ends(timelines: Mapping[str, Timeline]) -> Iterator[tuple[str, float]]:
    """Yields each measured timeline's title and how many seconds before the last of them it ended: for that long its ranks wait
    for the others when gradients are summed.
    """
    measured = {title: one.makespan_s for title, one in timelines.items() if title.startswith(MEASURED)}
    last_s = max(measured.values(), default=0.0)
    yield from ((title, last_s - end_s) for title, end_s in measured.items())

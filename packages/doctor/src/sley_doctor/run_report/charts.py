"""Charts of the numbers in a run's rows, as SVG elements of matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
    """Returns an `<svg>` element with all curves, each with at most `most_points` of its points. name: of the number, which no
    other chart of the page has: ids within the picture are made from it. unit: of the axis.
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

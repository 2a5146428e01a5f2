"""Charts of the metrics in a run's rows, drawn as SVG elements by matplotlib."""

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
"""A run's colour and line style depend on its index; with more than MAX_RUNS runs, two would look the same."""

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
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""Metadata to leave out: it would make two pages of one run differ, or contain URLs."""


@dataclass(frozen=True)
class Curve:
    """Holds the points of one run. run: the run's index in the report. steps: step numbers, ascending, from 1. values: one
    value per step; None, a gap in the line, for a value that was not finite.
    """

    run: int
    steps: Sequence[int]
    values: Sequence[float | None]


def draw_chart(name: str, unit: str, curves: Sequence[Curve], max_points: int) -> str:
    """Returns an `<svg>` element with all curves, each reduced to at most `max_points` points. name: the metric's name, unique
    on the page, since ids within the SVG are made from it. unit: the label of the vertical axis.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            steps, values = thin_out(curve.steps, curve.values, max_points)
            numbers = [math.nan if value is None else value for value in values]
            colour, line = line_style(curve.run)
            axes.plot(steps, numbers, color=colour, linestyle=line, linewidth=1.2, marker="." if len(steps) < 30 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    return text.getvalue()[text.getvalue().index("<svg") :]


def line_style(run: int) -> tuple[str, str]:
    """Returns the colour and the line style of run number `run`, below MAX_RUNS, as CSS and matplotlib name them."""
    return COLOURS[run % len(COLOURS)], LINES[run // len(COLOURS)]


def thin_out(
    steps: Sequence[int], values: Sequence[float | None], max_points: int
) -> tuple[Sequence[int], Sequence[float | None]]:
    """Returns at most `max_points` (6 or more) of the points: from each interval of steps the lowest and the highest value, and
    a gap if there is one, so that no peak is lost.
    """
    if len(steps) <= max_points:
        return steps, values
    size = math.ceil(len(steps) / (max_points // 3))
    indices: list[int] = []
    for start in range(0, len(steps), size):
        interval = range(start, min(start + size, len(steps)))
        finite = [(value, index) for index in interval if (value := values[index]) is not None]
        gaps = [index for index in interval if values[index] is None]
        indices += sorted({index for _, index in (min(finite), max(finite))} | set(gaps[:1]) if finite else gaps[:1])
    return [steps[index] for index in indices], [values[index] for index in indices]

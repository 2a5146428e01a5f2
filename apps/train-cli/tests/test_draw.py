"""Drawings of timelines as text."""

from __future__ import annotations

from types import FunctionType

import pytest

from sley_core.actions.action import Schedule, v_placement
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Timeline, simulate
from sley_pp.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from train_cli.draw import draw_text


def timeline(schedule: Schedule, stages: int, micros: int) -> Timeline:
    placement = schedule.placement(stages)
    costs = Costs.even(placement.num_positions)
    return simulate(lower(schedule.lists(stages, micros), placement, micros), placement, costs).timeline


def test_text_shows_which_stage_does_what_when() -> None:
    assert draw_text(timeline(Schedule(gpipe), 2, 2)).splitlines() == [
        "stage 0  F0-F1-.........B0====B1====   33% idle",
        "stage 1  ...F0-F1-B0====B1====......   33% idle",
        "F forward, B backward",
    ]


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("micros", [3, 7, 40])
def test_a_row_is_never_wider_than_asked_for(width: int, micros: int) -> None:
    rows = draw_text(timeline(Schedule(interleaved, 2), 3, micros), width).splitlines()[:3]
    least = len("stage 0  .   99% idle")
    assert max(map(len, rows)) <= max(width, least)
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("schedule", "micros"),
    [
        (Schedule(gpipe), 4),
        (Schedule(one_f_one_b), 4),
        (Schedule(interleaved, 2), 4),
        (Schedule(zero_bubble_h1), 4),
        (Schedule(zero_bubble_v, 2, v_placement), 8),
    ],
)
def test_the_drawings_in_docstrings_are_right(schedule: Schedule, micros: int) -> None:
    generate = schedule.generate
    assert isinstance(generate, FunctionType)
    lines = (generate.__doc__ or "").splitlines()
    shown = [line.strip().removesuffix(" ...") for line in lines if line.startswith("        stage ")]
    drawn = draw_text(timeline(schedule, 4, micros), width=1000).splitlines()
    assert len(shown) == 4
    assert all(row.startswith(line) for row, line in zip(drawn, shown, strict=False))

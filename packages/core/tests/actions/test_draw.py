"""Drawings of a timeline: as wide as asked for, true to scale, and readable by machines where they should be."""

from __future__ import annotations

import json

import pytest

from sley_core.actions.action import Action, Kind, loop, sequential, v
from sley_core.actions.draw import chrome_trace, draw_text
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, TimedAction, Timeline, simulate


def timeline_of(lists, placement, micros) -> Timeline:
    return simulate(lower(lists, placement, micros), placement, Costs.even(placement.num_positions)).timeline


@pytest.fixture
def two_stages() -> Timeline:
    return timeline_of([sequential(2)] * 2, loop(2), 2)


def test_text_shows_who_does_what_when(two_stages):
    assert draw_text(two_stages).splitlines() == [
        "stage 0  F0-.........B0====F1-.........B1====   50% idle",
        "stage 1  ...F0-B0====.........F1-B1====......   50% idle",
        "F forward, B backward",
    ]


def test_where_there_is_little_room_only_letters_stay(two_stages):
    assert draw_text(two_stages, width=40).splitlines()[:2] == [
        "stage 0  F...B0F...B1   50% idle",
        "stage 1  .FB0...FB1..   50% idle",
    ]


def test_small_letters_are_of_later_chunks(breadth_first):
    placement = v(2)
    rows = draw_text(timeline_of(breadth_first(placement, 1), placement, 1)).splitlines()
    assert rows[0].startswith("stage 0  F0-......f0-b0====......")
    assert rows[2] == "F forward, B backward, small letters: chunk 1"


def test_each_of_three_chunks_has_a_row_in_which_another_chunk_s_time_is_blank(breadth_first):
    placement = loop(2, 3)
    assert draw_text(timeline_of(breadth_first(placement, 1), placement, 1)).splitlines() == [
        "stage 0  chunk 0  F0-...   ...   .........      ......      ......B0====   50% idle",
        "         chunk 1     ...F0-...   .........      ......B0====......",
        "         chunk 2     ...   ...F0-.........B0====......      ......",
        "stage 1  chunk 0  ...F0-...   ...         ......      ......B0====......   50% idle",
        "         chunk 1  ...   ...F0-...         ......B0====......      ......",
        "         chunk 2  ...   ...   ...F0-B0====......      ......      ......",
        "F forward, B backward",
    ]


def test_a_step_that_is_too_long_shows_how_it_starts_and_ends():
    placement = loop(1)
    drawn = draw_text(timeline_of([sequential(99)], placement, 99), width=40).splitlines()
    assert drawn == [
        "stage 0  FB0FB1FB2 / BBFBBFBB    0% idle",
        "F forward, B backward",
        "/: 280 of 297 columns are left out; a wider terminal shows more",
    ]


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("micros", [1, 7, 40])
def test_a_row_is_never_wider_than_asked_for(breadth_first, width, micros):
    placement = loop(3, 2)
    drawn = draw_text(timeline_of(breadth_first(placement, micros), placement, micros), width)
    rows = drawn.splitlines()[:3]
    least = len("stage 0  .   99% idle")
    assert max(map(len, rows)) <= max(width, least)
    assert len({len(row) for row in rows}) == 1


def test_a_measured_timeline_without_whole_units_is_drawn_to_scale():
    spans = [TimedAction(0, Action(Kind.FORWARD, 0, 0), 0.0, 0.001), TimedAction(0, Action(Kind.BACKWARD, 0, 0), 0.5, 1.0)]
    (row, _) = draw_text(Timeline.of(1, spans), width=60).splitlines()
    assert row == "stage 0  " + "." * 20 + "B0" + "=" * 18 + "   50% idle"


def test_nothing_can_be_drawn():
    assert draw_text(Timeline.of(1, [])) == "stage 0      0% idle\n"


def test_a_trace_has_every_action_under_its_timeline_and_stage(two_stages):
    events = json.loads(chrome_trace({"predicted": two_stages, "measured": two_stages}))["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["predicted", "measured"]
    actions = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in actions] == [
        (str(span.action), span.stage, span.start_s * 1e6, (span.end_s - span.start_s) * 1e6) for span in two_stages.spans
    ]

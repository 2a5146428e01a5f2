"""The picture of a timeline: true to scale, with all that a reader needs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from sley_core.actions.action import Action, Kind, loop, sequential
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Timeline, simulate
from train_cli.timeline_svg import draw_svg


def timeline_of(lists, placement, micros) -> Timeline:
    return simulate(lower(lists, placement, micros), placement, Costs.even(placement.num_positions)).timeline


@pytest.fixture
def two_stages() -> Timeline:
    return timeline_of([sequential(2)] * 2, loop(2), 2)


def test_nothing_can_be_drawn():
    assert ElementTree.fromstring(draw_svg({"nothing": Timeline.of(1, [])})).get("height") == "50"


def test_svg_has_a_box_for_each_action_with_its_times(two_stages):
    picture = ElementTree.fromstring(draw_svg({"predicted": two_stages, "measured & odd <>": two_stages}, width=870))
    space = "{http://www.w3.org/2000/svg}"
    boxes = picture.findall(f"{space}g")
    assert len(boxes) == 2 * len(two_stages.spans)
    assert [title.text for title in picture.findall(f"{space}text") if title.get("font-weight")] == [
        "predicted",
        "measured & odd <>",
    ]
    box = boxes[1]
    assert box.findtext(f"{space}title") == "B0.0 on stage 0, 4 s to 6 s"
    rect = box.find(f"{space}rect")
    assert rect is not None
    assert float(rect.get("x", 0)) == pytest.approx(110 + 4 * 760 / 12, abs=0.01)
    assert float(rect.get("width", 0)) == pytest.approx(2 * 760 / 12, abs=0.01)


def test_svg_has_a_shade_for_each_chunk_and_says_so():
    placement = loop(2, 4)
    forwards = [Action(Kind.FORWARD, chunk, 0) for chunk in range(4)]
    lists = [[*forwards, *(Action(Kind.BACKWARD, chunk, 0) for chunk in reversed(range(4)))]] * 2
    picture = ElementTree.fromstring(draw_svg({"": timeline_of(lists, placement, 1)}))
    space = "{http://www.w3.org/2000/svg}"
    forwards = [box for box in picture.findall(f"{space}g") if (box.findtext(f"{space}title") or "").startswith("F")]
    shades = [rect.get("fill") for box in forwards[:4] if (rect := box.find(f"{space}rect")) is not None]
    assert (shades[0], shades[3]) == ("#4c78a8", "#9ecae9")
    assert len(set(shades)) == 4
    assert "the lighter, the later the chunk: 0 to 3" in [text.text for text in picture.iter(f"{space}text")]


def test_svg_says_how_long_how_idle_and_which_colour_is_what(two_stages):
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text for text in ElementTree.fromstring(draw_svg({"predicted": two_stages})).iter(f"{space}text")]
    assert {"0 s", "12 s", "F forward", "B backward"} <= set(words)
    assert "W weight gradients" not in words
    assert [word for word in words if "idle" in word] == [
        f"stage {stage}, {two_stages.idle(stage):.0%} idle" for stage in range(2)
    ]

"""What a plugin's generator or placement returns by mistake is named as the schedule's fault."""

from __future__ import annotations

import pytest

from sley_core.actions.action import Schedule
from sley_core.errors import PlanError


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "returns a `NoneType` instead of a list for each stage"),
        ([[], None], "returns a `NoneType` instead of a list for a stage"),
        ([[("F", 0, 0)]], "returns a `tuple` instead of an action in a stage's list"),
    ],
)
def test_lists_that_are_none(made, words):
    with pytest.raises(PlanError, match=words) as raised:
        Schedule(lambda stages, chunks, micros: made).lists(2, 2)
    assert raised.value.diagnostics[0].code == "schedule-wrong"


def test_a_placement_that_is_none():
    with pytest.raises(PlanError, match="placement is a `NoneType`, not a `Placement`") as raised:
        Schedule(lambda stages, chunks, micros: [], place=lambda stages, chunks: None).placement(2)
    assert raised.value.diagnostics[0].code == "placement-wrong"

"""`lower` adds the marks that readers need, and refuses every list that is not a step."""

from __future__ import annotations

import random

import pytest

from sley_core.actions.action import Action, Kind, forward_only, sequential
from sley_core.actions.lower import lower
from sley_core.errors import PlanError


def texts(actions: list[Action]) -> list[str]:
    return [str(action) for action in actions]


def test_the_last_gradient_action_of_a_chunk_is_marked():
    assert texts(lower(sequential(2), chunks=1, micros=2)) == ["F0.0", "B0.0", "F0.1", "B0.1", "C0"]


def test_every_chunk_has_its_own_mark_after_its_last_weight_gradient():
    f, d, w, b = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD
    actions = [Action(f, 0, 0), Action(f, 1, 0), Action(b, 1, 0), Action(d, 0, 0), Action(w, 0, 0)]
    assert texts(lower(actions, chunks=2, micros=1)) == ["F0.0", "F1.0", "B1.0", "C1", "D0.0", "W0.0", "C0"]


def test_a_forward_only_list_has_no_marks():
    assert texts(lower(forward_only(3), chunks=1, micros=3, training=False)) == ["F0.0", "F0.1", "F0.2"]


@pytest.mark.parametrize("seed", range(20))
def test_any_mutation_of_a_list_is_refused_with_the_first_bad_action(seed):
    chance = random.Random(seed)
    actions = sequential(4)
    at = chance.randrange(len(actions))
    match chance.choice(["drop", "repeat", "swap", "outside"]):
        case "drop":
            del actions[at]
        case "repeat":
            actions.insert(at, actions[at])
        case "swap":
            at -= at % 2
            actions[at], actions[at + 1] = actions[at + 1], actions[at]
        case "outside":
            actions[at] = Action(actions[at].kind, 1, actions[at].micro)
    with pytest.raises(PlanError, match=r"the schedule's action [FB]\d\.\d \(number \d+ of its list\)") as caught:
        lower(actions, chunks=1, micros=4)
    assert caught.value.diagnostics[0].code == "schedule-wrong"


def test_whole_and_split_backward_of_one_micro_batch_exclude_each_other():
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    with pytest.raises(PlanError, match="whole and split"):
        lower([Action(kind, 0, 0) for kind in kinds], chunks=1, micros=1)

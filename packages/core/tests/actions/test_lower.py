"""`lower` adds what readers need, and refuses every list that is not a step or comes to a stop."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.actions.action import Action, Kind, Placement, actions_of, forward_only, loop, sequential, v
from sley_core.actions.lower import lower
from sley_core.errors import PlanError

F, B, D, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
ALONE = loop(1)


def texts(steps) -> list[str]:
    return [str(step) for step in steps]


def words(text: str) -> list[Action]:
    """`F0.1 B0.1`, read."""
    return [Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in text.split()]


def test_without_a_pipeline_only_the_last_gradient_action_is_marked():
    (steps,) = lower([sequential(2)], ALONE, 2)
    assert texts(steps) == ["F0.0", "B0.0", "F0.1", "B0.1", "C0"]


def test_every_chunk_has_its_own_mark_after_its_last_weight_gradient():
    (steps,) = lower([words("F0.0 F1.0 B1.0 I0.0 W0.0")], loop(1, 2), 1)
    assert texts(steps) == ["F0.0", "F1.0", "B1.0", "C1", "I0.0", "W0.0", "C0"]


def test_a_forward_only_list_has_no_marks():
    (steps,) = lower([forward_only(sequential(3))], ALONE, 3, training=False)
    assert texts(steps) == ["F0.0", "F0.1", "F0.2"]


def test_a_send_follows_at_once_and_a_receive_is_posted_ahead():
    """Two stages, one micro-batch at a time; the gradient is on its way before its chunk is marked."""
    lists = [sequential(2), words("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1")]
    first, second = lower(lists, loop(2), 2)
    assert texts(first) == [
        *("post backward 0.0 from stage 1", "post backward 0.1 from stage 1", "F0.0", "send forward 0.0 to stage 1"),
        *("B0.0", "F0.1", "send forward 0.1 to stage 1", "B0.1", "C0"),
    ]
    assert texts(second) == [
        *("post forward 0.0 from stage 0", "post forward 0.1 from stage 0", "F0.0", "I0.0", "send backward 0.0 to stage 0"),
        *("W0.0", "F0.1", "I0.1", "send backward 0.1 to stage 0", "W0.1", "C0"),
    ]


def test_what_passes_between_chunks_of_one_stage_is_not_sent():
    lists = [words("F0.0 F1.0 B1.0 B0.0")] * 2
    first, second = lower(lists, v(2), 1)
    assert [word for word in texts(second) if "send" in word] == ["send forward 1.0 to stage 0", "send backward 0.0 to stage 0"]
    assert [word for word in texts(first) if "send" in word] == ["send forward 0.0 to stage 1", "send backward 1.0 to stage 1"]


@pytest.mark.parametrize(
    ("placement", "lists", "fault"),
    [
        (ALONE, "B0.0 F0.0", "B0.0 (number 1 of stage 0's list) comes before its F0.0"),
        (ALONE, "F0.0 F0.0 B0.0", "F0.0 (number 2 of stage 0's list) is repeated"),
        (ALONE, "F0.0 B0.0 W0.0", "W0.0 (number 3 of stage 0's list) comes before its I0.0"),
        (ALONE, "F0.0 F0.1 B0.0", "F0.1 (number 2 of stage 0's list) is outside 1 chunks and 1 micro-batches"),
        (ALONE, "F0.0 C0.0 B0.0", "C0.0 (number 2 of stage 0's list) is not a compute action"),
        (ALONE, "F0.0 I0.0 B0.0", "B0.0 (number 3 of stage 0's list) makes the backward whole and split"),
        (ALONE, "F0.0", "B0.0 is missing from stage 0's list"),
        (ALONE, "F0.0 I0.0", "W0.0 is missing from stage 0's list"),
        (ALONE, "", "F0.0 is missing from stage 0's list"),
        (loop(1, 2), "F1.0 F0.0", "F1.0 (number 1 of stage 0's list) comes before F0.0, which it continues"),
        (loop(1, 2), "F0.0 F1.0 B0.0 B1.0", "B0.0 (number 3 of stage 0's list) comes before B1.0, which it continues"),
        (loop(2), "F0.0 B0.0", "the schedule has 1 lists for 2 stages"),
    ],
)
def test_what_is_not_a_step_is_refused_with_the_first_bad_action(placement, lists, fault):
    with pytest.raises(PlanError) as caught:
        lower([words(lists)], placement, 1)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "schedule-wrong"
    assert fault in diagnostic.message


def test_a_gradient_in_a_forward_only_list_is_refused():
    with pytest.raises(PlanError, match=r"B0\.0 .* stands in a forward-only list"):
        lower([sequential(1)], ALONE, 1, training=False)


def test_lists_that_wait_for_each_other_are_refused_with_what_each_stage_waits_for():
    lists = [words("F0.0 B0.0 F0.1 B0.1"), words("F0.1 B0.1 F0.0 B0.0")]
    with pytest.raises(PlanError) as caught:
        lower(lists, loop(2), 2)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "schedule-deadlock"
    assert diagnostic.message == (
        "the schedule comes to a stop: stage 0 at B0.0 (number 2 of its list) waits for B0.0 of stage 1; "
        "stage 1 at F0.1 (number 1 of its list) waits for F0.1 of stage 0"
    )


def can_run(lists, placement, micros) -> bool:
    """Whether `lists` are one step, told by the plainest means: walk as long as any stage can go on."""
    done: set[tuple[Kind, int, int]] = set()
    rest = [list(actions) for actions in lists]
    before = -1
    while len(done) > before:
        before = len(done)
        for stage, actions in enumerate(rest):
            while actions:
                kind, micro, at = actions[0].kind, actions[0].micro, placement.position(stage, actions[0].chunk)
                needed = {F: [{(F, at - 1, micro)}], W: [{(D, at, micro)}]}.get(
                    kind, [{(F, at, micro)}, {(B, at + 1, micro), (D, at + 1, micro)}]
                )
                ends = (kind is F and at == 0) or (kind in (B, D) and at + 1 == placement.num_positions)
                free = [options for options in needed if not options & done]
                if (kind, at, micro) in done or (free and not (ends and free[0] == needed[-1])):
                    break
                done.add((kind, at, micro))
                actions.pop(0)
    pairs = [(at, micro) for at in range(placement.num_positions) for micro in range(micros)]
    whole = sum((B, *pair) in done for pair in pairs)
    split = sum((D, *pair) in done and (W, *pair) in done and (B, *pair) not in done for pair in pairs)
    return not any(rest) and sum((F, *pair) in done for pair in pairs) == whole + split == len(pairs)


MUTATIONS = ("none", "drop", "repeat", "swap", "move")
ANY = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(lambda size: st.permutations([*range(size[0])] * size[1]))
PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 4), st.integers(1, 3)),
    st.builds(v, st.integers(1, 4)),
    ANY.map(lambda route: Placement(tuple(route))),
)


@given(PLACEMENTS, st.integers(1, 4), st.sampled_from(MUTATIONS), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_changed_list_is_accepted_exactly_if_it_still_is_a_step(any_lists, placement, micros, mutation, seed):
    chance = Random(seed)
    lists = any_lists(placement, micros, chance)
    actions = lists[chance.randrange(len(lists))]
    at, other = chance.randrange(len(actions)), chance.randrange(len(actions))
    match mutation:
        case "drop":
            del actions[at]
        case "repeat":
            actions.insert(other, actions[at])
        case "swap":
            actions[at], actions[other] = actions[other], actions[at]
        case "move":
            actions.insert(other, actions.pop(at))
    if can_run(lists, placement, micros):
        lowered = lower(lists, placement, micros)
        kept = [[action for action in actions_of(steps) if action.kind is not Kind.CHUNK_DONE] for steps in lowered]
        assert kept == lists
    else:
        with pytest.raises(PlanError) as caught:
            lower(lists, placement, micros)
        assert caught.value.diagnostics[0].code in ("schedule-wrong", "schedule-deadlock")

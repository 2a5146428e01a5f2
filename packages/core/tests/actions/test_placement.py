"""Who holds which part of the model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.actions.action import DIRECTIONS, Placement, Schedule, StageChunk, loop, v
from sley_core.errors import PlanError
from sley_core.topology import LANES as LANES_OF_GROUPS

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4))
ROUTES = SIZES.flatmap(lambda size: st.permutations([*range(size[0])] * size[1]))
PLACEMENTS = st.one_of(SIZES.map(lambda size: loop(*size)), st.builds(v, st.integers(1, 5)), ROUTES.map(tuple).map(Placement))


@given(PLACEMENTS)
def test_every_position_is_held_once_and_found_again(placement):
    holders = [placement.holder(position) for position in range(placement.num_positions)]
    assert len(set(holders)) == placement.num_positions == placement.stages * placement.chunks
    assert [placement.position(*holder) for holder in holders] == list(range(placement.num_positions))


@given(PLACEMENTS)
def test_neighbours_are_the_holders_of_the_positions_beside(placement):
    holders = [placement.holder(position) for position in range(placement.num_positions)]
    assert [placement.previous(*holder) for holder in holders] == [None, *holders[:-1]]
    assert [placement.next(*holder) for holder in holders] == [*holders[1:], None]


@given(PLACEMENTS)
def test_a_stage_counts_its_chunks_in_the_order_in_which_a_sample_meets_them(placement):
    for stage in range(placement.stages):
        positions = [placement.position(stage, chunk) for chunk in range(placement.chunks)]
        assert positions == sorted(positions)
        assert {placement.route[position] for position in positions} == {stage}


def test_a_loop_goes_round_and_a_v_turns():
    round_and_round, turned = loop(4, 2), v(4)
    assert [round_and_round.position(stage, 1) for stage in range(4)] == [4, 5, 6, 7]
    assert [turned.position(stage, 1) for stage in range(4)] == [7, 6, 5, 4]
    assert round_and_round.next(3, 0) == StageChunk(0, 1)
    assert turned.next(3, 0) == StageChunk(3, 1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda: loop(0), "has no positions"),
        (lambda: loop(2, 0), "has no positions"),
        (lambda: v(2, 3), "a V, which has two parts of the model per stage, not 3"),
        (lambda: Placement((0, 2)), "gives stage 1 no part of the model, but stage 2 has one"),
        (lambda: Placement((1, 1)), "gives stage 0 no part of the model, but stage 1 has one"),
        (lambda: Placement((0, 1, 1)), "2 of the 3 parts of the model on stage 1, but 1 on stage 0: every stage"),
        (lambda: Placement((0, -1)), "names the stage -1"),
        (lambda: Placement((0, 1.0)), r"names the stage 1\.0"),
        (lambda: Schedule(lambda *_: [], 2, lambda stages, chunks: loop(stages)).placement(4), "1 parts .* not 2 on each of 4"),
        (
            lambda: Schedule(lambda *_: [], 1, lambda stages, chunks: loop(2)).placement(4),
            "each of 2 stages, not 1 on each of 4",
        ),
    ],
)
def test_an_impossible_deal_is_refused(place, words):
    with pytest.raises(PlanError, match=words) as caught:
        place()
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("placement-wrong", ("pipeline", "use"))


def test_each_way_has_a_communicator():
    assert LANES_OF_GROUPS["pp"] == DIRECTIONS

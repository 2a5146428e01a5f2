"""Who holds which part of the model."""

from __future__ import annotations

import pytest

from sley_core.actions.action import WAYS
from sley_core.actions.placement import Holder, Placement
from sley_core.topology import LANES as LANES_OF_GROUPS

PLACEMENTS = [Placement(stages, chunks) for stages in (1, 2, 3, 5) for chunks in (1, 2, 3)]
PLACEMENTS += [Placement(stages, 2, "v") for stages in (1, 2, 3, 5)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_position_is_held_once_and_found_again(placement):
    holders = [placement.holder(position) for position in range(placement.num_positions)]
    assert len(set(holders)) == placement.num_positions == placement.stages * placement.chunks
    assert [placement.position(*holder) for holder in holders] == list(range(placement.num_positions))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_neighbours_are_the_holders_of_the_positions_beside(placement):
    holders = [placement.holder(position) for position in range(placement.num_positions)]
    assert [placement.previous(*holder) for holder in holders] == [None, *holders[:-1]]
    assert [placement.next(*holder) for holder in holders] == [*holders[1:], None]


def test_a_loop_goes_round_and_a_v_turns():
    loop, v = Placement(4, 2), Placement(4, 2, "v")
    assert [loop.position(stage, 1) for stage in range(4)] == [4, 5, 6, 7]
    assert [v.position(stage, 1) for stage in range(4)] == [7, 6, 5, 4]
    assert loop.next(3, 0) == Holder(0, 1)
    assert v.next(3, 0) == Holder(3, 1)


@pytest.mark.parametrize(
    ("arguments", "words"), [((0,), "0 stages"), ((2, 0), "0 chunks"), ((2, 3, "v"), "a V has two")]
)
def test_an_impossible_deal_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Placement(*arguments)


def test_each_way_has_a_communicator():
    assert LANES_OF_GROUPS["pp"] == WAYS

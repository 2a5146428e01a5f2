"""`assert_same_sequence`: what counts as the same order, and what is told when it is not."""

from __future__ import annotations

import pytest

from sley_testing.collectives import Collective, assert_same_sequence


def call(op="all_reduce", numel=4, *, group="dp", ranks=(0, 1), dtype="float32", peer=None, line=1):
    return Collective(op, group, ranks, numel, dtype, peer=peer, site=(f"handler.py:{line} finish_step",))


def message(*sequences):
    with pytest.raises(AssertionError) as caught:
        assert_same_sequence(sequences)
    return str(caught.value).splitlines()


def test_the_first_divergence_is_shown_by_rank_with_its_place_in_the_code():
    first, second, third = call(numel=1, line=10), call(numel=2, line=20), call(numel=3, line=30)
    assert_same_sequence([[first, second, third]] * 2)
    assert message([first, second, third], [first, third, second]) == [
        "the order on dp is not the same on all ranks: call 2 differs",
        "  rank 0: all_reduce of 2 float32",
        "      at handler.py:20 finish_step",
        "  rank 1: all_reduce of 3 float32",
        "      at handler.py:30 finish_step",
        "  before it, on all: all_reduce of 1 float32",
        "      at handler.py:10 finish_step",
    ]


@pytest.mark.parametrize(
    "other", [call("broadcast"), call(numel=5), call(dtype="float64"), call(peer=1)], ids=["op", "numel", "dtype", "root"]
)
def test_what_members_must_do_alike(other):
    assert message([call()], [other])[0] == "the order on dp is not the same on all ranks: call 1 differs"


def test_a_rank_that_stops_early_or_never_starts_is_named():
    assert "  rank 1: nothing after 1 calls" in message([call(), call()], [call()])
    assert "  ranks 1, 2: nothing after 0 calls" in message([call(ranks=(0, 1, 2))], [], [])


def test_groups_are_compared_each_for_itself():
    dp, wp = call(group="dp"), call(group="wp", numel=9)
    assert_same_sequence([[dp, wp], [wp, dp]])
    assert_same_sequence([[call(ranks=(0, 2))], [call(ranks=(1, 3), numel=7)], [call(ranks=(0, 2))], []][:3])


def test_every_send_meets_its_receive_whatever_is_between():
    ours = [call("send", 2, peer=1), call("recv", 3, peer=1), call("send", 4, peer=1)]
    theirs = [call("recv", 2, peer=0), call("recv", 4, peer=0), call("send", 3, peer=0)]
    assert_same_sequence([ours, theirs])
    assert message(ours, [theirs[1], theirs[0], theirs[2]])[:4] == [
        "a send and its receive on dp do not match: call 1 differs",
        "  rank 0: send of 2 float32 to 1",
        "      at handler.py:1 finish_step",
        "  rank 1: recv of 4 float32 from 0",
    ]
    assert "  rank 1: nothing after 2 calls" in message([*ours, call("send", 5, peer=1)], theirs)


def test_a_receive_from_any_source_is_refused():
    assert message([call("send", peer=1)], [call("recv_any")])[0].startswith("a receive from any source has no order")

"""Small values between ranks come whole and in order, short ones in one exchange."""

from __future__ import annotations

import torch.distributed as dist

from sley_core.comm.startup import _AT_ONCE, gather_values
from sley_testing.collectives import collectives


def gathered(values):
    """What each rank has of all, and in how many exchanges."""
    found = []
    for own in values:
        with collectives() as calls:
            found.append((gather_values(own[dist.get_rank()]), [call.op for call in calls]))
    return found


SHORT = [{"a": [1, None], "ä": "ü"}, ""]
EDGE = ["x" * (_AT_ONCE - 2), 0]  # its text has two quotes more
LONG = ["y" * (_AT_ONCE - 1), "z" * 3]
BOTH = ["u" * 5000, "v" * 2000]


def test_a_short_text_goes_with_its_length(ranks):
    for found in ranks(2)(gathered, [SHORT, EDGE]):
        assert found == [(SHORT, ["all_gather"]), (EDGE, ["all_gather"])]


def test_what_is_longer_follows_on_all_ranks(ranks):
    for found in ranks(2)(gathered, [LONG, BOTH, LONG[::-1]]):
        assert found == [(values, ["all_gather"] * 2) for values in (LONG, BOTH, LONG[::-1])]

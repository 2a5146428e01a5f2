"""Rows about attention: not across the bounds of documents, and over all of a sequence that several ranks share."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import BUCKETS, samples, small

_PACKED = samples(documents=[[5, 11], [16], [1, 9, 6], [2, 2, 12], [7, 1, 8], [15, 1]])

PACKED_DP = LeagueRow(
    name="packed-dp",
    elsewhere="documents of one sample see each other, or those of the samples beside it",
    seen=("axolotl #3608",),
    tables=small(data=_PACKED, batch__micro_size=2, gradient_handlers=[BUCKETS]),
    layouts=({"parallel": {"dp": 2}},),
)

PACKED_SP = LeagueRow(
    name="packed-sp",
    elsewhere="bounds of documents are lost where a sequence is on several ranks (a loss of 5.81 in place of 3.17)",
    seen=("axolotl #3608",),
    tables=small(data=_PACKED, batch__micro_size=2),
    layouts=({"parallel": {"sp": 2, "dp": 1}, "sequence": {"use": "isp.all_to_all"}},),
)

SHARED_HEADS_SP = LeagueRow(
    name="shared-heads-sp",
    elsewhere="gradients of keys and values that several ranks use are not summed (a loss of 3.74 in place of 2.64)",
    seen=("bigcode/Megatron-LM PR #37", "Megatron-LM #1464"),
    tables=small(model__kv_heads=1, batch__micro_size=2, gradient_handlers=[BUCKETS]),
    layouts=({"parallel": {"sp": 2, "dp": 2}, "sequence": {"use": "isp.all_to_all"}},),
)

"""Rows about what a sum over labels is divided by: how many labels there are in all, and nowhere in a part."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import BUCKETS, samples, small

ACCUMULATION = LeagueRow(
    name="accumulation",
    elsewhere="each micro-batch is divided by its own labels, so that those of short ones count more",
    seen=("transformers PR #34191", "transformers #35203", "torchtune PR #1917", "Lightning PR #21386"),
    tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
    layouts=({"parallel": {"dp": 1}},),
    alone={"batch__micro_size": 8},
)

UNEVEN_RANKS = LeagueRow(
    name="uneven-ranks",
    elsewhere="gradients are averaged over ranks, so that those of a rank with few labels count more",
    seen=("torchtune PR #1917", "Lightning PR #21386"),
    tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), gradient_handlers=[BUCKETS]),
    layouts=({"parallel": {"dp": 2}},),
)

HELD_OUT = LeagueRow(
    name="held-out",
    elsewhere="the held-out loss is a mean of the means of batches or ranks, so that it depends on their sizes",
    seen=("torchtitan PR #4167", "prime-rl PR #1850", "transformers #39241"),
    tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), evaluation={"every": 1, "steps": 2}),
    layouts=({"parallel": {"dp": 2}},),
    alone={"batch__micro_size": 4},
)

MASKED_RANKS = LeagueRow(
    name="masked-ranks",
    elsewhere="a rank on which no label counts divides by zero, or joins fewer sums than the others",
    seen=("OLMo-core PR #657", "OLMo-core PR #452", "OpenRLHF PR #583"),
    tables=small(data=samples(labels=[16, 5, 9, 2, 0, 0, 0, 0]), gradient_handlers=[BUCKETS]),
    layouts=({"parallel": {"dp": 2}},),
)

"""Rows about a backward in two halves: sums over ranks wait for the half that makes gradients of weights."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import BUCKETS, TIES, small

_DEEP = small(model__num_layers=4)
_WEIGHTS = {"use": "isp.communicator"}

SPLIT_DP = LeagueRow(
    name="split-backward-dp",
    elsewhere="replicas sum gradients before the second half of a split backward has added to them",
    seen=("pytorch #144530",),
    tables=_DEEP,
    layouts=(
        {
            "parallel": {"pp": 2, "dp": 2},
            "pipeline": {"use": "pp.zero_bubble_h1"},
            "gradient_handlers": [BUCKETS, TIES],
        },
    ),
)

SPLIT_WP = LeagueRow(
    name="split-backward-wp",
    elsewhere="shards of weights are freed, and their gradients reduced, before the second half of a split backward",
    seen=("pytorch PR #134052",),
    tables=_DEEP,
    layouts=({"parallel": {"pp": 2, "dp": 2, "wp": 2}, "pipeline": {"use": "pp.zero_bubble_v"}, "weights": _WEIGHTS},),
)

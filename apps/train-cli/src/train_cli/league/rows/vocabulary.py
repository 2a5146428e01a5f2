"""Rows about a vocabulary that several ranks share: each has the scores of a slice, for the tokens of all."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import samples, small

VOCABULARY_WP = LeagueRow(
    name="vocabulary-wp",
    elsewhere="the loss over a vocabulary in slices counts ignored labels, or only the tokens of its own rank",
    seen=("InternEvo PR #316",),
    tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
    layouts=(
        {
            "parallel": {"dp": 2, "wp": 2},
            "weights": {"use": "isp.communicator", "head": "vocabulary", "embedding": "hidden"},
        },
    ),
)

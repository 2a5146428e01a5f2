"""Rows about the norm of a gradient that no rank has whole: each element counts once."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import small

_TIGHT = small(model__tie_embeddings=True, optimizer__clip_norm=0.1)

CLIP_PP = LeagueRow(
    name="clip-pp",
    elsewhere="each stage clips by its own norm, or a tied table counts once per stage",
    seen=("torchtitan #596", "torchtitan #649", "Megatron-LM PR #7227"),
    tables=_TIGHT,
    layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},),
)

CLIP_WP = LeagueRow(
    name="clip-wp-pp",
    elsewhere="parts of a sharded weight, and weights that every rank has, are counted alike in the norm",
    seen=("torchtitan #596", "Megatron-LM PR #7227"),
    tables=_TIGHT,
    layouts=(
        {
            "parallel": {"pp": 2, "dp": 2, "wp": 2},
            "pipeline": {"use": "pp.one_f_one_b"},
            "weights": {"use": "isp.communicator"},
        },
    ),
)

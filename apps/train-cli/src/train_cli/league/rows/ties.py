"""Rows about a table that embeds and predicts: one parameter, however many ranks have it."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import SHARDED, TIES, small

TIED_STAGES = LeagueRow(
    name="tied-stages",
    elsewhere="each stage trains its own copy of a tied table, with a part of its gradient",
    seen=("torchtitan #1524", "Megatron-LM #844", "Megatron-LM #1548", "pytorch #51931"),
    tables=small(model__tie_embeddings=True),
    layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}, "gradient_handlers": [TIES]},),
)

SHARDED_TIES = LeagueRow(
    name="sharded-ties",
    elsewhere="with a sharded optimizer copies of a tied table are summed after their parts were stepped, or by another group",
    seen=("Megatron-LM #844", "Megatron-LM #4641"),
    tables=small(model__tie_embeddings=True),
    layouts=(
        {
            "parallel": {"pp": 2, "dp": 2},
            "pipeline": {"use": "pp.one_f_one_b"},
            "gradient_handlers": [SHARDED, TIES],
        },
    ),
)

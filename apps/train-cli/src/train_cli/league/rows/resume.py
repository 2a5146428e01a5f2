"""Rows about runs that go on from a checkpoint in another layout, beside one that was never stopped."""

from __future__ import annotations

from typing import Any

from train_cli.league.row import LeagueRow
from train_cli.league.small import SHARDED, small

_DP: dict[str, Any] = {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}
_WP: dict[str, Any] = {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}
_PP: dict[str, Any] = {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}}

RESUME_WP = LeagueRow(
    name="resume-wp",
    elsewhere="a run that goes on loses what some ranks had: shards, optimizer states, or the place in their samples",
    seen=("Megatron-Bridge PR #5637", "prime-rl #3332", "ISEEKYAN/Megatron-LM PR #104"),
    tables=small(model__tie_embeddings=True),
    layouts=(_DP, _WP),
    steps=2,
)

RESUME_PP = LeagueRow(
    name="resume-pp",
    elsewhere="a tied head is made anew from the table when a run goes on, or begins without its optimizer states",
    seen=("Automodel #2571",),
    tables=small(model__tie_embeddings=True),
    layouts=(_DP, _PP),
    steps=2,
)

RESUME_AGAIN = LeagueRow(
    name="resume-again",
    elsewhere="the second time that a run goes on its samples begin anew, or random numbers are off by a draw",
    seen=("torchtitan #3908", "datasets #8308", "Megatron-Bridge #5257"),
    tables=small(model={"factory": "train_cli.league.adapted:layers", "options": {"dropout": 0.2}}, optimizer__lr=1e-2),
    layouts=(_PP, _WP, _PP),
    steps=2,
    plain=False,  # a loop of its own draws numbers of its own
)

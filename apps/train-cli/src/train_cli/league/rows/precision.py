"""Rows about formats that are narrower than fp32."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import SHARDED, small

_LIMIT = 2.0**-7
"""What the design promises for bf16: masters that differ in their last bits may be rounded to neighbouring weights."""

_SLOW = small(precision={"compute": "bf16"}, optimizer__lr=3e-5)
"""A step is less than half of what bf16 can tell apart, so only masters keep it."""

BF16_MASTERS = LeagueRow(
    name="bf16-masters",
    elsewhere="masters, moments or sums of gradients are kept in bf16, where small updates are rounded away",
    seen=("apex #1728", "speculators PR #765", "Automodel PR #3444"),
    tables=_SLOW,
    layouts=({"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]},),
    steps=16,
    limit=_LIMIT,
    plain=False,  # of one format alone
)

RESUME_MASTERS = LeagueRow(
    name="resume-masters",
    elsewhere="a run that goes on makes its masters anew from weights in bf16",
    seen=("OpenTau #185",),
    tables=_SLOW,
    layouts=(
        {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]},
        {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},
    )
    * 8,
    steps=1,  # between two rounds to bf16, which would undo it
    limit=_LIMIT,
    plain=False,
)

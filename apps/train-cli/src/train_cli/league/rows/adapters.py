"""Rows about low-rank adapters on a frozen model (Hu et al. 2021, LoRA), of which few weights are trained."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import small

_ADAPTED = small(model={"factory": "train_cli.league.adapted:layers"}, optimizer__lr=1e-2)

ADAPTERS_WP = LeagueRow(
    name="adapters-wp",
    elsewhere="of sharded adapters most get no gradient, or each rank trains a factor of its own",
    seen=("torchforge #592", "mcore-bridge PR #173", "Megatron-Bridge #5634"),
    tables=_ADAPTED,
    layouts=({"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}},),
)

ADAPTERS_PP = LeagueRow(
    name="adapters-pp",
    elsewhere="a stage on which nothing is trained passes no gradient to the adapters before it, or the run ends there",
    seen=("ColossalAI #3889",),
    tables=small(model={"factory": "train_cli.league.adapted:layers", "options": {"trained": [0]}}, optimizer__lr=1e-2),
    layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.zero_bubble_h1"}},),
)

DROPOUT_PP = LeagueRow(
    name="dropout-pp",
    elsewhere="stages draw other random numbers than one process does, or the recomputation than the forward",
    seen=("Megatron-LM PR #6858",),
    tables=small(model={"factory": "train_cli.league.adapted:layers", "options": {"dropout": 0.2}}, optimizer__lr=1e-2),
    layouts=(
        {
            "parallel": {"pp": 2, "dp": 1},
            "pipeline": {"use": "pp.interleaved"},
            "activations": {"use": "core.recompute"},
        },
    ),
    plain=False,  # a loop of its own draws numbers of its own
)

"""Rows about memory that leaves the device: what comes back is what left, and nothing is dropped meanwhile."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.small import BUCKETS, small

OFFLOAD = LeagueRow(
    name="offload",
    elsewhere="with offload only the last micro-batch's gradient arrives, or the weights that come back are older ones",
    seen=("DeepSpeed #7981", "DeepSpeed #7967", "DeepSpeed PR #8186"),
    tables=small(gradient_handlers=[BUCKETS]),
    layouts=(
        {
            "parallel": {"dp": 2},
            "offload": [
                {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002},
                {"use": "memory.everything", "parts": ["weights", "gradients"]},
            ],
        },
    ),
    moves=True,
)

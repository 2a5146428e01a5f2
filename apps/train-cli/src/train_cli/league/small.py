"""The plan that the rows of the league change. Imports no torch."""

from __future__ import annotations

from typing import Any

from sley_testing.plans import Tables, changed

_SMALL: Tables = {
    "run": {"name": "league", "steps": 3, "device": "cpu", "seed": 5},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"factory": "train_cli.league.samples:DrawnSamples", "options": {}, "shuffle": False},
    "batch": {"global_size": 8, "micro_size": 1},
    # With the default `eps` of 1e-8 an element whose gradient is all rounding makes a step of full size, in any direction.
    "optimizer": {"use": "core.adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5, "eps": 1e-5},
    "limits": {"start_timeout_s": 60.0, "collective_timeout_s": 60.0},
}

BUCKETS = {"use": "dp.bucketed", "bucket_mb": 0.002}
"""A reducer with several buckets, though the model is tiny."""

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.002}
"""The same of a sharded optimizer."""

TIES = {"use": "pp.shared_modules"}
"""What sums the gradients of weights that stages share."""


def small(**changes: Any) -> Tables:
    """Returns the tables of a Llama of two blocks that takes steps of eight samples in fp32, with `changes` as in `changed`."""
    return changed(_SMALL, **changes)


def samples(**options: Any) -> Tables:
    """Returns the table `[data]` of `DrawnSamples` with these options, in the order of their numbers."""
    return changed(_SMALL, data__options=options)["data"]  # type: ignore[no-any-return]  # a table

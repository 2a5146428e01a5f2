"""Whatever a plan joins, nothing of it is left in the model's modules when the run is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.model.layers import Model
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import Traces, assert_untouched, drafts_kept

BASE: dict[str, Any] = {
    "run": {"name": "left", "steps": 2, "device": "cpu", "seed": 7},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 27, "vocab_size": 257},
    "data": {"use": "data.text", "files": ["text/*.txt"], "sequence": 16, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"use": "core.adamw", "lr": 3e-3},
    "evaluation": {"every": 9, "steps": 1},
    "precision": {"compute": "fp64", "accumulation": "direct"},
}
SHARDED = {"use": "isp.communicator"}
AT_ONCE = {"head": "vocabulary", "embedding": "hidden", "launch": "attention"}
SEQUENCE = {"use": "isp.all_to_all"}

PLANS: dict[str, dict[str, Any]] = {
    "dp": {
        "parallel": {"dp": 4},
        "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.01}],
        "activations": {"use": "core.recompute"},
    },
    "wp": {"parallel": {"dp": 4, "wp": 2}, "weights": SHARDED},
    "sp and wp, in halves": {
        "parallel": {"dp": 2, "sp": 2, "wp": 2},
        "sequence": SEQUENCE,
        "weights": SHARDED | AT_ONCE,
        "precision": {"compute": "bf16"},
    },
    "pp, wp and sp": {
        "parallel": {"pp": 2, "dp": 1, "sp": 2, "wp": 2},
        "pipeline": {"use": "pp.zero_bubble_v"},
        "weights": SHARDED | AT_ONCE,
        "sequence": SEQUENCE,
    },
}


def left(plans: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """What a closed run of each plan left in its model, on this rank."""
    found = {}
    for name, changes in plans.items():
        with World.join("cpu") as world, drafts_kept() as kept:
            with assemble(plan_from_dict(BASE | changes, folder), world) as run:
                run.step()
                run.evaluate()
            run.close()
            ((model, before),) = kept
        found[name] = _said(before, model)
    return found


def _said(before: Traces, model: Model) -> str:
    try:
        assert_untouched(before, model.layers)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_closed_run_leaves_nothing_in_its_model(ranks, texts):
    for found in ranks(4, 180)(left, PLANS, texts):
        assert found == dict.fromkeys(PLANS, "")

"""Weight gradients multiplied straight into the store are those of autograd."""

from __future__ import annotations

from copy import deepcopy

import pytest

from sley_core.testing.runs import assert_parity, record

PLAN = {
    "run": {"name": "direct", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "core.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"use": "core.text", "source": "python-stdlib", "sequence": 24},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "precision": {"compute": "fp64"},
}


def plan(accumulation, **changes):
    tables = deepcopy(PLAN)
    tables["precision"]["accumulation"] = accumulation
    for path, value in changes.items():
        table, key = path.split("__")
        tables.setdefault(table, {})[key] = value
    return tables


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_direct_equals_autograd(tied, fraction):
    changes = {"model__tie_embeddings": tied, "activations__use": "core.recompute", "activations__fraction": fraction}
    assert_parity(record(plan("autograd", **changes), 3), [record(plan("direct", **changes), 3)], "fp64")


def test_direct_equals_autograd_on_two_ranks(ranks):
    reference = record(plan("autograd"), 3)
    assert_parity(reference, ranks(2)(record, plan("direct"), 3), "fp64")


@pytest.mark.parametrize("mode", ["autograd", "direct"])
def test_autograd_sees_no_weight_gradient_of_a_linear(mode):
    """In direct mode the product is written where it is summed: autograd gets nothing to keep."""
    seen = []

    def watch(run):
        parameter = run.book["blocks.0.feed_forward.up.weight"].parameter
        # a hook on the gradient itself would be a reason to make one
        parameter.register_post_accumulate_grad_hook(lambda summed: seen.append(summed.grad is not None))

    record(plan(mode), 1, prepare=watch)
    assert seen == [mode == "autograd"] * 4

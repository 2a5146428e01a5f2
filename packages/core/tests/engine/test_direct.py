"""Weight gradients multiplied straight into the store are those of autograd."""

from __future__ import annotations

import pytest

from sley_testing.plans import small_plan
from sley_testing.runs import assert_parity, record


def plan(accumulation, **changes):
    return small_plan(precision__accumulation=accumulation, **changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_direct_equals_autograd(texts, tied, fraction):
    changes = {"model__tie_embeddings": tied, "activations__use": "core.recompute", "activations__fraction": fraction}
    reference = record(plan("autograd", **changes), 3, folder=texts)
    assert_parity(reference, [record(plan("direct", **changes), 3, folder=texts)], "fp64")


def test_direct_equals_autograd_on_two_ranks(ranks, texts):
    reference = record(plan("autograd"), 3, folder=texts)
    assert_parity(reference, ranks(2)(record, plan("direct"), 3, folder=texts), "fp64")


@pytest.mark.parametrize("mode", ["autograd", "direct"])
def test_autograd_sees_no_weight_gradient_of_a_linear(texts, mode):
    """In direct mode the product is written where it is summed: autograd gets nothing to keep."""
    seen = []

    def watch(run):
        parameter = run.registry["blocks.0.feed_forward.up.weight"].parameter
        # a hook on the gradient itself would be a reason to make one
        parameter.register_post_accumulate_grad_hook(lambda summed: seen.append(summed.grad is not None))

    record(plan(mode), 1, folder=texts, prepare=watch)
    assert seen == [mode == "autograd"] * 4

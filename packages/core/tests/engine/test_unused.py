"""Parameters that some ranks, some micro-batches or nobody uses: zeros count as zeros, and nobody waits for them."""

from __future__ import annotations

import pytest
import torch

from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_parity, record, same_on_all


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("global_size", [2, 6])
def test_what_one_rank_uses_is_summed_with_the_zeros_of_the_other(ranks, own, small, recompute, global_size):
    """Samples go to ranks in halves: of 2 rank 0 has an even one and rank 1 an odd one, of 6 both have both kinds."""
    tables = small(
        model={"factory": "own_models:branches"},
        batch={"global_size": global_size, "micro_size": 1},
        data__shuffle=False,
        activations={"use": "core.recompute" if recompute else "core.keep"},
    )
    reference = record(tables, 4, folder=own)
    layouts = ranks(2)(record, tables, 4, folder=own)
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)
    for found in layouts:
        for wanted, gradients in zip(reference.gradients, found.gradients, strict=True):
            assert_close_gradients(wanted, gradients, 1e-10, floor=1e-12)
            assert gradients["blocks.0.even.weight"].any()
            assert gradients["blocks.0.odd.weight"].any()
            assert not gradients["blocks.0.never.weight"].any()
    for name, value in reference.first.items():
        assert torch.equal(value, reference.weights[name]) == (".never." in name)


def test_what_nobody_uses_still_decays(own, small):
    """A gradient of zero is a gradient: the optimizer steps the parameter, as torch does with zeros."""
    tables = small(model={"factory": "own_models:branches"}, optimizer__weight_decay=0.5)
    recorded = record(tables, 1, folder=own)
    name = "blocks.0.never.weight"
    torch.testing.assert_close(recorded.weights[name], recorded.first[name] * (1 - 0.1 * 0.5))

"""The work on a share of a sample, or on several, from that on one and on two."""

from __future__ import annotations

import pytest

from sley_estimate.layers.grown import COPIED, grown, with_copies
from sley_estimate.layers.operators import LayerWork, Operator

WEIGHT = 1000


def work(samples: int, *, copies: int = 0) -> LayerWork:
    """A product of a weight, an attention, and so many copies of what it gives, all on `samples` samples."""
    product = Operator("mm", WEIGHT + 40 * samples, 500 * samples, "fp32")
    attention = Operator("attention", 80 * samples, 60 * samples, "fp32")
    forward = (product, *(Operator("clone", 20 * samples) for _ in range(copies)), attention)
    return LayerWork(forward, (), (product,), (product,), (), WEIGHT, 20 * samples, 40 * samples)


@pytest.mark.parametrize("samples", [0.25, 0.5, 3])
def test_a_weight_is_read_whole_for_a_share_of_a_sample(samples: float) -> None:
    """A layer that copied on two samples and not on one was taken for a share of its work, its weights' bytes included."""
    found = grown(work(1), work(2, copies=1), samples)
    by_name = {one.name: one for one in found.forward}
    assert by_name["mm"].num_bytes == WEIGHT + 40 * samples
    assert by_name["mm"].flops == 500 * samples
    assert by_name["attention"].num_bytes == 80 * samples
    assert by_name["clone"].num_bytes == 20 * samples
    assert found.kept_bytes == 40 * samples


def test_a_swapped_attention_copies_what_it_reads_and_writes_there_and_back() -> None:
    plain, copied = work(2), with_copies(work(2))
    for phase in ("forward", "backward", "input_gradient"):
        more = sum(one.num_bytes for one in copied.of(phase)) - sum(one.num_bytes for one in plain.of(phase))
        assert more == COPIED * 160
    assert copied.recompute == plain.recompute
    assert copied.weight_gradient == plain.weight_gradient

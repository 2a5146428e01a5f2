"""Sharded weights give the numbers of the one-process run."""

from __future__ import annotations

import pytest

THREE = {"model__num_layers": 3, "evaluation": {"every": 2, "steps": 1}}
"""Blocks enough for one that is neither the first nor the last, and an evaluation between two steps.

Elsewhere in these tests a model has two, and is evaluated at the end.
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("wp", "tied"),
    [
        (2, False),
        (4, True),
        pytest.param(2, True, marks=pytest.mark.campaign),
        pytest.param(4, False, marks=pytest.mark.campaign),
    ],
)
def test_every_rank_holds_a_shard(parity, wp, tied):
    """Loss, norm, every gathered gradient of the first step, and weights after three AdamW steps, in fp64.

    257 tokens and 27 channels divide by no number of ranks: shards are padded.
    """
    parity(wp, wp=wp, model__tie_embeddings=tied, **THREE)


@pytest.mark.campaign  # the common run has the contract's and those of `reduce = "step"`
def test_copies_of_shards_are_summed(parity):
    """Two shards in two copies: a shard's gradient is summed over `wdp`, a norm's over the stage."""
    parity(4, wp=2, dp=4, **THREE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "sp", "wp"), [(2, 2, 2), (4, 2, 4), (4, 4, 2), pytest.param(4, 2, 2, marks=pytest.mark.campaign)]
)
def test_shards_of_weights_and_slices_of_sequences(parity, world, sp, wp):
    """`sp` and `wp` are independent; either may be the larger."""
    changes = {"parallel": {"sp": sp}, "sequence": {"use": "isp.all_to_all"}, "model__heads": 4}
    parity(world, wp=wp, dp=world // sp, **changes)


def test_single_precision(parity):
    parity(2, wp=2, precision__compute="fp32")


@pytest.mark.sample(1)
@pytest.mark.parametrize("micro", [1, 4])
def test_any_number_of_micro_batches(parity, micro):
    parity(2, wp=2, batch__micro_size=micro)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("unit", "fraction"),
    [
        ("layer", 0.5),
        ("module", 1.0),
        pytest.param("layer", 1.0, marks=pytest.mark.campaign),
        pytest.param("module", 0.5, marks=pytest.mark.campaign),
    ],
)
def test_recomputation(parity, fraction, unit):
    activations = {"use": "core.recompute", "fraction": fraction}
    parity(2, wp=2, weights={"unit": unit}, activations=activations, **THREE)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["inf", 1.0])
def test_norms_count_each_shard_once(parity, kind):
    """The norm that clips is the model's, whatever p it has."""
    parity(2, wp=2, optimizer__clip_kind=kind)


@pytest.mark.parametrize(
    "match",
    [
        "*query*",
        pytest.param("blocks.*", marks=pytest.mark.campaign),
        pytest.param("embed*", marks=pytest.mark.campaign),
        pytest.param("*norm*", marks=pytest.mark.campaign),
    ],
)
def test_frozen_weights(parity, match):
    """Frozen weights are gathered and not reduced; those before a frozen one still get their gradients."""
    parity(2, wp=2, optimizer__groups=[{"match": match, "freeze": True}])


def test_bf16_with_masters(parity):
    """Shards of bf16 weights, with fp32 masters of the shards."""
    parity(2, wp=2, precision__compute="bf16")

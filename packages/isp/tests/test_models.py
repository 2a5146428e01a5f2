"""Any model given as layers trains sharded as it does whole, however it uses its weights."""

from __future__ import annotations

import pytest

from sley_testing.runs import record

APART = {"batch__micro_size": 1, "run__seed": 1}
"""A seed under which the first micro-batches of two ranks take different branches."""


def test_models_of_their_own(parities):
    """No two linears of one size, some without bias, one used twice; adapters, trained biases of frozen weights, a frozen
    start; the row of a padding token; a model that recomputes itself by torch's older checkpoint.
    """
    models = ["mixed", "adapted", "frozen_start", "padded_tokens", "recomputing"]
    parities(2, [{"factory": name, "options": {"reentrant": True} if name == "recomputing" else {}} for name in models])


def test_models_that_use_their_weights_in_other_ways(parities):
    """A bias alone is sharded; torch runs a block in another way in evaluations; sizes of weights scale; parametrized weights,
    replaced forwards, calls with other tensors, by name; a parameter that a module of another kind holds stays whole.
    """
    direct = {"precision": {"compute": "fp64", "accumulation": "direct"}}
    models = ["half_sharded", "encoder", "by_size", "replaced", "tied_to_no_linear"]
    parities(2, [{"factory": name} for name in models] + [{"factory": "half_sharded"} | direct])


def test_a_layer_that_calls_one_of_its_linears_by_the_data(parities):
    """Ranks take different ones in the same step, and their gradients are reduced together."""
    parities(2, [{"weights": {"reduce": reduce}} for reduce in ("micro_batch", "step")], factory="branches", **APART)


def test_autocast(ranks, sharded, texts):
    """With and without bias; sharded and whole runs round alike but for the order of sums."""
    changes = {"factory": "autocast", "precision__compute": "fp32"}
    reference = record(sharded(1, 1, **changes), 2, folder=texts)
    for found in ranks(2)(record, sharded(2, **changes), 2, folder=texts):
        assert found.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=2**-7)
        for name, gradient in reference.gradients[0].items():
            assert (found.gradients[0][name] - gradient).norm() <= 2**-7 * gradient.norm() + 1e-6, name


def test_narrow_precision(parities):
    """fp32; bf16 shards with fp32 masters, once per step in wider gradients."""
    parities(2, [{"precision__compute": "fp32"}, {"precision__compute": "bf16", "weights": {"reduce": "step"}}])

"""Sequences split over ranks change no number."""

from __future__ import annotations

import pytest

from sley_testing.parity import assert_close_gradients
from sley_testing.plans import changed, small_plan
from sley_testing.runs import alone, assert_parity, record, same_on_all

PLAN = small_plan(
    run__steps=4,  # one more than is recorded: the last one evaluates, and `record` does
    batch__global_size=4,
    learning_rate={"use": "core.cosine", "warmup_steps": 1},
    evaluation={"every": 2, "steps": 2},
)


def check(ranks, folder, sp, dp=1, **changes):
    """`sp` slices of `dp` replicas' samples against one process: rows, gradients, weights and the held-out loss."""
    tables = changed(PLAN, **changes)
    reference = alone(tables, 3, folder=folder)
    split = changed(tables, parallel={"sp": sp, "dp": dp}, sequence={"use": "isp.all_to_all"})
    layouts = ranks(sp * dp, 120)(record, split, 3, folder=folder)
    precision = tables["precision"]["compute"]
    assert_parity(reference, layouts, precision)
    same_on_all(layouts)
    for layout in layouts:
        assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9 if precision == "fp64" else 1e-5)
        assert [row["tokens"] for row in layout.rows] == [row["tokens"] for row in reference.rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize("documents", ["pack", "cut", "pad"])
@pytest.mark.parametrize("sp", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_documents_of_every_kind(ranks, texts, documents, sp):
    check(ranks, texts, sp, data__documents=documents)


@pytest.mark.parametrize(
    ("sp", "kv_heads"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.campaign), pytest.param(4, 4, marks=pytest.mark.campaign)]
)
def test_fewer_and_as_many_key_heads_as_ranks(ranks, texts, sp, kv_heads):
    check(ranks, texts, sp, model__kv_heads=kv_heads)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sp", "documents"),
    [
        (2, "pad"),
        (4, "pack"),
        pytest.param(2, "pack", marks=pytest.mark.campaign),
        pytest.param(4, "pad", marks=pytest.mark.campaign),
    ],
)
def test_single_precision(ranks, texts, documents, sp):
    check(ranks, texts, sp, data__documents=documents, precision__compute="fp32")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sp", [2, 4])
def test_half_precision(ranks, texts, sp):
    """Weights and activations in bf16: exchanges carry it as it is, and copies of a key head are summed in it."""
    tables = changed(PLAN, precision__compute="bf16")
    reference = record(tables, 1, folder=texts)
    split = {**tables, "parallel": {"sp": sp, "dp": 1}, "sequence": {"use": "isp.all_to_all"}}
    for layout in ranks(sp, 120)(record, split, 1, folder=texts):
        assert_close_gradients(reference.gradients[0], layout.gradients[0], 2**-7)
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=2**-7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fraction", [pytest.param(0.0, marks=pytest.mark.campaign), 0.5, 1.0])
def test_recomputation(ranks, texts, fraction):
    check(ranks, texts, 2, activations__use="core.recompute", activations__fraction=fraction)


@pytest.mark.campaign  # the common run has them beside shards of weights (test_with_weights.py)
@pytest.mark.parametrize("micro", [1, 2])
def test_beside_replicas(ranks, texts, micro):
    check(ranks, texts, 2, dp=2, batch__micro_size=micro)


def test_tied_embeddings(ranks, texts):
    check(ranks, texts, 2, model__tie_embeddings=True)


def test_sgd_whose_scale_shows(ranks, texts):
    """Adam hides a wrong scale of the gradient; plain SGD does not."""
    check(ranks, texts, 2, optimizer__use="core.sgd", optimizer__lr=0.1)

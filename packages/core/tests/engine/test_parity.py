"""Parity (docs/internals.md): every layout equals the one-process run of the same plan."""

from __future__ import annotations

import itertools

import pytest

from sley_testing.plans import changed, small_plan
from sley_testing.runs import alone, assert_parity, record, same_on_all

PLAN = small_plan(evaluation={"every": 2, "steps": 1}, learning_rate={"use": "core.cosine", "warmup_steps": 1})


def check(ranks, texts, sizes, **changes):
    tables = changed(PLAN, **changes)
    reference = alone(tables, 3, folder=texts)
    for size in sizes:
        layouts = ranks(size)(record, tables, 3, folder=texts)
        assert_parity(reference, layouts, tables["precision"]["compute"])
        same_on_all(layouts)
        for layout in layouts:
            assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9 if "64" in str(tables) else 1e-5)


@pytest.mark.parametrize(
    ("documents", "tied"),
    [
        ("pack", True),
        ("pad", False),
        ("cut", True),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in (("pack", False), ("pad", True), ("cut", False))),
    ],
)
def test_documents_and_ties(ranks, texts, documents, tied):
    check(ranks, texts, [2], data__documents=documents, model__tie_embeddings=tied)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fraction", [0.5, 0.0, 1.0])
def test_recomputation(ranks, texts, fraction):
    check(ranks, texts, [2], activations__use="core.recompute", activations__fraction=fraction)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "micro"), list(itertools.product([2, 4], [1, 2])))
def test_accumulation_and_size(ranks, texts, size, micro):
    """Global batch 8: k = 8 / (size x micro) is 4, 2, 2, 1."""
    check(ranks, texts, [size], batch__micro_size=micro)


@pytest.mark.sample(1)
@pytest.mark.parametrize("documents", ["pack", "pad"])
@pytest.mark.parametrize("size", [2, 4])
def test_single_precision(ranks, texts, documents, size):
    check(ranks, texts, [size], precision__compute="fp32", data__documents=documents)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [1.0, 3.0, "inf"])
def test_norms(ranks, texts, kind):
    check(ranks, texts, [2], optimizer__clip_kind=kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 4])
def test_sgd_whose_scale_shows(ranks, texts, size):
    """Adam hides a wrong scale of the gradient; plain SGD without clipping does not."""
    check(ranks, texts, [size], optimizer__use="core.sgd", optimizer__clip_norm=None, optimizer__lr=0.1, batch__micro_size=1)


def test_recomputation_changes_no_bit(texts):
    kept = record(PLAN, 3, folder=texts)
    again = record(changed(PLAN, activations__use="core.recompute"), 3, folder=texts)
    same_on_all([kept, again])


def test_evaluation_changes_no_bit(texts):
    without = changed(PLAN, evaluation=None)
    with_it, plain = record(PLAN, 3, folder=texts), record(without, 3, folder=texts)
    same_on_all([with_it, plain])
    assert [row["loss"] for row in with_it.rows] == [row["loss"] for row in plain.rows]
    assert "held_out_loss" in with_it.rows[1]
    assert "held_out_loss" not in with_it.rows[0]

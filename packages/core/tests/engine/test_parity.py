"""Parity (docs/design.md): every layout equals the one-process run of the same plan."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest

from sley_core.testing.runs import assert_parity, record, same_on_all

PLAN = {
    "run": {"name": "parity", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "core.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"use": "core.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "learning_rate": {"use": "core.cosine", "warmup_steps": 1},
    "evaluation": {"every": 2, "steps": 1},
    "precision": {"compute": "fp64"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of documents of unequal length, some longer and some much shorter than a sequence."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents))
    return folder


def plan(**changes):
    """PLAN with `table__key=value` set; None leaves the key out."""
    tables = deepcopy(PLAN)
    for path, value in changes.items():
        table, key = path.split("__")
        tables.setdefault(table, {})[key] = value
    return tables


def check(ranks, folder, sizes, **changes):
    tables = plan(**changes)
    reference = record(tables, 3, folder=folder)
    for size in sizes:
        layouts = ranks(size)(record, tables, 3, folder=folder)
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
def test_documents_and_ties(ranks, folder, documents, tied):
    check(ranks, folder, [2], data__documents=documents, model__tie_embeddings=tied)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_recomputation(ranks, folder, fraction):
    check(ranks, folder, [2], activations__use="core.recompute", activations__fraction=fraction)


@pytest.mark.parametrize(("size", "micro"), list(itertools.product([2, 4], [1, 2])))
def test_accumulation_and_size(ranks, folder, size, micro):
    """Global batch 8: k = 8 / (size x micro) is 4, 2, 2, 1."""
    check(ranks, folder, [size], batch__micro_size=micro)


@pytest.mark.parametrize("documents", ["pack", "pad"])
def test_single_precision(ranks, folder, documents):
    check(ranks, folder, [2, 4], precision__compute="fp32", data__documents=documents)


@pytest.mark.parametrize("kind", [1.0, 3.0, "inf"])
def test_norms(ranks, folder, kind):
    check(ranks, folder, [2], optimizer__clip_kind=kind)


def test_sgd_whose_scale_shows(ranks, folder):
    """Adam hides a wrong scale of the gradient; plain SGD without clipping does not."""
    check(
        ranks,
        folder,
        [2, 4],
        optimizer__use="core.sgd",
        optimizer__clip_norm=None,
        optimizer__lr=0.1,
        batch__micro_size=1,
    )


def test_recomputation_changes_no_bit(folder):
    kept = record(plan(), 3, folder=folder)
    again = record(plan(activations__use="core.recompute"), 3, folder=folder)
    same_on_all([kept, again])


def test_evaluation_changes_no_bit(folder):
    tables = plan(evaluation__every=2)
    without = plan()
    del without["evaluation"]
    with_it, plain = record(tables, 3, folder=folder), record(without, 3, folder=folder)
    same_on_all([with_it, plain])
    assert [row["loss"] for row in with_it.rows] == [row["loss"] for row in plain.rows]
    assert "held_out_loss" in with_it.rows[1]
    assert "held_out_loss" not in with_it.rows[0]

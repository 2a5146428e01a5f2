"""Slices of sequences and shards of weights, which are independent: every relation of sp and wp gives one result."""

from __future__ import annotations

import pytest

from sley_testing.runs import alone, assert_parity, record, same_on_all


def check(ranks, folder, sharded, world, sp, wp, **changes):
    """`world` ranks, seen as dp x sp by what they compute and as wdp x wp by what they store."""
    precision = changes.get("precision__compute", "fp64")
    changes = {"model__heads": 4, "model__kv_heads": 2, "batch__global_size": 2, "batch__micro_size": 1, **changes}
    reference = alone(sharded(1, 1, **changes), 3, folder=folder)
    tables = sharded(wp, world // sp, **changes)
    tables["parallel"] |= {"sp": sp}
    tables["sequence"] = {"use": "isp.all_to_all"}
    layouts = ranks(world, 180)(record, tables, 3, folder=folder)
    assert_parity(reference, layouts, precision)
    same_on_all(layouts)
    for layout in layouts:
        assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9 if precision == "fp64" else 1e-5)


@pytest.mark.parametrize(
    ("world", "sp", "wp"),
    [
        (2, 2, 2),
        (4, 4, 2),
        pytest.param(2, 2, 1, marks=pytest.mark.campaign),
        pytest.param(2, 1, 2, marks=pytest.mark.campaign),
        pytest.param(4, 2, 4, marks=pytest.mark.campaign),
        pytest.param(4, 4, 4, marks=pytest.mark.campaign),
        pytest.param(4, 2, 2, marks=pytest.mark.campaign),
        pytest.param(4, 2, 1, marks=pytest.mark.campaign),
    ],
)
def test_any_relation(ranks, texts, sharded, world, sp, wp):
    check(ranks, texts, sharded, world, sp, wp, model__tie_embeddings=world == 4)


@pytest.mark.parametrize(
    ("world", "sp", "wp"),
    [(2, 2, 2), pytest.param(4, 2, 4, marks=pytest.mark.campaign), pytest.param(4, 4, 2, marks=pytest.mark.campaign)],
)
@pytest.mark.parametrize("documents", ["pack", pytest.param("cut", marks=pytest.mark.campaign)])
def test_single_precision(ranks, texts, sharded, world, sp, wp, documents):
    check(ranks, texts, sharded, world, sp, wp, precision__compute="fp32", data__documents=documents)


@pytest.mark.parametrize("fraction", [0.5, pytest.param(1.0, marks=pytest.mark.campaign)])
def test_recomputation(ranks, texts, sharded, fraction):
    """Exchanges and gathers run again, in one order on all ranks, though their groups cross."""
    again = {"activations__use": "core.recompute", "activations__fraction": fraction, "batch__global_size": 4}
    check(ranks, texts, sharded, 4, 2, 4, **again)

"""A loss of one's own is a sum over positions, or refused: what looks from one to another misses other slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_core.errors import RunError
from sley_core.testing.plans import changed, small_plan
from sley_core.testing.runs import assert_parity, record, same_on_all

OWN = Path(__file__).parent / "own"
PLAN = small_plan(
    model={"factory": "attentive:layers", "options": {"wrapped": True}},
    data={"use": "core.text", "source": "python-stdlib", "sequence": 48, "documents": "cut"},
    batch__global_size=4,
    optimizer={"use": "core.sgd", "lr": 1e-2},
)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.syspath_prepend(OWN)
    return OWN


def tables(name, sp, **changes):
    plan = changed(PLAN, loss={"factory": f"losses:{name}"}, **changes)
    return changed(plan, parallel={"sp": sp, "dp": 1}, sequence={"use": "isp.all_to_all"}) if sp > 1 else plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence", [48, 6, 2])
def test_a_sum_over_positions(ranks, own, sequence):
    """Slices of 24, of 3, and of a single position."""
    reference = record(tables("Sum", 1, data__sequence=sequence), 2, folder=own)
    layouts = ranks(2, 60)(record, tables("Sum", 2, data__sequence=sequence), 2, folder=own)
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)


@pytest.mark.parametrize("name", ["Counting", "Weighted"])
def test_losses_that_count_their_calls_or_weigh_classes(ranks, own, name):
    """That a loss is asked about its parts is no call; sums of class weights round."""
    reference = record(tables(name, 1), 2, folder=own)
    layouts = ranks(2, 60)(record, tables(name, 2), 2, folder=own)
    for layout in layouts:
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=1e-6)
        assert layout.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=1e-6)


def test_a_loss_that_rounds_is_none_that_looks_around(ranks, own):
    reference = record(tables("Half", 1, precision__compute="fp32"), 2, folder=own)
    for layout in ranks(2, 60)(record, tables("Half", 2, precision__compute="fp32"), 2, folder=own):
        assert layout.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=1e-2)


def test_a_loss_that_draws_is_asked_with_the_same_numbers_or_let_alone(ranks, own):
    """What it draws is not promised to be the same (docs/design.md), but it is no reason to refuse it."""
    for layout in ranks(2, 60)(record, tables("Drawn", 2), 2, folder=own):
        assert len(layout.rows) == 2


def said(plan, folder):
    try:
        record(plan, 1, folder=folder)
    except RunError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message
    return "", "nothing"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["Smooth", "Shifted", "Pooled"])
@pytest.mark.parametrize("compute", ["fp64", "fp32"])
def test_a_loss_that_looks_at_other_positions_is_refused(ranks, own, name, compute):
    plan = tables(name, 2, precision__compute=compute)
    for code, message in ranks(2, 60)(said, plan, own):
        assert code == "loss-not-additive", message
        assert "positions" in message


@pytest.mark.parametrize("name", ["Smooth", "Shifted", "Pooled"])
def test_it_is_right_where_sequences_are_whole(own, name):
    assert record(tables(name, 1), 1, folder=own).rows[0]["loss"] > 0

"""A loss of one's own is a sum over positions, or refused: what looks from one to another misses other slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity, record, same_on_all

OWN = Path(__file__).parent / "own"
PLAN = small_plan(
    model={"factory": "attentive:layers", "options": {"wrapped": True}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 48, "documents": "cut"},
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
    """What it draws is not promised to be the same (docs/internals.md), but it is no reason to refuse it."""
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


WHOLE = {"loss__sequence": "whole", "batch__micro_size": 2, "evaluation": {"every": 2, "steps": 1}, "data__held_out": 0.1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("wp", [1, 2])
@pytest.mark.parametrize("name", ["Contrastive", "Smooth", "Shifted", "Pooled"])
def test_whole_sequences_have_the_numbers_of_one_process(ranks, own, name, wp):
    """Trained and evaluated; the loss and its weight count once, however many ranks compute them."""
    shards = {"weights": {"use": "isp.communicator"}} if wp > 1 else {}
    layout = changed(tables(name, 2, **WHOLE), parallel__wp=wp, **shards)
    found = ranks(2, 60)(record, layout, 3, folder=own)
    assert_parity(record(tables(name, 1, **WHOLE), 3, folder=own), found, "fp64")
    same_on_all(found)


def test_what_a_loss_of_whole_sequences_draws_is_the_same_on_all_ranks(ranks, own):
    """Else each rank would take its slice of the gradient of another loss."""
    plan = tables("Contrastive", 2, loss__options={"draws": 1.0}, **WHOLE)
    first, second = ranks(2, 60)(heads_of_whole, plan, own)
    assert torch.equal(first, second)
    assert first.abs().max() > 0


def heads_of_whole(plan, folder):
    """The gradient of whole outputs, of which each rank keeps its slice."""
    seen = []
    with World.join("cpu") as world, assemble(plan_from_dict(plan, folder), world) as run:
        give = run.stepper.executor.whole

        def watched(*args):
            output, fields = give(*args)
            output.register_hook(seen.append)
            return output, fields

        watched.counts = give.counts
        run.stepper.executor.whole = watched
        run.step()
    return torch.cat(seen)


def test_an_output_without_positions_is_refused(ranks, own):
    plan = tables("Sum", 2, model={"factory": "attentive:paired"}, **WHOLE)
    assert [code for code, _ in ranks(2, 60)(said, plan, own)] == ["outputs-apart"] * 2

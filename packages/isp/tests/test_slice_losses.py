"""A loss over slices is a sum over positions, or gets full sequences, or is refused."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity, record, same_on_all

PLAN = small_plan(
    model={"factory": "attentive:layers", "options": {"wrapped": True}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 48, "documents": "cut"},
    batch__global_size=4,
    optimizer={"use": "core.sgd", "lr": 1e-2},
)
WHOLE = {"loss__sequence": "whole", "batch__micro_size": 2, "evaluation": {"every": 2, "steps": 1}, "data__held_out": 0.1}


def tables(name, sp, **changes):
    plan = changed(PLAN, loss={"factory": f"losses:{name}"}, **changes)
    return changed(plan, parallel={"sp": sp, "dp": 1}, sequence={"use": "isp.all_to_all"}) if sp > 1 else plan


def recorded(plans, folder):
    """Each run of this rank, or the code of its error."""
    runs = []
    for plan in plans:
        try:
            runs.append(record(plan, 3, folder=folder))
        except RunError as error:
            runs.append(error.diagnostics[0].code)
    return runs


def test_sums_over_positions(ranks, own):
    """Slices of 24, of 3, and of one position; full sequences, where the loss and its weight count once, however many ranks
    compute them.
    """
    cases = [("Sum", {"data__sequence": length}) for length in (48, 6, 2)]
    cases += [(name, WHOLE) for name in ("Contrastive", "Smooth", "Shifted", "Pooled")]
    references = recorded([tables(name, 1, **changes) for name, changes in cases], own)
    plans = [tables(name, 2, **changes) for name, changes in cases]
    plans.append(changed(plans[-1], parallel__wp=2, weights={"use": "isp.communicator"}))
    for reference, layouts in zip(
        [*references, references[-1]], zip(*ranks(2, 60)(recorded, plans, own), strict=True), strict=True
    ):
        assert_parity(reference, layouts, "fp64")
        same_on_all(layouts)


def test_losses_that_count_their_calls_round_or_draw(ranks, own):
    """A loss that is asked for its parts is not called; class weights round, and so does a loss in bf16."""
    cases = [("Counting", {}, 1e-6), ("Weighted", {}, 1e-6), ("Half", {"precision__compute": "fp32"}, 1e-2), ("Drawn", {}, 1.0)]
    references = recorded([tables(name, 1, **changes) for name, changes, _ in cases], own)
    for runs in ranks(2, 60)(recorded, [tables(name, 2, **changes) for name, changes, _ in cases], own):
        for (*_, limit), reference, run in zip(cases, references, runs, strict=True):
            assert run.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=limit)


def test_losses_that_look_at_other_positions_are_refused(ranks, own):
    """And an output that has no positions, for a loss of full sequences."""
    cases = [
        (name, {"precision__compute": compute}) for name in ("Smooth", "Shifted", "Pooled") for compute in ("fp64", "fp32")
    ]
    plans = [tables(name, 2, **changes) for name, changes in cases]
    plans.append(tables("Sum", 2, model={"factory": "attentive:paired"}, **WHOLE))
    assert ranks(2, 60)(recorded, plans, own) == [[*["loss-not-additive"] * len(cases), "outputs-apart"]] * 2


def full_gradients(plan, folder):
    """The gradient of full outputs, of which each rank keeps its slice."""
    gradients = []
    with World.join("cpu") as world, assemble(plan_from_dict(plan, folder), world) as run:
        whole = run.stepper.executor.whole

        def watched(*args):
            output, fields = whole(*args)
            output.register_hook(gradients.append)
            return output, fields

        watched.counts = whole.counts
        run.stepper.executor.whole = watched
        run.step()
    return torch.cat(gradients)


def test_a_loss_of_full_sequences_draws_the_same_on_all_ranks(ranks, own):
    """Else each rank would take its slice of the gradient of another loss."""
    first, second = ranks(2, 60)(full_gradients, tables("Contrastive", 2, loss__options={"draws": 1.0}, **WHOLE), own)
    assert torch.equal(first, second)
    assert first.abs().max() > 0

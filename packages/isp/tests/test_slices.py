"""Tests models with custom attention and all types of losses on slices, and the refusal of layers that mix positions."""

import pytest
import torch
from attentive import MIXED, SEPARATE
from kinds import records_or_codes

from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_equal_replicas, assert_parity, record, running
from sley_trainer.assemble import assemble

PLAN = small_plan(
    model={"factory": "attentive:layers"},
    data__sequence=16,
    data__documents="cut",
    batch__global_size=4,
    optimizer={"use": "core.adamw", "lr": 1e-2},
)
NAMED = {"modules": ["*.attend"]}


def sliced_plan(tables, sp=2, dp=1, **sequence):
    return changed(tables, parallel={"sp": sp, "dp": dp}, sequence={"use": "isp.all_to_all", **sequence})


def plan_with_options(**options):
    return changed(PLAN, model__options=options)


def mixer_plan(kind):
    return changed(PLAN, model={"factory": "attentive:mixer_model", "options": {"kind": kind}})


def mixing_plan(kind, within, **sequence):
    model = {"factory": "attentive:mixing_model", "options": {"kind": kind, "within": within}}
    return sliced_plan(changed(PLAN, model=model), **sequence)


def test_wrapped_and_named_attentions(ranks, texts):
    """A parameter of the attention keeps its name, and its gradient is a sum over slices of heads. A model may use no
    positions, and an unchecked convolution may run over another dim.
    """
    cases = [
        (plan_with_options(wrapped=True), {}),
        (PLAN, NAMED),
        (plan_with_options(places=False), NAMED | {"positions": False}),
        (mixer_plan("features"), {"unchecked_layers": ["mixer"]}),
    ]
    references = records_or_codes([tables for tables, _ in cases], texts)
    found = ranks(2, 120)(records_or_codes, [sliced_plan(tables, **sequence) for tables, sequence in cases], texts)
    for reference, layouts in zip(references, zip(*found, strict=True), strict=True):
        assert_parity(reference, layouts, "fp64")
        assert_equal_replicas(layouts)
    assert "blocks.0.attend.attention.scale" in references[0].initial_weights
    assert "blocks.0.attend.scale" in references[1].initial_weights
    assert_equal_replicas([references[1], record(sliced_plan(PLAN, sp=1, **NAMED), 2, folder=texts)])


@pytest.mark.parametrize(
    ("tables", "code"),
    [
        (sliced_plan(PLAN), "sequence-attention"),  # no attention is known
        (sliced_plan(changed(PLAN, model__factory="attentive:mixed")), "sequence-mixing"),  # torch's hides its projections
        *((sliced_plan(mixer_plan(kind)), "sequence-mixing") for kind in ("conv", "pool", "lstm", "batch")),
        (sliced_plan(PLAN, modules=["*.attend", "*.attention"]), "sequence-attention"),  # a pattern that matches nothing
        (sliced_plan(plan_with_options(places=False), **NAMED), "sequence-positions"),  # each slice would be counted from 0
        (sliced_plan(PLAN, **NAMED, unchecked_layers=["mixer.*"]), "sequence-attention"),  # a pattern that matches nothing
    ],
)
def test_unsupported_models_are_refused(texts, tables, code):
    """`check --model` refuses them on meta, before any process starts."""
    plan = plan_from_dict(tables, texts)
    with pytest.raises(PlanError) as caught, World.fake(0, plan.world_size()) as world:
        assemble(plan, world)
    assert [problem.code for problem in caught.value.diagnostics] == [code]


@pytest.mark.parametrize("is_campaign", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_first_steps_that_are_refused(ranks, texts, is_campaign):
    """Layers are tested for mixing positions, outside of and before attention, also if it is recomputed. A layer that sees one
    position at a time passes. Heads that do not divide are refused at the first call.
    """
    kinds = [*MIXED, *SEPARATE] if is_campaign else ["in place", "dropped"]
    cases = {kind: "sequence-mixing" if kind in MIXED else "" for kind in kinds}
    plans = [mixing_plan(kind, within=index % 2 == 1) for index, kind in enumerate(cases)]
    plans += [changed(mixing_plan("rolled", True), activations={"use": "core.recompute"})]
    plans += [mixing_plan("rolled", True, unchecked_layers=["beside"])]
    plans += [sliced_plan(plan_with_options(heads=3, hidden=12), **NAMED)]
    expected = [*cases.values(), "sequence-mixing", "", "sequence-heads"]
    by_rank = ranks(2, 120)(records_or_codes, plans, texts, 1)
    assert [[run if isinstance(run, str) else "" for run in runs] for runs in by_rank] == [expected] * 2


# -- losses ------------------------------------------------------------------------------------------------------------

WHOLE = {"loss__sequence": "whole", "evaluation": {"every": 2, "steps": 1}}


def loss_plan(name, sp, **changes):
    plan = changed(PLAN, loss={"factory": f"attentive:{name}"}, model__options={"wrapped": True}, data__sequence=48)
    plan = changed(plan, optimizer={"use": "core.sgd", "lr": 1e-2}, **changes)
    return sliced_plan(plan) if sp > 1 else plan


@pytest.mark.parametrize("is_campaign", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_sums_over_positions(ranks, texts, is_campaign):
    """Slices have 3 positions or one. With full sequences the loss and its weight count once, however many ranks compute
    them.
    """
    cases = [("Sum", {"data__sequence": length}) for length in ((6, 2) if is_campaign else (6,))]
    cases += [(name, WHOLE) for name in (("Shifted", "Contrastive") if is_campaign else ("Contrastive",))]
    references = records_or_codes([loss_plan(name, 1, **changes) for name, changes in cases], texts)
    plans = [loss_plan(name, 2, **changes) for name, changes in cases]
    plans.append(changed(plans[-1], parallel__wp=2, weights={"use": "isp.communicator"}))
    for reference, layouts in zip(
        [*references, references[-1]], zip(*ranks(2, 60)(records_or_codes, plans, texts), strict=True), strict=True
    ):
        assert_parity(reference, layouts, "fp64")
        assert_equal_replicas(layouts)


def test_losses_that_count_calls_round_draw_or_mix_positions(ranks, texts):
    """A loss in bf16 rounds. Losses that mix positions are refused."""
    cases = [("Counting", {}, 1e-6), ("Half", {"precision__compute": "fp32"}, 1e-2), ("Drawn", {}, 1.0)]
    references = records_or_codes([loss_plan(name, 1, **changes) for name, changes, _ in cases], texts)
    plans = [loss_plan(name, 2, **changes) for name, changes, _ in cases]
    plans += [loss_plan("Smooth", 2), loss_plan("Shifted", 2, precision__compute="fp32")]
    for *runs, smooth, shifted in ranks(2, 60)(records_or_codes, plans, texts):
        for (*_, limit), reference, run in zip(cases, references, runs, strict=True):
            assert run.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=limit)
        assert (smooth, shifted) == ("loss-not-additive", "loss-not-additive")


def full_gradients(plan, folder):
    """Returns this rank's slice of the gradient of full outputs."""
    gradients = []
    with running(plan, folder) as run:
        whole = run.stepper.executor.whole_sequences

        def watched(*args):
            output, fields = whole(*args)
            output.register_hook(gradients.append)
            return output, fields

        watched.is_counted = whole.is_counted
        run.stepper.executor.whole_sequences = watched
        run.step()
    return torch.cat(gradients)


def test_random_losses_of_full_sequences_are_equal_on_all_ranks(ranks, texts):
    """Otherwise each rank would use a slice of a different loss's gradient."""
    first, second = ranks(2, 60)(full_gradients, loss_plan("Contrastive", 2, loss__options={"draws": 1.0}, **WHOLE), texts)
    assert torch.equal(first, second)
    assert first.abs().max() > 0

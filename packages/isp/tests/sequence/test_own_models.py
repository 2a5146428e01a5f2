"""A model of plain linears with an attention of its own, and transformers' Llama blocks, on slices of sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError, SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity, record, same_on_all

OWN = Path(__file__).parent / "own"
EXAMPLES = Path(__file__).parents[4] / "examples" / "models"
PLAN = small_plan(
    model={"factory": "attentive:layers"},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    batch__global_size=4,
    optimizer={"use": "core.adamw", "lr": 1e-2},
)
HF_LLAMA = {"factory": "hf_llama:layers", "options": {"hidden": 16, "heads": 4, "kv_heads": 2}}


@pytest.fixture
def own(monkeypatch):
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.syspath_prepend(EXAMPLES)
    return OWN


def split(tables, sp=2, dp=1, **sequence):
    return changed(tables, parallel={"sp": sp, "dp": dp}, sequence={"use": "isp.all_to_all", **sequence})


def with_options(**options):
    return changed(PLAN, model__options=options)


def check(ranks, own, tables, sp=2, **sequence):
    reference = record(tables, 3, folder=own)
    layouts = ranks(sp, 120)(record, split(tables, sp, **sequence), 3, folder=own)
    assert_parity(reference, layouts, tables["precision"]["compute"])
    same_on_all(layouts)
    return reference


def test_wrapped_in_the_class_form(ranks, own):
    """The attention's own parameter has the same name and the same gradient, a sum over slices of heads."""
    reference = check(ranks, own, with_options(wrapped=True))
    assert "blocks.0.attend.attention.scale" in reference.first


@pytest.mark.parametrize("sp", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_named_in_the_plan(ranks, own, sp):
    reference = check(ranks, own, PLAN, sp, modules=["*.attend"])
    assert "blocks.0.attend.scale" in reference.first


def test_named_where_sequences_are_whole(own):
    """The table alone changes nothing: sp = 1."""
    plain = record(PLAN, 2, folder=own)
    same_on_all([plain, record(split(PLAN, sp=1, modules=["*.attend"]), 2, folder=own)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "documents"),
    [
        ("fp64", "pack"),
        ("fp32", "cut"),
        pytest.param("fp64", "cut", marks=pytest.mark.campaign),
        pytest.param("fp32", "pack", marks=pytest.mark.campaign),
    ],
)
def test_transformers_llama(ranks, own, documents, precision):
    """Its blocks as they are, their attention given through transformers' interface (examples/models/hf_llama.py)."""
    tables = changed(PLAN, model=HF_LLAMA, data__documents=documents, precision__compute=precision)
    (reference, one), (_, other) = ranks(2, 120)(with_one_alone, tables, own)
    assert_parity(reference, [one, other], precision)
    same_on_all([one, other])


def with_one_alone(tables, folder):
    """The run of one process, on rank 0, and this rank's: it takes seconds to import transformers in a third process."""
    reference = record(tables, 3, folder=folder, is_alone=True) if dist.get_rank() == 0 else None
    return reference, record(split(tables), 3, folder=folder)


def refused(tables, own):
    """What assembling rank 0 of a fake world says: `train-cli check --model`, before any process starts."""
    plan = plan_from_dict(tables, own)
    with pytest.raises(PlanError) as caught, World.fake(0, plan.world()) as world:
        assemble(plan, world)
    (problem,) = caught.value.diagnostics
    return problem


def test_a_model_without_an_attention_that_is_known(own):
    problem = refused(split(PLAN), own)
    assert problem.code == "sequence-attention"
    assert "SequenceAttention" in problem.hint


def test_an_attention_that_hides_its_projections(own):
    problem = refused(split(changed(PLAN, model__factory="attentive:mixed")), own)
    assert problem.code == "sequence-attention"
    assert "`torch.attention` is a torch.nn.MultiheadAttention" in problem.message


def beside(kind):
    return changed(PLAN, model={"factory": "attentive:beside", "options": {"kind": kind}})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("conv", "Conv1d"),
        ("transposed", "ConvTranspose1d"),
        ("lstm", "LSTM"),
        ("batch", "BatchNorm1d"),
        ("group", "GroupNorm"),
        ("instance", "InstanceNorm1d"),
        ("pool", "AvgPool1d"),
        ("most", "AdaptiveMaxPool1d"),
    ],
)
def test_what_looks_along_a_sequence_beside_attention(own, kind, name):
    """Each rank would begin it anew with its slice. With whole sequences it is a model like any other."""
    problem = refused(split(beside(kind)), own)
    assert problem.code == "sequence-mixing"
    assert problem.message == f"`mixer.inner` is a {name}, which looks along the sequence and would see one slice alone"
    assert "`[sequence] apart`" in problem.hint
    if kind in ("conv", "group"):
        assert record(split(beside(kind), sp=1), 1, folder=own).rows[0]["loss"] > 0


def test_a_pattern_of_what_is_apart_that_matches_nothing(own):
    problem = refused(split(beside("patch"), apart=["mixer.*"]), own)
    assert problem.code == "sequence-mixing"
    assert "`mixer.*`, which matches no layer and no module" in problem.message


def of_all(every, folder):
    """Runs each plan for two steps; returns the code of its error, or None."""
    found = []
    for tables in every:
        try:
            record(tables, 2, folder=folder)
            found.append(None)
        except SleyError as error:
            found.append(error.diagnostics[0].code)
    return found


def asked(kind, within, **options):
    tables = changed(PLAN, model={"factory": "attentive:asked", "options": {"kind": kind, "within": within}})
    return split(tables, **options)


def test_layers_are_asked_whether_they_mix_positions(ranks, own):
    """By themselves and before attention, under each policy; what sees one position at a time passes."""
    from attentive import APART, MIXED

    kinds = [(kind, within) for kind in (*MIXED, *APART) for within in (False, True)]
    every = [asked(*one) for one in kinds]
    every += [changed(asked("shifted", True), activations={"use": use}) for use in ("core.recompute", "core.keep")]
    every.append(asked("shifted", True, apart=["beside"]))
    wanted = [None if kind in APART else "sequence-mixing" for kind, _ in kinds]
    wanted += ["sequence-mixing"] * 2 + [None]
    for found in ranks(2)(of_all, every, own):
        assert dict(zip([*kinds, 0, 1, 2], found, strict=True)) == dict(zip([*kinds, 0, 1, 2], wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "apart"), [("features", {"apart": ["mixer.inner"]}), pytest.param("patch", {}, marks=pytest.mark.campaign)]
)
def test_convolutions_that_see_one_position_at_a_time(ranks, own, kind, apart):
    check(ranks, own, beside(kind), **apart)


def test_a_pattern_that_matches_nothing(own):
    problem = refused(split(PLAN, modules=["*.attend", "*.attention"]), own)
    assert problem.code == "sequence-attention"
    assert "`*.attention`, which matches no module" in problem.message


def test_a_model_that_would_count_each_slice_from_0(own):
    """Positions would restart in every slice, so the model is refused; a plan can say that none is counted."""
    problem = refused(split(with_options(places=False), modules=["*.attend"]), own)
    assert problem.code == "sequence-positions"
    assert "`[sequence] positions = false`" in problem.hint


def test_a_model_that_counts_no_positions(ranks, own):
    check(ranks, own, with_options(places=False), modules=["*.attend"], positions=False)


def heads_said(tables, folder):
    try:
        record(tables, 1, folder=folder)
    except RunError as error:
        return error.diagnostics[0].message
    return ""


def test_heads_that_do_not_divide(ranks, own):
    """A model of one's own is asked at its first attention; no rank hangs."""
    tables = split(with_options(heads=3, hidden=12), modules=["*.attend"])
    for said in ranks(2, 30)(heads_said, tables, own):
        assert said == "heads = sp x heads per rank fails: 3 is no multiple of 2"

"""Slices of sequences beside stages, replicas and buckets: every plugin with every other, one result."""

from __future__ import annotations

import pytest

from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import alone, assert_parity_of_parts, record

PLAN = small_plan(model__num_layers=2, model__heads=2, model__kv_heads=1, evaluation={"every": 2, "steps": 1})
BUCKETS = [{"use": "dp.bucketed", "bucket_mb": 0.002}]


def plan(parallel=None, schedule=None, handlers=None, **changes):
    tables = changed(PLAN, **changes)
    if parallel:
        tables |= {"parallel": parallel, "sequence": {"use": "isp.all_to_all"}}
    if schedule:
        tables["pipeline"] = {"use": schedule}
    if handlers:
        tables["gradient_handlers"] = handlers
    return tables


def check(ranks, folder, parallel, schedule=None, handlers=None, **changes):
    """Rows, and every gradient and weight that a rank holds, against the one-process run; slices hold the same bits."""
    reference = alone(plan(**changes), 2, folder=folder)
    size = parallel.get("pp", 1) * parallel.get("dp", 1) * parallel["sp"]
    layouts = ranks(size, 180)(record, plan(parallel, schedule, handlers, **changes), 2, folder=folder)
    assert_parity_of_parts(reference, layouts, changes.get("precision__compute", "fp64"))
    stage = size // parallel.get("pp", 1)
    for first in range(0, size, stage):
        for other in layouts[first + 1 : first + stage]:
            assert_same_bits(layouts[first].weights, other.weights)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "schedule",
    [
        "pp.zero_bubble_h1",
        pytest.param("pp.interleaved", marks=pytest.mark.campaign),
        pytest.param("pp.gpipe", marks=pytest.mark.campaign),
        pytest.param("pp.one_f_one_b", marks=pytest.mark.campaign),
    ],
)
def test_slices_on_two_stages(ranks, texts, schedule):
    check(ranks, texts, {"sp": 2, "pp": 2, "dp": 1}, schedule, model__tie_embeddings=schedule != "pp.gpipe")


@pytest.mark.campaign
@pytest.mark.parametrize("documents", ["cut", pytest.param("pad", marks=pytest.mark.campaign)])
def test_documents_on_two_stages(ranks, texts, documents):
    """Where the data has no positions, every stage is given the same ones."""
    check(ranks, texts, {"sp": 2, "pp": 2, "dp": 1}, "pp.one_f_one_b", data__documents=documents)


def test_recomputation_in_a_split_backward(ranks, texts):
    changes = {"activations__use": "core.recompute", "activations__fraction": 0.5, "batch__micro_size": 1}
    check(ranks, texts, {"sp": 2, "pp": 2, "dp": 1}, "pp.zero_bubble_h1", **changes)


@pytest.mark.campaign
def test_single_precision_on_two_stages(ranks, texts):
    check(ranks, texts, {"sp": 2, "pp": 2, "dp": 1}, "pp.one_f_one_b", precision__compute="fp32")


@pytest.mark.campaign
@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_buckets_over_slices_and_replicas(ranks, texts, dp):
    """Buckets of half a layer: the reduce group is the whole stage, slices and replicas alike."""
    check(ranks, texts, {"sp": 2, "dp": dp}, handlers=BUCKETS, batch__micro_size=1, model__tie_embeddings=True)


def test_slices_stages_and_replicas(ranks, texts):
    handlers = [*BUCKETS, {"use": "pp.shared_modules"}]
    parallel = {"sp": 2, "pp": 2, "dp": 2}
    check(ranks, texts, parallel, "pp.one_f_one_b", handlers, model__tie_embeddings=True, batch__micro_size=1)


def test_layers_are_not_timed_on_slices():
    tables = plan({"sp": 2, "pp": 2, "dp": 1}, "pp.one_f_one_b") | {"partition": {"use": "pp.measured"}}
    tables["data"] = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    (problem,) = check_plan(plan_from_dict(tables), 4)
    assert problem.code == "sequence-partition"
    costs = {"use": "pp.measured", "layer_costs": [1.0] * 4}
    assert check_plan(plan_from_dict(tables | {"partition": costs}), 4) == []


def test_the_table_alone_is_no_split(texts):
    """Without `isp` there is no such record; with it and sp = 1 nothing is exchanged."""
    with pytest.raises(PlanError, match="no sequence attention"):
        plan_from_dict(plan() | {"sequence": {"use": "core.all_to_all"}}, texts)

"""Models that are not ours as pipelines: transformers' own blocks, and convolutions that pass tuples, tied and untied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from sley_testing.plans import changed, small_plan
from sley_testing.runs import record

MODELS = Path(__file__).parents[3] / "examples" / "models"
HF_LLAMA = small_plan(
    model={"factory": "hf_llama:layers", "options": {"num_layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "tie": True}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1},
)
CONV_TIE = changed(HF_LLAMA, model={"factory": "conv_tie:layers", "options": {"hidden": 8, "num_blocks": 4}})


def cut(tables, schedule, pp, dp=1, **options):
    options = tables["model"]["options"] | options
    return changed(tables, pipeline={"use": schedule}, parallel={"pp": pp, "dp": dp}, model__options=options)


@pytest.fixture
def folder(own, monkeypatch):
    """The examples' modules, found by the plans' factories."""
    if not MODELS.is_dir():
        pytest.skip("the examples are not beside these tests")
    monkeypatch.syspath_prepend(MODELS)
    return own


@pytest.mark.parametrize(
    ("pp", "dp", "schedules"),
    [
        (2, 2, ["pp.one_f_one_b", "pp.zero_bubble_v"]),
        pytest.param(2, 2, ["pp.gpipe", "pp.zero_bubble_h1"], marks=pytest.mark.campaign),
        pytest.param(3, 1, ["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_h1"], marks=pytest.mark.campaign),
    ],
)
def test_a_convolution_with_tuples_and_a_tie(compared, folder, pp, dp, schedules):
    """Both streams cross each boundary; the embedding's matrix is the head's, on the last stage."""
    for layouts in compared(pp * dp, [cut(CONV_TIE, schedule, pp, dp) for schedule in schedules], folder=folder):
        assert sum("0.table.weight" in layout.weights for layout in layouts) in (dp, 2 * dp)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.campaign)])
def test_transformers_blocks(ranks, assert_equal, folder, pp, dp):
    """With rotary tables that no checkpoint keeps on every stage, tied and not."""
    plans = [
        cut(HF_LLAMA, "pp.one_f_one_b", pp, dp, tie=True),
        cut(HF_LLAMA, "pp.zero_bubble_v", pp, dp, tie=False),
        cut(HF_LLAMA, "pp.interleaved", pp, dp, tie=True),
    ]
    by_rank = ranks(pp * dp, 120)(with_one_alone, plans, folder)
    references = by_rank[0][0]
    for tables, reference, *layouts in zip(plans, references, *(layouts for _, layouts in by_rank), strict=True):
        assert_equal(reference, layouts, tables["precision"]["compute"])


def with_one_alone(plans, folder):
    """The runs of one process, on rank 0, and this rank's: it takes seconds to import transformers in a further process."""
    whole = [changed(tables, pipeline=None, parallel=None) for tables in plans if dist.get_rank() == 0]
    references = [record(tables, 3, folder=folder, is_alone=True) for tables in whole]
    return references, [record(tables, 3, folder=folder) for tables in plans]

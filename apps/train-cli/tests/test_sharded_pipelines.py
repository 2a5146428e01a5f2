"""Sharded weights together with pipelines and bucketed reductions equal the one-process run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import alone, assert_parity_of_parts, record

PLAN = small_plan(
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__ffn_hidden=27,
    model__vocab_size=257,
    data__sequence=16,
    batch__micro_size=1,
    optimizer__weight_decay=0.1,
    evaluation={"every": 2, "steps": 1},
)


def plan(parallel: dict[str, int] | None = None, **changes: Any) -> Tables:
    tables = changed(PLAN, **changes)
    if parallel:
        tables |= {"parallel": parallel, "weights": {"use": "isp.communicator"} | tables.pop("weights", {})}
    return tables


def check(ranks: Any, texts: Path, world: int, parallel: dict[str, int], **changes: Any) -> list[Any]:
    """Every rank's rows, and every whole gradient and weight of its stage, against the one-process run."""
    same = {key: value for key, value in changes.items() if key.split("__")[0] in ("model", "activations", "batch")}
    reference = alone(plan(**same), 2, folder=texts)
    layouts = ranks(world, 180)(record, plan(parallel, **changes), 2, folder=texts)
    assert_parity_of_parts(reference, layouts, "fp64")
    return layouts


SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]


@pytest.mark.campaign  # `test_everything_at_once` is of the interleaved ones
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_of_two_shards(ranks, texts, schedule, tied):
    """Also where weight gradients are put off, and where a stage holds two parts of the model."""
    parallel = {"pp": 2, "dp": 2, "wp": 2}
    check(ranks, texts, 4, parallel, pipeline={"use": schedule}, model__tie_embeddings=tied)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [
        ("pp.zero_bubble_v", False),
        ("pp.zero_bubble_h1", True),
        pytest.param("pp.interleaved", True, marks=pytest.mark.campaign),
    ],
)
def test_a_vocabulary_shared_on_the_last_stage(ranks, texts, schedule, tied):
    """Its weight gradients are put off too, and in a V the last layer is on the first stage."""
    changes = {"pipeline": {"use": schedule}, "weights": {"head": "vocabulary"}, "model__tie_embeddings": tied}
    check(ranks, texts, 4, {"pp": 2, "dp": 2, "wp": 2}, **changes)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("schedule", "head"),
    [
        (schedule, head)
        if (schedule, head) == ("pp.zero_bubble_v", "vocabulary")
        else pytest.param(schedule, head, marks=pytest.mark.campaign)
        for schedule in SCHEDULES
        for head in ("gather", "vocabulary")
    ],
)
def test_a_table_cut_by_columns_on_the_first_stage(ranks, texts, schedule, head):
    """The gradient of its vectors travels in I and is summed in W; in a V the first layer and the last share a stage."""
    changes = {"pipeline": {"use": schedule}, "weights": {"embedding": "hidden", "head": head}}
    check(ranks, texts, 4, {"pp": 2, "dp": 2, "wp": 2}, **changes)


@pytest.mark.campaign
@pytest.mark.parametrize("bucket_mb", [0.0005, pytest.param(25.0, marks=pytest.mark.campaign)])
def test_columns_in_buckets(ranks, texts, bucket_mb):
    """Two copies of two shards of eight columns, summed over `wdp` while the step goes on."""
    handlers = [{"use": "dp.bucketed", "bucket_mb": bucket_mb}]
    check(ranks, texts, 4, {"dp": 4, "wp": 2}, gradient_handlers=handlers, weights={"embedding": "hidden"})


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fraction", "unit"),
    [
        (0.5, "layer"),
        pytest.param(1.0, "module", marks=pytest.mark.campaign),
        pytest.param(0.5, "module", marks=pytest.mark.campaign),
        pytest.param(1.0, "layer", marks=pytest.mark.campaign),
    ],
)
def test_recomputed_stages(ranks, texts, fraction, unit):
    changes = {"pipeline": {"use": "pp.zero_bubble_h1"}, "weights": {"unit": unit}}
    activations = {"use": "core.recompute", "fraction": fraction}
    check(ranks, texts, 4, {"pp": 2, "dp": 2, "wp": 2}, activations=activations, **changes)


def weights_of(plans: list[Tables], folder: Path) -> list[dict[str, Tensor]]:
    """The weights that this rank's stage has after two steps of each plan."""
    return [record(tables, 2, folder=folder).weights for tables in plans]


def test_schedules_change_no_bit(ranks, texts):
    """Interleaved and with weight gradients put off: the weights of 1F1B, with buckets smaller than a layer.

    All of them run the backwards of a chunk in the order of micro-batches, and every sum over ranks joins two. Clipping is
    left out: the norm adds up a stage's weights first, and a stage has others of them with two chunks.
    """
    handlers = [{"use": "dp.bucketed", "bucket_mb": 0.0002}]
    optimizer = {"use": "core.adamw", "lr": 3e-3, "weight_decay": 0.1}
    schedules = ("pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1")
    plans = [
        plan({"pp": 2, "dp": 2, "wp": 2}, pipeline={"use": one}, optimizer=optimizer, gradient_handlers=handlers)
        for one in schedules
    ]
    found = ranks(4, 120)(weights_of, plans, texts)
    wanted, *others = [dict(chain.from_iterable(one.items() for one in parts)) for parts in zip(*found, strict=True)]
    for other in others:
        assert_same_bits(wanted, other)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("schedule", "tied", "fused"),
    [
        ("pp.zero_bubble_v", True, True),
        pytest.param("pp.interleaved", True, False, marks=pytest.mark.campaign),
        pytest.param("pp.zero_bubble_h1", False, False, marks=pytest.mark.campaign),
        pytest.param("pp.one_f_one_b", True, True, marks=pytest.mark.campaign),
    ],
)
def test_gradients_reduced_once_per_step(ranks, texts, schedule, tied, fused):
    """Summed at full size over the micro-batches, in W actions too, and of ties between the parts that one stage holds."""
    changes = {"pipeline": {"use": schedule}, "weights": {"reduce": "step", "fused": fused}}
    check(ranks, texts, 4, {"pp": 2, "dp": 2, "wp": 2}, model__tie_embeddings=tied, **changes)


def test_gradients_reduced_once_per_step_in_buckets(ranks, texts):
    handlers = [{"use": "dp.bucketed", "bucket_mb": 0.0005}]
    check(ranks, texts, 4, {"dp": 4, "wp": 2}, gradient_handlers=handlers, weights={"reduce": "step"})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("wp", "bucket_mb"),
    [
        (2, 0.0005),
        (4, 25.0),
        pytest.param(2, 25.0, marks=pytest.mark.campaign),
        pytest.param(4, 0.0005, marks=pytest.mark.campaign),
    ],
)
def test_shards_in_buckets(ranks, texts, bucket_mb, wp):
    """Buckets of shards over `wdp`, of norms over the stage, smaller than one weight and larger than the model."""
    handlers = [{"use": "dp.bucketed", "bucket_mb": bucket_mb}]
    check(ranks, texts, 4, {"dp": 4, "wp": wp}, gradient_handlers=handlers)


def test_everything_at_once(ranks, texts):
    handlers = [{"use": "dp.bucketed", "bucket_mb": 0.0005}, {"use": "pp.shared_modules"}]
    changes = {"pipeline": {"use": "pp.interleaved"}, "gradient_handlers": handlers, "model__tie_embeddings": True}
    check(ranks, texts, 8, {"pp": 2, "dp": 4, "wp": 2}, batch__micro_size=1, **changes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"pp": 2, "wp": 2}, {"wp": 2}], ids=str)
def test_the_norm_of_each_gradient_is_that_of_one_process(ranks, texts, parallel):
    """A tied table on two stages, shards, and what stays whole count once; every rank has the names of all."""
    tied = {"model__tie_embeddings": True}
    norms = {"use": "core.gradient_norms"}
    reference = record(plan(gradient_handlers=[{"use": "core.each"}, norms], **tied), 2, folder=texts)
    stages = {"pipeline": {"use": "pp.one_f_one_b"}} if "pp" in parallel else {}
    handlers = [{"use": "core.each"}, *([{"use": "pp.shared_modules"}] if stages else []), norms]
    tables = plan(parallel, gradient_handlers=handlers, **stages, **tied)
    for rank in ranks(4 if stages else 2, 180)(record, tables, 2, folder=texts):
        for one, row in zip(reference.rows, rank.rows, strict=True):
            names = [name for name in one if name.startswith("gradient_norm/")]
            assert len(names) > 10
            assert names == [name for name in row if name.startswith("gradient_norm/")]
            assert {name: row[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-9)

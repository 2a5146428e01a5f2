"""Tests that sharded models train as in a plain PyTorch loop or in one process, or are refused by name."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import REFUSED, SAMPLES, STEPS, Rows, all_batches, kind_plan, model, plan, records_or_codes
from torch import Tensor

from sley_core.losses.cross_entropy import CrossEntropy, CrossEntropyConfig
from sley_isp import sharded_modules
from sley_isp.param_group import decode, encode
from sley_isp.plugin import FP8_BYTES
from sley_testing.habits import FULL_GRADIENT_HABITS, HABITS
from sley_testing.habits import layers as habit_layers
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.runs import RunRecord, assert_equal_replicas, assert_matches_plain_loop, record

Case = tuple[dict[str, Any], Any, str]
"""A plan, its layers, and the expected result of its run: "right", or an error code."""


def assert_equal_loops(ranks: Any, folder: Path, cases: Sequence[Case]) -> None:
    """Asserts that each run equals the loop over its layers, or ends with the expected error."""
    batches, plans = all_batches(), [tables for tables, _, _ in cases]
    by_rank = ranks(2, 580)(records_or_codes, plans, folder, STEPS, batches, min_bytes=0)
    for (tables, layers, expected), runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        print(tables)
        assert {run if isinstance(run, str) else "right" for run in runs} == {expected}
        if expected == "right":
            assert_equal_replicas(runs)
            sgd = partial(torch.optim.SGD, lr=0.1)
            assert_matches_plain_loop(runs[0], layers, batches, sgd, micro_size=tables["batch"]["micro_size"])


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"overlap": False, "head": "vocabulary"}, {"micro": 1}),
    ({"ahead": 5, "reduce": "step"}, {"activations": {"use": "core.recompute", "fraction": 0.5}}),
    ({"unit": "module", "ahead": 0, "embedding": "hidden"}, {"precision": {"compute": "fp64", "accumulation": "direct"}}),
    ({"unit": "module", "ahead": 2, "reduce": "step"}, {"activations": {"use": "core.recompute"}, "micro": 2}),
    ({"reduce": "step", "groups": [{"match": "*.experts*", "reduce": "micro_batch", "ahead": 2}]}, {"micro": 2}),
]


KIND_PAIRS = [
    ("Experts", VARIANTS[4]),
    ("Stacked", VARIANTS[2]),
    ("Inner", VARIANTS[1]),
    *((kind, VARIANTS[2]) for kind in ("Writing", "Returning", "OnContext", "InClosure")),
]
MORE_KIND_PAIRS = [
    *zip(("Detached", "Shapes", "Looking", "Recurrent"), VARIANTS, strict=False),
    *(("Stacked", VARIANTS[index]) for index in (0, 1, 3, 4)),
    *(("Inner", VARIANTS[index]) for index in (0, 2, 3, 4)),
]


@pytest.mark.parametrize("pairs", [KIND_PAIRS, pytest.param(MORE_KIND_PAIRS, marks=pytest.mark.campaign)], ids=["few", "more"])
def test_models_that_use_weights_in_unusual_ways(ranks, own, pairs):
    """Tests blocks of `kinds` with variants of the communicator."""
    cases: list[Case] = []
    for kind, (weights, changes) in pairs:
        options = {"kind": kind, "width": 9, "tied": "embedding" not in weights}
        tables = plan({"factory": "kinds:model", "options": options}, weights=weights, **changes)
        cases.append((tables, [(layer.name, layer.module) for layer in model(**options).layers], REFUSED.get(kind, "right")))
    assert_equal_loops(ranks, own, cases)


def test_a_layer_with_weights_of_two_dtypes(ranks, own):
    """The norms of the blocks stay in fp32. Both layouts round equally, except for the order of sums."""
    tables = kind_plan("Stacked", precision={"compute": "bf16", "keep": ["*.norm.*"]})
    alone = {name: table for name, table in tables.items() if name not in ("parallel", "weights")}
    reference = record(alone, STEPS, folder=own)
    for (sharded,) in ranks(2)(records_or_codes, [tables], own, min_bytes=0):
        assert [row["loss"] for row in sharded.rows] == pytest.approx([row["loss"] for row in reference.rows], rel=2**-7)
        assert sharded.weights["block1.norm.weight"].dtype == torch.float32


def test_canonical_sums_of_sharded_norms_have_the_bits_of_one_process(ranks: Any, sharded: Any, texts: Path) -> None:
    canonical = {"parallel": {"reduction": "canonical"}}
    reference = record(sharded(1, 1, **canonical), 2, folder=texts)
    for (run,) in ranks(2)(records_or_codes, [sharded(2, **canonical)], texts, min_bytes=0):
        assert [row["loss"] for row in run.rows] == [row["loss"] for row in reference.rows]
        assert_same_bits(reference.weights, run.weights)


FEW_HABITS = ["InPlace", "GradientInForward", "Penalty", "HookedWeights"]


@pytest.mark.parametrize("is_campaign", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_habits_around_a_sharded_linear(ranks, own, is_campaign):
    """Tests user code around a linear. Ranks that call a layer as often as their data require make exchanges in the same
    order, with and without overlap.
    """
    variants: list[tuple[dict[str, Any], bool]] = [({}, True), ({"overlap": False, "reduce": "step"}, False)]
    variants += [({"overlap": False}, False), ({"reduce": "step"}, False)] if is_campaign else []
    habits = (HABITS | FULL_GRADIENT_HABITS).keys() - {"Mapped"}  # torch refuses it
    runs = [(habit, {}, True, 4) for habit in (sorted(habits) if is_campaign else FEW_HABITS)]
    cases: list[Case] = []
    for habit, weights, attaches, micro in [*runs, *(("Adaptive", *variant, 1) for variant in variants)]:
        model = {"factory": "sley_testing.habits:model", "options": {"habit": habit}}
        tables = plan(model, micro=micro, weights=weights)
        tables["parallel"]["cross_memory_attach"] = attaches
        cases.append((tables, habit_layers(Rows.info, habit), REFUSED.get(habit, "right")))
    depths = [[int(row[0]) // 4 for row in batch["tokens"]] for batch in all_batches()]
    assert any(depth[SAMPLES // 2 - 1] != depth[-1] for depth in depths), "or ranks do the same where gradients are sent"
    assert_equal_loops(ranks, own, cases)


DIRECT = {"precision": {"compute": "fp64", "accumulation": "direct"}}
MODELS: dict[str, Any] = {"unusual": {}, "frozen_start": {}, "half_sharded": DIRECT}


def test_unusual_models(assert_parities):
    """Tests linears of different sizes, without bias or used twice; adapters, trainable biases of frozen weights, a frozen
    start, and torch's older checkpoint; a sharded bias without its weight, torch's fast path in evaluations,
    parametrized weights, replaced forwards, functional calls, and a parameter that another type of module also holds.
    """
    assert_parities(2, [{"factory": name, **changes} for name, changes in MODELS.items()])


def test_autocast(ranks, sharded, texts):
    """Sharded and unsharded runs round equally, except for the order of sums, with and without bias."""
    changes = {"factory": "autocast", "precision__compute": "fp32"}
    reference = record(sharded(1, 1, **changes), 2, folder=texts)
    for result in ranks(2)(record, sharded(2, weights={"embedding": "hidden"}, **changes), 2, folder=texts):
        assert result.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=2**-7)
        for name, gradient in reference.gradients[0].items():
            assert (result.gradients[0][name] - gradient).norm() <= 2**-7 * gradient.norm() + 1e-6, name


COMPILED = [({}, {}), ({"ahead": 0, "reduce": "step"}, {"activations": {"use": "core.recompute"}})]


def record_compiled(tables: dict[str, Any], folder: Path) -> tuple[RunRecord, int, dict[str, int]]:
    """Returns the record of a run with compiled layers, and the numbers of graphs and of graph breaks."""
    from torch._dynamo.utils import counters  # loads the compiler

    sharded_modules.MIN_BYTES = 0
    warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)  # the compiler hides it, if no error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        recorded = record(tables, 2, folder=folder)
        return recorded, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.campaign
@pytest.mark.parametrize(("weights", "changes"), COMPILED)
def test_compiled_layers_with_sharded_weights(
    ranks: Any, sharded: Any, texts: Path, weights: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The gathers are outside of the graphs: there are as many graphs as without sharded weights."""
    changes = changes | {"model__compile": True}
    reference = record(sharded(1, 1), 2, folder=texts)
    ((_, *expected),) = ranks(1)(record_compiled, sharded(1, 1, **changes), texts)
    for run, *counts in ranks(2)(record_compiled, sharded(2, weights=weights, **changes), texts):
        assert counts == expected
        assert [row["loss"] for row in run.rows] == pytest.approx([row["loss"] for row in reference.rows], rel=1e-10)
        assert_close_gradients(reference.gradients[0], run.gradients[0], 1e-10)


# -- groups of weights, and gathers in e4m3 numbers -----------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"match": "*.experts*"}


GROUPS: list[dict[str, Any]] = [
    {},
    {"groups": [EXPERTS]},
    {"groups": [EXPERTS | {"ahead": 3, "reduce": "step"}, {"match": "*.bias"}]},
    {"unit": "module", "groups": [EXPERTS | {"unit": "layer"}]},
    {"overlap": False, "groups": [{"match": "block1.one.*", "unit": "module", "ahead": 0}]},
]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("Experts", GROUPS[::2]), *(pytest.param(kind, GROUPS, marks=pytest.mark.campaign) for kind in ("Experts", "Stacked"))],
)
def test_groups_change_no_bit(ranks: Any, own: Path, kind: str, groups: list[dict[str, Any]]) -> None:
    """With one microbatch, the order of sums does not depend on `reduce`. Experts that a rank does not call are gathered."""
    plans = [kind_plan(kind, weights=weights, tied=True, precision={"compute": "fp32"}) for weights in groups]
    for reference, *runs in ranks(2, 120)(records_or_codes, plans, own, min_bytes=0):
        for run in runs:
            assert [row["loss"] for row in run.rows] == [row["loss"] for row in reference.rows]
            assert_same_bits(reference.weights, run.weights)


def rounded(weight: Tensor, num_ranks: int = 2) -> Tensor:
    """Returns `weight` as the ranks gather it."""
    rows = -(-len(weight) // num_ranks)
    padded = torch.cat([weight, weight.new_zeros(rows * num_ranks - len(weight), *weight.shape[1:])])
    full = torch.empty_like(padded)
    decode(torch.stack([encode(shard) for shard in padded.chunk(num_ranks)]), full)
    return full[: len(weight)]


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@example([2.0, 442368.0], torch.float64)  # the largest becomes 448 x 2^10, which fits exactly
@example([2.0**-149], torch.float32)
@settings(max_examples=60, deadline=None)
def test_the_error_of_e4m3_numbers(values: list[float], dtype: torch.dtype) -> None:
    """Three bits of mantissa, and subnormals of a block whose largest element is at least 224 units."""
    weight = torch.tensor(values, dtype=dtype)
    error = (rounded(weight, 1) - weight).abs().double()
    assert (error <= 2**-4 * weight.abs().double() + 2**-18 * weight.abs().max().double() + 2**-136).all()
    assert torch.equal(rounded(rounded(weight, 1), 1), rounded(weight, 1)), "a rounded weight is not rounded again"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_e4m3_numbers_of_a_weight_that_is_not_finite_are_not_finite(value: float) -> None:
    weight = torch.ones(256)
    weight[3] = value
    assert rounded(weight, 1)[3].isnan()
    assert rounded(weight, 1)[128:].eq(1.0).all()


def test_the_size_of_encoded_shards() -> None:
    """The estimator multiplies elements by FP8_BYTES."""
    assert encode(torch.zeros(1280)).nbytes == 1280 * FP8_BYTES


def record_counts(tables: dict[str, Any], folder: Path) -> Any:
    counts: dict[str, float] = {}

    def prepare(run: Any) -> None:
        run.listeners.append(lambda _: counts.update(run.stepper.executor.communicator.counts()))

    sharded_modules.MIN_BYTES = 0
    return record(tables, STEPS, folder=folder, batches=all_batches(), prepare=prepare), counts


def test_a_run_computes_with_rounded_weights_and_updates_the_others(ranks: Any, own: Path) -> None:
    """Equals a plain loop that rounds the weights before each step and updates those that are not rounded."""
    options = {"kind": "Stacked", "width": 64, "tied": False}
    tables = plan({"factory": "kinds:model", "options": options}, weights={"gather_precision": "fp8"})
    for run, counts in ranks(2)(record_counts, tables, own):
        loop = PlainLoop(
            [(layer.name, layer.module.double()) for layer in model(**options).layers],
            CrossEntropy(CrossEntropyConfig()),
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named if parameter.requires_grad], lr=0.1),
        )
        masters = dict(run.initial_weights)
        for batch, row, gradients in zip(all_batches(), run.rows, run.gradients, strict=True):
            loop.load({name: rounded(value) for name, value in masters.items()})
            micros = [{name: value[at : at + 4] for name, value in batch.items()} for at in range(0, SAMPLES, 4)]
            assert_step(loop.step(micros), row, gradients, {}, 1e-10)
            for name, gradient in gradients.items():
                masters[name] = masters[name] - 0.1 * gradient
        assert_close_gradients(masters, run.weights, 1e-10)
        num_bytes = sum(value.nbytes for value in run.initial_weights.values())  # half of it received, at most twice
        assert 0 < counts["gathered_bytes_per_step"] < 0.2 * num_bytes, "an eighth of fp64, and the scales"

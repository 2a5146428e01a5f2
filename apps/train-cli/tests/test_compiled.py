"""Compiled layers train as uncompiled ones do, in every example plan, precision and kind of data that supports them."""

import tomllib
import warnings
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import GRADIENTS, WEIGHTS, RunRecord, record

EXAMPLES = Path(__file__).parents[3] / "examples" / "plans"
REFUSED = {"zero-bubble": "split-compiled", "isp-pp": "split-compiled"}
"""The code of the problem of each example plan that cannot be compiled."""

NUM_STEPS = 3


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.toml")))
def test_a_plan_that_cannot_be_compiled_is_refused_by_name(name: str) -> None:
    plan = load_plan(EXAMPLES / f"{name}.toml", ["model.compile=true"])
    problems = check_plan(plan, 2 if plan.parallel.dp == "auto" else plan.world_size())
    assert [problem.code for problem in problems] == ([REFUSED[name]] if name in REFUSED else [])


def record_compiled(tables: Tables, folder: Path | None) -> tuple[RunRecord, int]:
    """Returns the record of the plan, with its layers compiled, and the number of graphs."""
    from torch._dynamo.utils import counters  # loads the compiler

    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    recorded = record(tables | {"model": tables["model"] | {"compile": True}}, NUM_STEPS, folder=folder)
    assert not counters["graph_break"] or "sequence" in tables, counters["graph_break"]
    return recorded, counters["stats"]["unique_graphs"]


def assert_compiled_parity(ranks: Any, tables: Tables, world: int, precision: str, folder: Path | None = None) -> None:
    """Asserts that the compiled run of each rank has the losses, first gradients and weights of the uncompiled runs."""
    plain_runs = ranks(world, 120)(record, tables, NUM_STEPS, folder=folder)
    # The embedding, the blocks and the head have a graph each, and another for evaluations and the probe of slices, which run
    # without gradients. The exchanges of slices cut the graph of a block into four. With LoRA, only the first block has an
    # input without a gradient.
    max_graphs = 12 if "sequence" in tables else 6 if "evaluation" in tables else 4 if "adapters" in tables else 3
    losses = [row["loss"] for row in plain_runs[0].rows]
    # Stages may differ between the runs if layers are timed.
    gradients, weights = ChainMap(*(run.gradients[0] for run in plain_runs)), ChainMap(*(run.weights for run in plain_runs))
    if precision in ("bf16", "fp16"):
        # Uncompiled, torch adds the rows of an embedding's gradient in this precision on a CPU, with errors of up to 4 %.
        # Compiled, it adds them in fp32.
        for run in ranks(world, 120)(record, changed(tables, precision__compute="fp32"), 1, folder=folder):
            embedding = {name: gradient for name, gradient in run.gradients[0].items() if name.startswith("embed.")}
            gradients = gradients.new_child(embedding)
    for compiled, num_graphs in ranks(world, 400)(record_compiled, tables, folder):
        assert 0 < num_graphs <= max_graphs, "layers of one class and shape share a graph"
        first_gradients = compiled.gradients[0]
        assert_close_gradients({name: gradients[name] for name in first_gradients}, first_gradients, GRADIENTS[precision])
        assert_close_gradients({name: weights[name] for name in compiled.weights}, compiled.weights, WEIGHTS[precision])
        assert [row["loss"] for row in compiled.rows] == pytest.approx(losses, rel=WEIGHTS[precision])


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.toml") if path.stem not in REFUSED))
def test_a_compiled_example_equals_an_uncompiled_one(ranks: Any, name: str) -> None:
    """A larger eps than AdamW's default: its first steps are the signs of gradients, which rounding decides near zero."""
    tables = changed(tomllib.loads((EXAMPLES / f"{name}.toml").read_text("utf-8")), optimizer__eps=1e-3)
    plan = plan_from_dict(tables)
    assert_compiled_parity(ranks, tables, plan.world_size(), plan.precision.compute)


PLAN = small_plan(optimizer__eps=1e-3)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"data__documents": "pack"}, "fp64"),
        ({"data__documents": "pad"}, "fp32"),
        ({}, "fp16"),
        ({}, "bf16"),
        ({"adapters": {"use": "hf.lora", "rank": 4, "alpha": 8.0}}, "fp32"),
        ({"activations": {"use": "core.recompute"}}, "fp64"),
    ],
    ids=["packed documents", "padded documents", "fp16", "bf16", "LoRA", "recomputed"],
)
def test_compiled_layers_equal_uncompiled_ones(ranks: Any, texts: Path, changes: dict[str, Any], precision: str) -> None:
    assert_compiled_parity(ranks, changed(PLAN, precision__compute=precision, **changes), 1, precision, texts)

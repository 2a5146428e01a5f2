"""A pipeline of any schedule, tied or not, equals the one-process run (DESIGN 13.1; statements 14-16, 28, 29, 31)."""

from __future__ import annotations

from copy import deepcopy

import pytest

from sley_core.testing.parity import assert_close_gradients, assert_same_bits
from sley_core.testing.runs import record

PLAN = {
    "run": {"name": "pipeline", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "core.llama", "num_layers": 4, "hidden": 16, "heads": 2, "ffn_hidden": 24},
    "data": {"use": "core.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "evaluation": {"every": 2, "steps": 2},
    "precision": {"compute": "fp64"},
}
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents))
    return folder


def plan(schedule=None, pp=1, dp=1, **changes):
    tables = deepcopy(PLAN)
    for path, value in changes.items():
        table, key = path.split("__")
        tables.setdefault(table, {})[key] = value
    if schedule:
        tables["pipeline"] = {"use": schedule}
        tables["parallel"] = {"pp": pp, "dp": dp}
    return tables


def check(ranks, folder, schedule, pp, dp=1, **changes):
    """Every rank's rows, and every gradient and weight that it holds, against the one-process run."""
    precision = changes.get("precision__compute", "fp64")
    near, far = (1e-10, 1e-10) if precision == "fp64" else (1e-6, 1e-5)
    reference = record(plan(**changes), 3, folder=folder)
    layouts = ranks(pp * dp, 120)(record, plan(schedule, pp, dp, **changes), 3, folder=folder)
    names = set()
    for layout in layouts:
        for wanted, found in zip(reference.rows, layout.rows, strict=True):
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], rel=far if wanted["step"] > 1 else near)
        own = set(layout.gradients[0])
        names |= own
        gradients = {name: reference.gradients[0][name] for name in own}
        assert_same_bits({name: reference.first[name] for name in layout.first}, layout.first)
        assert_close_gradients(gradients, layout.gradients[0], near, floor=1e-6)
        assert_close_gradients({name: reference.weights[name] for name in layout.weights}, layout.weights, far)
        assert layout.held_out == pytest.approx(reference.held_out, rel=far)
    assert names == set(reference.gradients[0]), "every parameter is on some stage"
    return layouts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, False])
def test_two_stages(ranks, folder, schedule, tied):
    check(ranks, folder, schedule, 2, model__tie_embeddings=tied)


@pytest.mark.parametrize("schedule", ["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_h1"])
@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages(ranks, folder, schedule, stages):
    check(ranks, folder, schedule, stages, model__tie_embeddings=True)


@pytest.mark.parametrize("schedule", ["pp.one_f_one_b", "pp.zero_bubble_v"])
def test_two_stages_of_two_replicas(ranks, folder, schedule):
    layouts = check(ranks, folder, schedule, 2, dp=2, model__tie_embeddings=True)
    for one, other in (layouts[:2], layouts[2:]):
        assert_same_bits(one.weights, other.weights)
    tied = [seen.weights["embed.tokens.weight"] for seen in layouts if "embed.tokens.weight" in seen.weights]
    assert len(tied) == (2 if schedule == "pp.zero_bubble_v" else 4), "a V ends where it began"
    for copy in tied[1:]:
        assert_same_bits({"tie": tied[0]}, {"tie": copy})


@pytest.mark.parametrize("micro", [1, 8])
def test_fewer_micro_batches_than_stages_and_many(ranks, folder, micro):
    check(ranks, folder, "pp.one_f_one_b", 2, batch__micro_size=micro)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_recomputation(ranks, folder, fraction):
    changes = {"activations__use": "core.recompute", "activations__fraction": fraction}
    check(ranks, folder, "pp.zero_bubble_h1", 2, **changes)


def test_single_precision(ranks, folder):
    check(ranks, folder, "pp.zero_bubble_v", 2, precision__compute="fp32", model__tie_embeddings=True)

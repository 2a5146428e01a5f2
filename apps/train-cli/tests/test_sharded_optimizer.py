"""`dp.sharded` beside pipelines, ties across stages, sharded weights and slices: the one-process run's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import states_of
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, record, weights

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
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
TIES = {"use": "pp.shared_modules", "drift_check_steps": 1}
ISP = {"use": "isp.communicator"}
TIED = {"model__tie_embeddings": True}
BF16 = {"precision": {"compute": "bf16"}}
INF = {"optimizer__clip_kind": "inf", "optimizer__clip_norm": 0.01}


def piped(schedule: str, **sizes: int) -> Tables:
    return {"parallel": {"pp": 2, **sizes}, "pipeline": {"use": schedule}, "gradient_handlers": [SHARDED, TIES]}


CASES: dict[str, tuple[Tables, Tables]] = {
    "a tie across stages": (TIED, piped("pp.one_f_one_b", dp=2)),
    "a tie, clipped by its largest element": (TIED | INF, piped("pp.zero_bubble_h1", dp=2)),
    "two parts per stage, in bf16": (TIED | BF16, piped("pp.interleaved", dp=2)),
    "a V": (TIED, piped("pp.zero_bubble_v", dp=2)),
    "norms over four ranks, linears over two": ({}, {"parallel": {"dp": 4, "wp": 2}, "weights": ISP}),
    "the same in bf16, columns of the table": (
        BF16,
        {"parallel": {"dp": 4, "wp": 2}, "weights": ISP | {"embedding": "hidden"}},
    ),
    "linears over all, norms in pairs": (
        {},
        {"parallel": {"dp": 4, "wp": 4}, "weights": ISP | {"reduce": "step"}, "gradient_handlers": [SHARDED | {"shards": 2}]},
    ),
    "stages of shards": (TIED, piped("pp.one_f_one_b", dp=2, wp=2) | {"weights": ISP}),
    "slices": (INF, {"parallel": {"dp": 2, "sp": 2}, "sequence": {"use": "isp.all_to_all"}}),
}

SAMPLE = ["two parts per stage, in bf16", "norms over four ranks, linears over two", "slices"]


def recorded(plans: list[Tables], folder: Path) -> list[Recorded]:
    """One after the other in the same ranks."""
    return [record(tables, 2, folder=folder) for tables in plans]


@pytest.mark.parametrize(
    ("names", "num_layers"), [(SAMPLE, 2), pytest.param(list(CASES), 4, marks=pytest.mark.campaign)], ids=["some", "all"]
)
def test_every_layout_gives_the_numbers_of_one_process(ranks: Any, texts: Path, names: list[str], num_layers: int) -> None:
    """Also the held-out losses; copies of a tie, checked after each step, and replicas stay equal bit for bit."""
    cases = {name: CASES[name] for name in names}
    base = changed(PLAN, model__num_layers=num_layers)
    plans = [changed(base, gradient_handlers=[SHARDED], **model) | layout for model, layout in cases.values()]
    by_rank = ranks(4, 400)(recorded, plans, texts)
    references: dict[str, Recorded] = {}
    for at, (name, (model, layout)) in enumerate(cases.items()):
        print(name)
        if str(model) not in references:
            references[str(model)] = record(changed(base, **model), 2, folder=texts)
        found = [rank[at] for rank in by_rank]
        compute = model.get("precision", {"compute": "fp64"})["compute"]
        assert_parity_of_parts(references[str(model)], found, compute)
        stage = 4 // layout["parallel"].get("pp", 1)
        for first in range(0, 4, stage):
            for other in found[first + 1 : first + stage]:
                assert_same_bits(found[first].weights, other.weights)


@pytest.mark.parametrize("bucket_mb", [0.001, 25.0])
def test_ties_that_stages_declare_in_opposite_orders(ranks: Any, monkeypatch: Any, bucket_mb: float) -> None:
    """They lie by their names on both stages, in one bucket or in several, so that the summed parts are the same elements."""
    own = Path(__file__).parent / "own"
    monkeypatch.syspath_prepend(own)
    alone = {
        "run": {"name": "ties", "steps": 3, "device": "cpu", "seed": 11},
        "model": {"factory": "matrix_parts:opposite"},
        "data": {"factory": "matrix_parts:Rows"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5},
        "precision": {"compute": "fp64"},
    }
    layout = piped("pp.one_f_one_b", dp=2) | {"gradient_handlers": [SHARDED | {"bucket_mb": bucket_mb}, TIES]}
    found = ranks(4, 120)(record, alone | layout, 3, folder=own)
    assert_parity_of_parts(record(alone, 3, folder=own), found, "fp64")
    for name in ("blocks.0.one.weight", "blocks.0.two.bias"):
        assert all(torch.equal(found[0].weights[name], other.weights[name]) for other in found[1:])


def stepped(tables: Tables, folder: Path, at_once: bool) -> tuple[dict[str, Any], bool]:
    """Weights after `train`, or after as many steps one by one; with whether a first layer found weights under way."""
    late: list[bool] = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        handler: Any = run.stepper.handlers[0]
        every = range(len(handler.gathers.buffers))
        run.layers[0].module.register_forward_pre_hook(lambda *_: late.append(handler.gathers.is_due(every)))
        if at_once:
            run.train()
        else:
            for _ in range(run.plan.run.steps):
                run.step()
        return weights(run), any(late)


def trained(plans: list[Tables], folder: Path) -> list[Any]:
    """Each plan both ways."""
    return [(stepped(tables, folder, True), stepped(tables, folder, False)) for tables in plans]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "names", [["a V", "norms over four ranks, linears over two"], ["two parts per stage, in bf16", "stages of shards"]]
)
def test_weights_that_come_late_are_awaited_in_every_layout(ranks: Any, texts: Path, names: list[str]) -> None:
    """By layers, by gathers of shards and by evaluations: the bits are those of steps with everything there before."""
    plans = [changed(PLAN, gradient_handlers=[SHARDED], **TIED, run__steps=3) | CASES[name][1] for name in names]
    for plan in plans:  # a check of copies after each step would wait for all
        plan["gradient_handlers"] = [SHARDED, {"use": TIES["use"]}] if "pp" in plan["parallel"] else [SHARDED]
    for found in ranks(4, 400)(trained, plans, texts):
        for late, prompt in found:
            assert_same_bits(late[0], prompt[0])
            assert not prompt[1]
        assert any(late[1] for late, _ in found), "a first layer that already waits for all of them shows nothing"


def held(tables: Tables, folder: Path) -> tuple[int, dict[str, Any], dict[str, int]]:
    """Bytes of masters, the spans of this rank by name, and how many ranks share a copy of each parameter."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        spans = {one.name: one.elements for one in states_of(run.stepper.update) if one.state == "exp_avg"}
        shared = {param.name: run.store.num_shards(param) for param in run.store.params}
        expected = sum(buffer.data.numel() // buffer.num_shards for buffer in run.store.buffers) * 4
        assert run.stepper.update.masters.num_bytes == expected
        return expected, spans, shared


def test_norms_are_shared_by_all_ranks_and_linears_by_those_with_the_same_shard(ranks: Any, texts: Path) -> None:
    tables = changed(PLAN, gradient_handlers=[SHARDED], parallel={"dp": 4, "wp": 2}, weights=ISP, **BF16)
    for _, _, shared in ranks(4, 120)(held, tables, texts):
        for name, count in shared.items():
            assert count == (4 if "norm" in name else 2), name


def test_holders_of_a_tie_step_the_same_elements_of_it(ranks: Any, texts: Path) -> None:
    tables = changed(PLAN, **TIED, **BF16) | piped("pp.one_f_one_b", dp=2)
    first, second, third, fourth = (spans for _, spans, _ in ranks(4, 120)(held, tables, texts))
    tied = "embed.tokens.weight"
    assert first[tied] == third[tied]
    assert second[tied] == fourth[tied]
    assert first[tied].last == second[tied].first
    assert torch.Size([257 * 16]).numel() == second[tied].last

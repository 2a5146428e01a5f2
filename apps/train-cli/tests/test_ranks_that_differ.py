"""One rank does something else than the others: all of them stop with an error that says so, or it is right as it is.

Drawn by a printed seed: what differs, in which layout, by which transport, on which rank and in which step. A run that goes on
must have the losses and gradient norms of one process on the same samples.
"""

from __future__ import annotations

import math
import os
import random
import time
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run

OWN = Path(__file__).parent / "own"
NUM_STEPS = 3
LIMIT_S = 30.0
TOTAL = 4
"""Samples of a global batch, in micro-batches of one."""

PLAN: dict[str, Any] = {
    "run": {"name": "differing", "steps": NUM_STEPS, "device": "cpu", "seed": 7},
    "model": {"factory": "differing_parts:layers"},
    "data": {"factory": "differing_parts:Rows"},
    "batch": {"global_size": TOTAL, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "precision": {"compute": "fp64"},
    "limits": {"collective_timeout_s": LIMIT_S},
}

Tables = dict[str, Any]

SHARDED = {"parallel": {"dp": 2, "wp": 2}}
PIPELINE = {"pipeline": {"use": "pp.one_f_one_b"}, "model": {"options": {"tied": True}}}
TIE = {"use": "pp.shared_modules"}
LAYOUTS: dict[str, Tables] = {
    "each": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]},
    "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "powersgd": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1}]},
    "tied stages": {"parallel": {"pp": 2, "dp": 1}, **PIPELINE},
    "replicated stages": {"parallel": {"pp": 2, "dp": 2}, **PIPELINE, "gradient_handlers": [{"use": "dp.bucketed"}, TIE]},
    "shards": {**SHARDED, "weights": {"use": "isp.communicator"}},
    "modules alone": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module"}},
    "modules gathered": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module", "reduce": "step"}},
    "one after another": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module", "overlap": False}},
    "slices": {"parallel": {"sp": 2, "dp": 1}, "sequence": {"use": "isp.all_to_all", "positions": False}},
}
FROZEN = ("frozen by the factory", "frozen later", "layer frozen")
KINDS = (*FROZEN, "first value", "micro-batches", "longer", "samples", "fields", "dtype", "order", "expert", "attention")


class Case(NamedTuple):
    """What differs, where, from which step on."""

    kind: str
    layout: str
    memory: bool
    odd: int
    step: int


class Outcome(NamedTuple):
    """How a rank ended: the code and message of its error, "" where there was none, what it computed, and how long it took."""

    code: str
    message: str
    rows: list[tuple[float, float]]
    seconds: float


def tables_of(layout: str, memory: bool) -> Tables:
    tables = deepcopy(PLAN)
    for table, values in deepcopy(LAYOUTS[layout]).items():
        tables[table] = tables.get(table, {}) | values if isinstance(values, dict) else values
    tables["parallel"]["cross_memory_attach"] = memory
    return tables


def is_right(kind: str, layout: str) -> bool:
    """Whether that is no difference: replicas may have other numbers of samples, of other lengths; experts are the data's."""
    split, staged = layout == "slices", "stages" in layout
    match kind:
        case "micro-batches":
            return layout in ("each", "bucketed", "powersgd")
        case "longer" | "dtype":
            return not split and not staged
        case "order":
            return not layout.startswith(("modules", "one after"))
    return False


def batch_of(first: int, num: int, length: int) -> list[dict[str, torch.Tensor]]:
    from differing_parts import sample

    return [{name: value[None] for name, value in sample(at, length).items()} for at in range(first, first + num)]


def own_batch(case: Case, coord: int, num_dp: int, step: int, is_odd: bool) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one rank. The odd one's are longer, more, or others, from `case.step` on."""
    num = TOTAL // num_dp
    differs = is_odd and step >= case.step
    first = 100 * step + 10 * coord + (5 if differs and case.kind == "samples" else 0)
    length = 12 if differs and case.kind == "longer" else 8
    return batch_of(first, num * (2 if differs and case.kind == "micro-batches" else 1), length)


def change(run: Run, case: Case) -> None:
    """Makes this rank the odd one."""
    blocks = [layer for layer in run.layers if layer.name.startswith("blocks")]
    match case.kind:
        case "frozen later":
            tied = [param for param in run.registry if param.tie_group is not None]
            (tied or list(run.registry))[0].parameter.requires_grad_(False)
        case "layer frozen":
            blocks[0].module.requires_grad_(False)
        case "first value":
            tied = [param for param in run.registry if param.tie_group is not None]
            with torch.no_grad():
                (tied or list(run.registry))[0].parameter.view(-1)[0] += 1e-6
        case "order":
            blocks[0].module.turned = True
        case "expert":
            blocks[0].module.experts = blocks[0].module.experts[::-1]
        case "attention":
            blocks[0].module.causal = False


def attempt(tables: Tables, case: Case) -> Outcome:
    """Steps until something is said; on the odd rank with the difference."""
    begin = time.monotonic()
    rows: list[tuple[float, float]] = []
    rank = int(os.environ["RANK"])
    if case.kind == "frozen by the factory" and rank == case.odd:
        os.environ["SLEY_TEST_FROZEN"] = "1"
    try:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, OWN), world) as run:
            for step in range(NUM_STEPS):
                if step == case.step and rank == case.odd:
                    change(run, case)
                coord, size = run.groups["dp"].coord, run.groups["dp"].size
                batch = own_batch(case, coord, size, step, rank == case.odd)
                if rank == case.odd and step >= case.step:
                    for micro in batch:
                        if case.kind == "fields":
                            del micro["labels"]
                        if case.kind == "dtype":
                            micro["tokens"] = micro["tokens"].int()
                row = run.step(batch)
                rows.append((float(row["loss"]), float(row["grad_norm"])))
    except SleyError as error:
        found = error.diagnostics[0]
        return Outcome(found.code, found.message, rows, time.monotonic() - begin)
    return Outcome("", "", rows, time.monotonic() - begin)


def alone(case: Case, tables: Tables, world: int) -> list[tuple[float, float]]:
    """The rows of one process on the samples of all ranks."""
    options = {"model": tables["model"]}
    rows = []
    num_dp = tables["parallel"]["dp"]
    with assemble(plan_from_dict(PLAN | options, OWN), World.alone("cpu")) as run:
        for step in range(NUM_STEPS):
            batch = [
                micro
                for coord in range(num_dp)
                for micro in own_batch(case, coord, num_dp, step, coord == case.odd and world == num_dp)
            ]
            row = run.step(batch)
            rows.append((float(row["loss"]), float(row["grad_norm"])))
    return rows


def check(ranks: Any, case: Case) -> str:
    """Runs the case; returns what came of it."""
    tables = tables_of(case.layout, case.memory)
    world = plan_from_dict(tables, OWN).world()
    outcomes = ranks(world, 4 * LIMIT_S)(attempt, tables, case)
    if is_right(case.kind, case.layout):
        assert all(one.code == "" for one in outcomes), (case, outcomes)
        if case.layout != "powersgd":
            for one in outcomes:
                for wanted, found in zip(alone(case, tables, world), one.rows, strict=True):
                    assert all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-9), wanted, found)), (case, wanted, found)
        return "right"
    assert all(one.code for one in outcomes), (case, outcomes)
    assert max(one.seconds for one in outcomes) < 3 * LIMIT_S, (case, outcomes)
    if case.kind == "fields":  # refused on that rank alone; the others miss it
        assert outcomes[case.odd].code not in ("ranks-differ", "collective-failed"), (case, outcomes)
    else:
        assert {one.code for one in outcomes} == {"ranks-differ"}, (case, outcomes)
    return "/".join(sorted({one.code for one in outcomes}))


def drawn(draw: random.Random) -> Case:
    """A case that can be one: not every kind is a difference in every layout."""
    while True:
        layout, kind = draw.choice(list(LAYOUTS)), draw.choice(KINDS)
        world = 4 if layout == "replicated stages" else 2
        if kind == "attention" and layout != "slices":
            continue  # code that differs by rank and moves nothing cannot be seen
        if kind == "expert" and layout not in ("modules alone", "one after another", "modules gathered"):
            continue  # so too
        if kind == "samples" and layout != "slices" and "stages" not in layout:
            continue  # replicas have others
        if kind == "layer frozen" and layout == "tied stages":
            continue  # one rank alone holds the layer: no difference
        if kind == "frozen by the factory" and layout == "tied stages":
            continue
        step = 0 if kind in ("first value", "frozen by the factory") else draw.randrange(2)
        return Case(kind, layout, draw.random() < 0.5, draw.randrange(world), step)


def check_all(ranks: Any, cases: list[Case]) -> None:
    for case in cases:
        print(case, flush=True)
        print(f"  {check(ranks, case)}", flush=True)


GIVEN = [
    Case("frozen later", "bucketed", memory=True, odd=1, step=1),
    Case("layer frozen", "each", memory=False, odd=0, step=1),
    Case("frozen later", "tied stages", memory=True, odd=1, step=0),
    Case("first value", "tied stages", memory=True, odd=0, step=0),
    Case("expert", "modules alone", memory=True, odd=1, step=0),
    Case("attention", "slices", memory=True, odd=1, step=1),
    Case("micro-batches", "tied stages", memory=True, odd=1, step=1),
    Case("micro-batches", "bucketed", memory=True, odd=1, step=1),
]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OWN)


def test_some_differences(ranks: Any, own: None) -> None:
    check_all(ranks, GIVEN)


@pytest.mark.campaign
def test_any_difference(ranks: Any, own: None) -> None:
    seed = int(os.environ.get("SLEY_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    draw = random.Random(seed)
    check_all(ranks, [drawn(draw) for _ in range(100)])

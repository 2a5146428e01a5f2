"""Models and options, drawn by numbers that are printed: they train as in a plain PyTorch loop, or are refused by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.data.dataset import DataContext
from sley_core.errors import SleyError
from sley_testing.habits import HABITS, OF_WHOLE_GRADIENTS
from sley_testing.habits import layers as habit_layers
from sley_testing.plain import PlainLoop, assert_step, decay_groups
from sley_testing.runs import Recorded, record

STEPS, GLOBAL = 3, 8


class CrossEntropies:
    """By torch alone: every negative label is ignored."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        counts = batch["labels"] >= 0
        return F.cross_entropy(output[counts], batch["labels"][counts], reduction="sum")


def drawn_plan(seed: int, world: int) -> dict[str, Any]:
    """The tables of a run over `world` ranks."""
    draw = random.Random(f"plan {seed}")
    tied = draw.random() < 0.4
    wp = draw.choice([size for size in (2, 3, 4) if world % size == 0])
    micro = draw.choice([size for size in (1, 2, 4) if GLOBAL // world % size == 0])
    weights = {
        "overlap": draw.random() < 0.8,
        "unit": draw.choice(["layer", "module"]),
        "ahead": draw.choice([0, 1, 2, 5]),
        "reduce": draw.choice(["micro_batch", "step"]),
        "head": draw.choice(["gather", "vocabulary"]),
        "embedding": "gather" if tied else draw.choice(["gather", "hidden"]),
    }
    return {
        "run": {"name": "drawn", "steps": STEPS, "device": "cpu", "seed": seed},
        "model": {"factory": "drawn:model", "options": {"seed": seed, "tied": tied}},
        "data": {"factory": "drawn:Rows"},
        "batch": {"global_size": GLOBAL, "micro_size": micro},
        "optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": draw.choice([0.1, 1e6])},
        "evaluation": {"every": STEPS + 1, "steps": 1},
        "precision": {"compute": "fp64", "accumulation": draw.choice(["auto", "direct"])},
        "parallel": {"dp": world, "wp": wp, "cross_memory_attach": draw.random() < 0.6},
        "weights": {"use": "isp.communicator", **weights},
        "activations": {"use": "core.recompute", "fraction": draw.choice([0.0, 0.0, 0.5, 1.0])},
        "limits": {"collective_timeout_s": 10.0},
    }


def batches_of(split: str) -> list[dict[str, Tensor]]:
    from drawn import Rows

    data = Rows(DataContext(0, split))
    rows = [[data[at] for at in range(GLOBAL * step, GLOBAL * (step + 1))] for step in range(len(data) // GLOBAL)]
    return [{name: torch.stack([row[name] for row in step]) for name in step[0]} for step in rows]


def recorded(plans: Sequence[dict[str, Any]], folder: Path, batches: Any) -> list[Recorded | str]:
    """Each run of this rank, or the code of its refusal."""
    runs: list[Recorded | str] = []
    for tables in plans:
        try:
            runs.append(record(tables, STEPS, folder=folder, batches=batches))
        except SleyError as error:
            runs.append(error.diagnostics[0].code)
    return runs


Case = tuple[dict[str, Any], Any, set[str]]
"""A plan, its layers, and how its run may end: "right", or with a code."""


def check(ranks: Any, folder: Path, world: int, cases: Sequence[Case]) -> None:
    """Asserts that each run equals the loop over its layers, or ends as it may."""
    batches, held_out = batches_of("train"), batches_of("held_out")
    found = zip(*ranks(world, 580)(recorded, [tables for tables, _, _ in cases], folder, batches), strict=True)
    ends: Counter[str] = Counter()
    wrong = []
    for (tables, layers, allowed), runs in zip(cases, found, strict=True):
        try:
            codes = {run if isinstance(run, str) else "right" for run in runs}
            assert codes & allowed, f"{codes}, not {allowed}"
            ends[min(codes & allowed)] += 1
            if codes == {"right"}:
                assert_plain(layers, tables, runs, batches, held_out)
        except AssertionError as error:
            wrong.append(f"{tables}: {error}")
    print(dict(ends))
    assert not wrong, "\n".join(wrong)


def assert_plain(layers: Any, tables: dict[str, Any], runs: Sequence[Recorded], batches: Any, held_out: Any) -> None:
    """Asserts that every rank's steps and evaluation are those of the loop over `layers`."""
    size, optimizer = tables["batch"]["micro_size"], tables["optimizer"]
    for _, module in layers if isinstance(layers, list) else [(one.name, one.module) for one in layers]:
        module.double()

    def sgd(named: Any) -> torch.optim.Optimizer:
        groups = decay_groups(named, optimizer["weight_decay"])
        return torch.optim.SGD(groups, lr=optimizer["lr"], momentum=optimizer["momentum"])

    loop = PlainLoop(layers, CrossEntropies(), optimizer=sgd, clip_norm=optimizer["clip_norm"])
    loop.load(runs[0].first)
    for number in range(STEPS):
        step = loop.step(cut(batches[number], size))
        for run in runs:
            assert_step(step, run.rows[number], run.gradients[number], run.weights if number == STEPS - 1 else {})
    if "evaluation" in tables:
        evaluated = loop.evaluate(cut(held_out[0], size))
        assert all(isclose(run.held_out or 0.0, evaluated, rel_tol=1e-9) for run in runs), evaluated


def cut(batch: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, GLOBAL, size)]


def drawn_case(seed: int, world: int) -> Case:
    """A block that calls other modules by its data is refused if each of its modules is gathered alone."""
    from drawn import kinds_of, model

    tables, kinds = drawn_plan(seed, world), {kind.__name__ for kind in kinds_of(seed)}
    is_alone = tables["weights"]["unit"] == "module" and "Experts" in kinds
    return tables, model(**tables["model"]["options"]), {"right", "ranks-differ"} if is_alone else {"right"}


def test_drawn_models_and_options(ranks, own):
    check(ranks, own, 2, [drawn_case(seed, 2) for seed in range(5)])


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 4])
def test_more_of_them(ranks, own, world):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    check(ranks, own, world, [drawn_case(seed, world) for seed in [*range(5, 8), *range(first, first + 40)]])


def test_habits_around_a_sharded_linear(ranks, own):
    """What people write around a linear."""
    from drawn import REFUSED, Rows

    cases: list[Case] = []
    for habit in HABITS | OF_WHOLE_GRADIENTS:
        tables = drawn_plan(1, 2) | {"model": {"factory": "sley_testing.habits:model", "options": {"habit": habit}}}
        tables |= {"batch": {"global_size": GLOBAL, "micro_size": 4}, "weights": {"use": "isp.communicator"}}
        tables["activations"] = {"use": "core.keep"}
        del tables["evaluation"]  # some habits have no forward for it
        cases.append((tables, habit_layers(Rows(DataContext(0, "train")).info, habit), {REFUSED.get(habit, "right")}))
    check(ranks, own, 2, cases)


def test_layers_that_use_their_weights_by_the_data(ranks, own):
    """Ranks with other data exchange in the same order, with exchanges that are waited for at once and that are not."""
    from isp_models import by_data

    first = [[int(row[0]) for row in batch["tokens"]] for batch in batches_of("train")[:STEPS]]
    for kinds in (2, 3):
        last = [(tokens[GLOBAL // 2 - 1] % kinds, tokens[-1] % kinds) for tokens in first]
        assert any(one != other for one, other in last), "or ranks do the same where a step's gradients are sent"
    ways: list[tuple[str, dict[str, Any], bool]] = [
        ("repeats", {}, True),
        ("repeats", {"overlap": False, "reduce": "step"}, True),
        ("looks", {"overlap": False}, True),
        ("looks", {"reduce": "step"}, False),
        ("adds", {}, True),
        ("adds", {"reduce": "step"}, True),
        ("tied", {"reduce": "step"}, True),
    ]
    cases: list[Case] = []
    for kind, options, attaches in ways:
        tables = drawn_plan(1, 2) | {"model": {"factory": "isp_models:by_data", "options": {"kind": kind}}}
        tables |= {"batch": {"global_size": GLOBAL, "micro_size": 1}, "weights": {"use": "isp.communicator", **options}}
        tables |= {"parallel": {"dp": 2, "wp": 2, "cross_memory_attach": attaches}, "activations": {"use": "core.keep"}}
        del tables["evaluation"]  # its micro-batches have other first tokens
        cases.append((tables, by_data(kind), {"right"}))
    check(ranks, own, 2, cases)

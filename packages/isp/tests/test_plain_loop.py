"""Models and options, drawn by numbers that are printed: what a plain PyTorch loop gives, or an error with a name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
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
    """By torch alone: whatever is negative is ignored."""

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
        "fused": draw.random() < 0.5,
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


def batches_of(data: Any) -> list[dict[str, Tensor]]:
    rows = [[data[at] for at in range(GLOBAL * step, GLOBAL * (step + 1))] for step in range(len(data) // GLOBAL)]
    return [{name: torch.stack([row[name] for row in step]) for name in step[0]} for step in rows]


def recorded(plans: Sequence[dict[str, Any]], folder: Path, batches: Any) -> list[Recorded | str]:
    """Each run of this rank, or what it is refused with."""
    found: list[Recorded | str] = []
    for tables in plans:
        try:
            found.append(record(tables, STEPS, folder=folder, batches=batches))
        except SleyError as error:
            found.append(error.diagnostics[0].code)
    return found


def assert_plain(
    layers: Any, tables: dict[str, Any], ranks: Sequence[Recorded | str], batches: Any, held_out: Any, allowed: set[str]
) -> str:
    """That each rank saw what the loop over `layers` gives, or was refused as it may be; how it ended."""
    ended = {rank if isinstance(rank, str) else "right" for rank in ranks}
    assert ended & allowed, f"{ended}, not {allowed}"
    seen = [rank for rank in ranks if isinstance(rank, Recorded)]
    if len(seen) < len(ranks):
        return min(ended & allowed)
    size = tables["batch"]["micro_size"]
    loop = plain_loop(layers, tables)
    loop.load(seen[0].first)
    for number in range(STEPS):
        step = loop.step(cut(batches[number], size))
        for rank in seen:
            last = rank.weights if number == STEPS - 1 else {}
            assert_step(step, rank.rows[number], rank.gradients[number], last)
    if "evaluation" not in tables:
        return "right"
    evaluated = loop.evaluate(cut(held_out[0], size))
    for rank in seen:
        assert rank.held_out is not None
        assert isclose(rank.held_out, evaluated, rel_tol=1e-9), f"{rank.held_out} of what is held out, not {evaluated}"
    return "right"


def allowed_of(tables: dict[str, Any]) -> set[str]:
    """How a run may end: "right", or refused, where experts of which ranks run others travel each alone, or read weights."""
    from drawn import kinds_of

    kinds = kinds_of(tables["model"]["options"]["seed"])
    if "Reading" in kinds:
        return {"sharded-weight-read"}
    is_alone = tables["weights"]["unit"] == "module" or not tables["weights"]["fused"]
    return {"right", "ranks-differ"} if is_alone and "Experts" in kinds else {"right"}


def plain_loop(layers: Any, tables: dict[str, Any]) -> PlainLoop:
    optimizer = tables["optimizer"]
    for _, module in layers if isinstance(layers, list) else [(one.name, one.module) for one in layers]:
        module.double()

    def sgd(named: Any) -> torch.optim.Optimizer:
        groups = decay_groups(named, optimizer["weight_decay"])
        return torch.optim.SGD(groups, lr=optimizer["lr"], momentum=optimizer["momentum"])

    return PlainLoop(layers, CrossEntropies(), optimizer=sgd, clip_norm=optimizer["clip_norm"])


def cut(batch: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, GLOBAL, size)]


def check_drawn(ranks: Any, own: Path, world: int, seeds: Sequence[int]) -> None:
    from drawn import Rows, kinds_of, model

    batches, held_out = (batches_of(Rows(DataContext(0, split))) for split in ("train", "held_out"))
    plans = [drawn_plan(seed, world) for seed in seeds]
    ended: Counter[str] = Counter()
    wrong = []
    for tables, of_ranks in zip(plans, zip(*ranks(world, 580)(recorded, plans, own, batches), strict=True), strict=True):
        try:
            made = model(**tables["model"]["options"])
            ended[assert_plain(made, tables, of_ranks, batches, held_out, allowed_of(tables))] += 1
        except AssertionError as error:
            seed = tables["model"]["options"]["seed"]
            wrong.append(f"seed {seed} of {world} ranks, {kinds_of(seed)}, {tables}: {error}")
    print(dict(ended))
    assert not wrong, "\n".join(wrong)


def test_drawn_models_and_options_give_what_a_plain_loop_gives(ranks, own):
    check_drawn(ranks, own, 2, range(5))


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 4])
def test_more_of_them(ranks, own, world):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    check_drawn(ranks, own, world, [*range(5, 8), *range(first, first + 40)])


REFUSED = {
    "Penalty": "sharded-weight-read",  # it asks for the gradient of a weight
    "Swapped": "sharded-weight-read",  # it makes another weight of a linear's own
    "Silent": "sharded-weight-read",  # it gives a weight to a function of its own
    "Mapped": "sharded-weight-mapped",
    "HookedWeights": "model-hook",
    "Assigned": "sharded-weight-read",
}


@pytest.mark.parametrize("unit", ["layer", pytest.param("module", marks=pytest.mark.campaign)])
def test_habits_around_a_sharded_linear(ranks, own, unit):
    """What people write around a linear gives the numbers of the loop, or is refused by name."""
    from drawn import Rows

    data = Rows(DataContext(0, "train"))
    batches, held_out = (batches_of(Rows(DataContext(0, split))) for split in ("train", "held_out"))
    plans = []
    habits = HABITS | OF_WHOLE_GRADIENTS
    for habit in habits:
        tables = drawn_plan(1, 2) | {"model": {"factory": "sley_testing.habits:model", "options": {"habit": habit}}}
        tables["batch"] = {"global_size": GLOBAL, "micro_size": 4}
        del tables["evaluation"]  # for which some habits have no forward
        plans.append(tables | {"weights": {"use": "isp.communicator", "unit": unit}, "activations": {"use": "core.keep"}})
    for habit, tables, of_ranks in zip(
        habits, plans, zip(*ranks(2, 240)(recorded, plans, own, batches), strict=True), strict=True
    ):
        wanted = {REFUSED.get(habit, "right")}
        if habit.startswith("Adaptive") and unit == "module":
            wanted |= {"ranks-differ"}
        ended = assert_plain(habit_layers(data.info, habit), tables, of_ranks, batches, held_out, wanted)
        print(habit, ended)


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"overlap": False}, {}),
    ({"overlap": False, "reduce": "step"}, {}),
    ({"reduce": "step"}, {"cross_memory_attach": False}),
]
BY_DATA: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "taken_by_data:often": WAYS,
    "taken_by_data:looked": WAYS,
    "taken_by_data:added": WAYS,
    "tied_by_data:layers": [({"reduce": "step"}, {})],
}
EVERY_WAY = [(factory, *way) for factory, ways in BY_DATA.items() for way in ways]


@pytest.mark.parametrize("cases", [EVERY_WAY[::3], pytest.param(EVERY_WAY, marks=pytest.mark.campaign)])
def test_layers_that_use_their_weights_as_their_data_say(ranks, own, cases):
    """In the same order on ranks whose data are others, with exchanges that are waited for at once and that are not."""
    from drawn import Rows

    batches, held_out = (batches_of(Rows(DataContext(0, split))) for split in ("train", "held_out"))
    first = [[int(row[0]) for row in batches[number]["tokens"]] for number in range(STEPS)]
    for kinds in (2, 3):
        last = [(tokens[GLOBAL // 2 - 1] % kinds, tokens[-1] % kinds) for tokens in first]
        assert any(one != other for one, other in last), "or ranks do the same where a step's gradients leave"
    plans = []
    for factory, weights, parallel in cases:
        tables = drawn_plan(1, 2) | {"model": {"factory": factory}, "batch": {"global_size": GLOBAL, "micro_size": 1}}
        tables["weights"] = {"use": "isp.communicator", **weights}
        tables["parallel"] = {"dp": 2, "wp": 2, **parallel}
        tables["activations"] = {"use": "core.keep"}
        del tables["evaluation"]  # in other micro-batches, whose first tokens are others
        plans.append(tables)
    wrong = []
    for tables, of_ranks in zip(plans, zip(*ranks(2, 240)(recorded, plans, own, batches), strict=True), strict=True):
        module, _, name = tables["model"]["factory"].partition(":")
        try:
            layers = getattr(import_module(module), name)()
            assert_plain(layers, tables, of_ranks, batches, held_out, {"right"})
        except AssertionError as error:
            wrong.append(f"{tables['model']}, {tables['weights']}, {tables['parallel']}: {error}")
    assert not wrong, "\n".join(wrong)

"""Layers that hand on, keep or write to what they were given: right in every schedule.

What a stage received lies in the link's memory, and autograd, views and users alias it. Layers are drawn, and compared with
a loop that shares nothing with the engine but first weights and samples.
"""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path

import pytest
import torch

from sley_core.actions.action import loop
from sley_pp.csv_schedules import write_csv
from sley_pp.schedules import gpipe
from sley_testing.runs import Recorded, record

SCHEDULES = ["gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "csv"]
STEPS = 3
LR = 0.5


def backwards_reversed(stages: int, micros: int) -> str:
    """A schedule of nobody's: backwards in the opposite order of the forwards."""
    lists = gpipe(stages, 1, micros)
    turned = [[*actions[:micros], *reversed(actions[micros:])] for actions in lists]
    return write_csv(turned, loop(stages))


def plan(kinds: list[str], schedule: str, stages: int, micros: int, folder: Path):
    assert parts().HELD_OUT % (2 * micros) == 0, "the loop by hand takes all of them"
    pipeline = {"use": f"pp.{schedule}"}
    if schedule == "csv":
        (folder / f"{stages}.{micros}.csv").write_text(backwards_reversed(stages, micros))
        pipeline["file"] = str(folder / f"{stages}.{micros}.csv")
    return {
        "run": {"name": "aliases", "steps": STEPS, "device": "cpu", "seed": 7},
        "model": {"factory": "aliasing:layers", "options": {"kinds": kinds}},
        "data": {"factory": "aliasing:Rows"},
        "loss": {"factory": "aliasing:Squares"},
        "batch": {"global_size": 2 * micros, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": LR},
        "precision": {"compute": "fp64"},
        "parallel": {"pp": stages, "dp": 1},
        "pipeline": pipeline,
        "evaluation": {"every": 100, "steps": parts().HELD_OUT // (2 * micros)},
    }


def parts():
    """The layers' module; the fixture `own` puts it on the path."""
    return import_module("aliasing")


def batch(rows):
    samples = [parts().sample(row) for row in rows]
    return {name: torch.stack([one[name] for one in samples]) for name in ("x", "y")}


def batches(micros: int):
    return [batch(range(100 * step, 100 * step + 2 * micros)) for step in range(STEPS)]


def plain(kinds: list[str], first: dict[str, torch.Tensor], micros: int):
    """Losses, the first step's gradients, the last weights and the held-out loss, from torch alone."""
    named = parts().layers(parts().Rows.info, kinds)
    layers = [layer.double() for _, layer in named]
    parameters = {f"{name}.{key}": value for name, layer in named for key, value in layer.named_parameters()}
    assert parameters.keys() == first.keys()

    def loss(whole) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(whole["x"].split(2), whole["y"].split(2), strict=True):
            value = x
            for layer in layers:
                value = layer(value)
            total = total + (value - y).square().sum()
        return total / whole["y"].numel()

    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(first[name])
    losses, gradients = [], {}
    for whole in batches(micros):
        for value in parameters.values():
            value.grad = None
        now = loss(whole)
        now.backward()
        losses.append(now.item())
        with torch.no_grad():
            for name, value in parameters.items():
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                gradients.setdefault(name, gradient.clone())
                value -= LR * gradient
    with torch.no_grad():
        held_out = float(loss(batch(range(1000, 1000 + parts().HELD_OUT))))
    return losses, gradients, parameters, held_out


def faults(kinds: list[str], layouts: list[Recorded], micros: int) -> list[str]:
    first, own, last = {}, {}, {}
    for layout in layouts:
        first |= layout.first
        own |= layout.gradients[0]
        last |= layout.weights
    losses, gradients, weights, held_out = plain(kinds, first, micros)
    found = []
    for step, wanted in enumerate(losses):
        if abs(layouts[0].rows[step]["loss"] - wanted) > 1e-9 * abs(wanted):
            found.append(f"loss of step {step + 1}: {layouts[0].rows[step]['loss']}, not {wanted}")
    for what, wanted, came in (("gradient", gradients, own), ("weight", weights, last)):
        for name, value in wanted.items():
            error = float((came[name] - value.detach()).norm()) / max(float(value.detach().norm()), 1e-3)
            if error > 1e-9:
                found.append(f"{what} of {name}: {error:.0%} off")
    if abs(layouts[0].held_out - held_out) > 1e-9 * abs(held_out):
        found.append(f"held-out loss: {layouts[0].held_out}, not {held_out}")
    return found


def recorded(plans, folder):
    return [record(tables, STEPS, folder=folder, batches=batches(micros)) for micros, tables in plans]


def check(ranks, own, folder, stages: int, cases: list[tuple[list[str], str, int]], limit_s: float = 120) -> None:
    """cases: kinds, schedule, micro-batches; all in the same ranks, as starting them takes longer than a run."""
    plans = [(micros, plan(kinds, schedule, stages, micros, folder)) for kinds, schedule, micros in cases]
    by_rank = ranks(stages, limit_s)(recorded, plans, own)
    wrong = []
    for at, (kinds, schedule, micros) in enumerate(cases):
        found = faults(kinds, [rank[at] for rank in by_rank], micros)
        if found:
            wrong.append((kinds, schedule, f"{micros} micro-batches", found[:4]))
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "\n".join(map(str, wrong[:5]))


@pytest.mark.campaign
def test_stages_that_hand_on_views_of_what_they_received(ranks, own, tmp_path):
    """In another order, so that a gradient that came for one place leaves as a view for another; and in the turn of a V."""
    moved = ["2", "mix", "viewed", "viewed", "turned", "viewed", "same"]
    cases = [(moved, schedule, 8) for schedule in ("one_f_one_b", "interleaved", "zero_bubble_v")]
    check(ranks, own, tmp_path, 3, [*cases, (["1", *6 * ["positions"]], "zero_bubble_v", 24)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_stages_that_keep_storages_of_what_they_received(ranks, own, tmp_path, schedule):
    """Without any tensor of it: the memory of a message is theirs as long."""
    check(ranks, own, tmp_path, 3, [(["1", *5 * ["keeps storages"]], schedule, 8)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stages", "times"), [(2, 1), (2, 2), (3, 1)])
def test_layers_that_alias_what_they_received(ranks, own, tmp_path, stages, times):
    draw = random.Random(stages)
    drawn = [(draw.randrange(10**6), schedule, draw.choice([1, 4, 6])) for schedule in times * SCHEDULES]
    cases = [(parts().drawn(seed), schedule, micros) for seed, schedule, micros in drawn]
    check(ranks, own, tmp_path, stages, cases)


@pytest.mark.campaign
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_many_layers_that_alias_what_they_received(ranks, own, tmp_path, stages):
    """Other ones in every run; the seed is printed."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    schedules = [name for name in SCHEDULES if stages < 4 or name not in ("interleaved", "zero_bubble_v")]
    cases = [(parts().drawn(draw.randrange(10**6)), schedule, draw.choice([1, 2, 3, 4, 6, 8])) for schedule in 20 * schedules]
    check(ranks, own, tmp_path, stages, cases, 550)

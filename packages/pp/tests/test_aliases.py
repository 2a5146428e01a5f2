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
from sley_pp.schedules import gpipe, write_csv
from sley_testing.plain import PlainLoop, assert_step
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


def faults(kinds: list[str], layouts: list[Recorded], micros: int) -> list[str]:
    """Returns what differs from a plain loop: a step, or the held-out loss."""
    loop = PlainLoop(
        [(name, layer.double()) for name, layer in parts().layers(parts().Rows.info, kinds)],
        parts().Squares(),
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=LR),
    )
    loop.load({name: value for layout in layouts for name, value in layout.first.items()})
    for number, whole in enumerate(batches(micros)):
        step = loop.step(split(whole))
        for layout in layouts:
            last = layout.weights if number == STEPS - 1 else {}
            try:
                assert_step(step, layout.rows[number], layout.gradients[number], last)
            except AssertionError as error:
                return [f"step {number + 1}: {error}"]
    held_out = loop.evaluate(split(batch(range(1000, 1000 + parts().HELD_OUT))))
    if abs(layouts[0].held_out - held_out) > 1e-9 * abs(held_out):
        return [f"held-out loss: {layouts[0].held_out}, not {held_out}"]
    return []


def split(whole):
    return [{name: value[at : at + 2] for name, value in whole.items()} for at in range(0, len(whole["x"]), 2)]


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

"""A schedule and a placement of somebody else's, beside core alone: planned, checked, drawn, and trained as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.actions.action import Placement, Schedule
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Machine, SimulatedStep, simulate
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_by_hand, record

OWN = Path(__file__).parent / "own"
SIZES = [(2, 1, 8), (4, 1, 3), (4, 1, 8), (3, 2, 7), (2, 3, 4)]
"""Stages, waves, micro-batches."""

pytestmark = pytest.mark.usefixtures("installed")


def tables(pp: int, waves: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "waves", "steps": 3, "device": "cpu", "seed": 3},
        "model": {"factory": "wave_model:layers"},
        "data": {"factory": "wave_model:Rows"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": 0.1},
        "precision": {"compute": "fp64"},
        "parallel": {"dp": 1, "pp": pp},
        "pipeline": {"use": "wave.hanayo", "waves": waves},
        **more,
    }


@pytest.fixture(scope="module")
def hanayo() -> Callable[[int], Schedule]:
    """The schedule as the plan of so many waves has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(OWN)
        from sley_wave.config import HanayoConfig
        from sley_wave.hanayo import build
    return lambda waves: build(HanayoConfig(waves=waves))


def simulated(schedule: Schedule, stages: int, micros: int) -> SimulatedStep:
    placement = schedule.placement(stages)
    lowered = lower(schedule.lists(stages, micros), placement, micros)
    return simulate(lowered, placement, Costs.even(placement.num_positions))


def plan_of(**changes: Any) -> Plan:
    return plan_from_dict(tables(**changes), OWN)


# -- the schedule, beside what its contract holds (test_schedules.py) ---------------------------------------------------


@pytest.mark.parametrize(("stages", "waves", "micros"), SIZES)
def test_nothing_is_sent_before_its_receive_is_posted_and_few_receives_are(hanayo, stages, waves, micros):
    schedule = hanayo(waves)
    placement = schedule.placement(stages)
    lowered = lower(schedule.lists(stages, micros), placement, micros)
    machine = Machine(lowered, placement, Costs.even(placement.num_positions), posted=True)
    machine.run()
    assert all(machine.posted_s[delivery] <= sent_s + 1e-9 for delivery, sent_s in machine.sent_s.items())
    assert max(held.receives for held in simulated(schedule, stages, micros).peaks) <= 6


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_takes_what_the_schedule_s_record_names_and_the_only_link() -> None:
    plan = plan_of(pp=4, waves=1)
    assert list(plan.plugins) == ["core", "wave"]
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("wave.link", "wave.even")
    assert [handler.name for handler in plan.gradient_handlers] == ["wave.ties"]
    assert check_plan(plan, 4) == []


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (lambda stages, chunks: Placement(tuple(range(stages))), "has 1 parts of the model on each of 4 stages, not 2"),
        (lambda stages, chunks: Placement((*range(stages), *[0] * stages)), "5 of the 8 parts|1 of the 8 parts"),
        (lambda stages, chunks: Placement((0, 1, 2, 4) * 2), "gives stage 3 no part of the model"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_by_name(monkeypatch, route, words) -> None:
    import sley_wave.hanayo

    monkeypatch.setattr(sley_wave.hanayo, "wave", route)
    (found,) = check_plan(plan_of(pp=4), 4)
    assert (found.code, found.path) == ("placement-wrong", ("pipeline", "use"))
    with pytest.raises(PlanError, match=words):
        raise PlanError.many([found])


# -- the run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"pp": 2, "waves": 2}),
        (4, {"pp": 4, "waves": 1}),
        (4, {"pp": 2, "parallel": {"dp": 2, "pp": 2}, "batch": {"global_size": 8, "micro_size": 2}}),
    ],
    ids=["two stages, two waves", "four stages", "two replicas"],
)
def test_trained_in_waves_it_is_the_loop_by_hand(ranks: Callable[..., Ranks], size: int, changes: dict[str, Any]) -> None:
    """Loss, norm, gradients and weights of two steps, with weights that stages share."""
    from wave_model import Rows, layers

    rows = Rows(None)
    made = [[rows[8 * step + at] for at in range(8)] for step in range(2)]
    batches = [{name: torch.stack([row[name] for row in batch]) for name in batch[0]} for batch in made]
    layouts = ranks(size, 120)(record, tables(**changes), 2, folder=OWN, batches=batches)
    first = {name: value for layout in layouts for name, value in layout.first.items()}
    names = {name for layout in layouts for name in layout.gradients[0]}
    assert names == {"embed.weight", *(f"blocks.{at}.weight" for at in range(7)), *(f"blocks.{at}.bias" for at in range(6))}
    for layout in layouts:
        by_hand = partial(torch.optim.SGD, lr=0.1)
        assert_by_hand(layout, layers(Rows.info), batches, by_hand, micro_size=1, first=first)

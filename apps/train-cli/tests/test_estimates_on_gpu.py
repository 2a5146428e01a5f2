"""Twenty plans take the bytes and the seconds on one device that were estimated; small ones are compared so on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sley_core.comm.world import World
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_estimate.testing.estimates import Compared, compare, machine_for, measured_tables
from sley_estimate.testing.short_calibration import shortly
from sley_testing.figures import Figure, note

sys.path.insert(0, str(Path(__file__).parent / "own"))
from twenty_plans import KINDS, twenty_plans

BYTES, SECONDS = 0.03, 0.10
"""How far the peak and a step may be from what was estimated, relative."""


def figures(found: Compared) -> list[Figure]:
    """The rows of a plan in the table of all figures."""
    rows = [_figure(f"peak bytes: {found.name}", found.bytes_error, BYTES, f"of {found.peak.num_bytes / 2**20:,.0f} MiB")]
    turns = ", ".join(f"{error:+.1%}" for error in found.seconds_errors)
    real = f"of {found.real_seconds:.4f} s ({min(found.rounds):.4f} to {max(found.rounds):.4f}; in turn {turns})"
    return [*rows, _figure(f"step seconds: {found.name}", found.seconds_error, SECONDS, real)]


def _figure(what: str, error: float, target: float, of: str) -> Figure:
    return Figure(what, f"{error:+.1%} {of}", f"within {target:.0%}", is_met=abs(error) <= target)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_large", [False, True])
def test_all_of_them_are_plans(device: str, is_large: bool) -> None:
    plans = twenty_plans(device, is_large=is_large)
    assert len(plans) == 20
    for name, tables in plans.items():
        assert not check_plan(plan_from_dict(tables), 1), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_small_one_takes_what_was_estimated_of_a_cpu(name: str) -> None:
    """Its bytes; its seconds are compared, and say nothing, since calibration is short and the machine is others' too."""
    plan = plan_from_dict(twenty_plans("cpu", is_large=False)[name])
    with World.alone("cpu") as world, shortly():
        machine = machine_for(world.device, plan, measured_tables(world.device))
    found = compare(name, plan, lambda _: machine, num_steps=1, num_rounds=1)
    print(found)
    assert found.states == found.real_states
    assert abs(found.bytes_error) <= BYTES
    assert found.real_seconds > 0
    of_bytes, of_seconds = figures(found)
    assert of_bytes.is_met
    assert of_seconds.target == "within 10%"


@pytest.fixture(scope="module")
def known():
    """What is measured of the machine whatever the plan."""
    with World.alone("cuda") as world:
        return measured_tables(world.device)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(300)  # the first one measures the machine
@pytest.mark.parametrize("name", KINDS)
def test_a_large_one_takes_what_was_estimated_of_the_device(name: str, known) -> None:
    """What parts hold between two steps to the byte; the peak and the seconds nearly so."""
    plan = plan_from_dict(twenty_plans("cuda", is_large=True)[name])
    found = compare(name, plan, lambda device: machine_for(device, plan, known))
    print(found)
    for figure in figures(found):
        note(figure)
    assert found.states == found.real_states
    assert all(figure.is_met is not False for figure in figures(found)), str(found)

"""Simulated steps against hand-computed ones: what is hidden, what is exposed, and what two exchanges on one link take."""

from __future__ import annotations

import random

import pytest

from sley_core.actions.action import Action, Kind, loop
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.errors import PlanError
from sley_estimate.seconds.lanes import Lanes
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import NOTHING, Cost
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange
from sley_estimate.testing.plain_steps import plain_step
from sley_testing.runs import any_lists

LAYER = LayerSeconds(forward=1.0, backward=2.0, input_gradient=1.0, weight_gradient=1.0)


def one_f_one_b(stages, micros):
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micros)
        kinds = "F" * ahead + "FB" * (micros - ahead) + "B" * ahead
        seen = {"F": 0, "B": 0}
        actions = []
        for kind in kinds:
            actions.append(Action(Kind(kind), 0, seen[kind]))
            seen[kind] += 1
        lists.append(actions)
    return lists


def step(stages, micros, messages=None):
    placement = loop(stages)
    lists = lower(one_f_one_b(stages, micros), placement, micros)
    return plain_step(lists, placement, [[LAYER]] * stages, messages or [NOTHING] * (stages - 1))


@pytest.mark.parametrize(("stages", "micros"), [(1, 4), (2, 1), (2, 4), (4, 4), (4, 16), (8, 3)])
def test_the_bubble_of_1f1b_is_that_of_the_formula(stages, micros):
    found = step(stages, micros)
    assert found.seconds == pytest.approx(3 * (micros + stages - 1))
    for stage in range(stages):
        assert found.idle(stage) == pytest.approx((stages - 1) / (micros + stages - 1))


@pytest.mark.parametrize("seed", range(6))
def test_without_shared_links_it_is_the_simulation_of_actions(seed):
    """Messages of a pair of stages in one direction, as `simulate` knows them; drawn lists, drawn costs."""
    rng = random.Random(seed)
    placement, micros = loop(rng.randint(2, 4), rng.randint(1, 2)), rng.randint(1, 6)
    lowered = lower(any_lists(placement, micros, rng), placement, micros)
    even = Costs.even(placement.num_positions, forward=1.0, input_gradient=1.25, weight_gradient=0.5)
    simulated = simulate(lowered, placement, even)
    parts = [[LayerSeconds(1.0, 1.75, 1.25, 0.5)]] * placement.num_positions
    found = plain_step(lowered, placement, parts, [NOTHING] * (placement.num_positions - 1))
    assert found.timeline.spans == simulated.timeline.spans


def test_a_message_delays_the_stage_that_needs_it():
    found = step(2, 1, messages=[Cost(0.25, 0.5)])
    assert found.seconds == pytest.approx(6 + 2 * 0.75)
    assert found.exposed_s(0) == {"down": pytest.approx(0.75 + 3.0 + 0.75)}


def exchange(key, rank, links, work=2.0, latency=0.0):
    return Exchange(key, f"lane {key}", (rank,), latency, work, links=links)


def run(*programs):
    lanes = Lanes(programs)
    lanes.run()
    return lanes.ends_s


def test_two_groups_on_one_link_have_half_of_it_each():
    one, other = exchange("a", 0, ("card",)), exchange("b", 1, ("card",))
    assert run([Begin(one), Await("a")], [Begin(other), Await("b")]) == [4.0, 4.0]
    elsewhere = exchange("b", 1, ("another card",))
    assert run([Begin(one), Await("a")], [Begin(elsewhere), Await("b")]) == [2.0, 2.0]


def test_who_comes_later_slows_down_the_first_only_from_then_on():
    """a alone until 1, both until 3 (a ends), b alone for its last second."""
    one, other = exchange("a", 0, ("card",)), exchange("b", 1, ("card",))
    assert run([Begin(one), Await("a")], [Compute(1.0), Begin(other), Await("b")]) == [3.0, 4.0]


def test_latency_is_not_shared():
    one, other = exchange("a", 0, ("card",), latency=1.0), exchange("b", 1, ("card",))
    assert run([Begin(one), Await("a")], [Begin(other), Await("b")]) == [4.0, 3.0]


def test_an_exchange_waits_for_its_lane_and_for_all_members():
    both = Exchange("x", "lane", (0, 1), 0.0, 1.0)
    first = Exchange("y", "lane", (0,), 0.0, 5.0)
    assert run([Begin(first), Begin(both), Await("x")], [Compute(2.0), Begin(both), Await("x")]) == [6.0, 6.0]


@pytest.mark.parametrize(("computing", "end"), [(0.0, 3.0), (1.0, 3.0), (5.0, 6.0)], ids=["at once", "early", "late"])
def test_what_does_not_overlap_is_work_of_each_member_that_waits(computing, end):
    """Two seconds of three run beside computing; who does not wait does not work for it."""
    shared = Exchange("x", "lane", (0, 1), *Cost(0.0, 3.0).with_overlap(2 / 3))
    lanes = Lanes([[Begin(shared), Compute(computing), Await("x")], [Begin(shared)]])
    lanes.run()
    assert lanes.ends_s == pytest.approx([end, 0.0])
    (waits,) = lanes.exposed
    assert waits.end_s - waits.start_s == pytest.approx(end - computing)


def test_a_program_that_waits_for_nobody_is_refused_by_name():
    lone = Exchange("x", "lane", (0, 1), 0.0, 1.0)
    with pytest.raises(PlanError, match="program 0 waits for x"):
        run([Begin(lone), Await("x")], [Compute(1.0)])

"""Simulated steps against hand-computed ones: what is hidden, what is exposed, and what two exchanges on one link take."""

from __future__ import annotations

import random

import pytest

from sley_core.actions.action import Action, Kind, loop
from sley_core.actions.costs import Costs
from sley_core.actions.lower import lower
from sley_core.actions.simulate import simulate
from sley_core.errors import PlanError
from sley_estimate.seconds.lanes import Lanes
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import NOTHING, Cost
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange
from sley_estimate.seconds.result import simulate_step
from sley_estimate.seconds.step import GradientExchange, StepWork
from sley_testing.lists import any_lists

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


def step(stages, micros, layers=1, **work):
    placement = loop(stages)
    lists = lower(one_f_one_b(stages, micros), placement, micros)
    messages = work.pop("messages", [NOTHING] * (stages - 1))
    return simulate_step(lists, placement, StepWork([[LAYER] * layers] * stages, messages, **work))


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
    work = StepWork(parts, [NOTHING] * (placement.num_positions - 1))
    found = simulate_step(lowered, placement, work)
    assert found.timeline.spans == simulated.timeline.spans


def test_a_message_delays_the_stage_that_needs_it():
    found = step(2, 1, messages=[Cost(0.25, 0.5)])
    assert found.seconds == pytest.approx(6 + 2 * 0.75)
    assert found.exposed_s(0) == {"down": pytest.approx(0.75 + 3.0 + 0.75)}


def test_a_reduction_hides_under_what_is_left_of_the_backward():
    """Of three layers, the last is complete first: its sum has two layers' backwards (4 s) to hide under."""
    hidden = step(1, 2, layers=3, gradients={0: [GradientExchange(Cost(0.5, 3.0), "ready", ((0, 2),))]})
    assert hidden.seconds == pytest.approx(2 * 9)
    assert hidden.exposed_s(0) == {}
    exposed = step(1, 2, layers=3, gradients={0: [GradientExchange(Cost(0.5, 4.5), "ready", ((0, 2),))]})
    assert exposed.seconds == pytest.approx(2 * 9 + 1)
    assert exposed.exposed_s(0) == {"reduce": pytest.approx(1.0)}
    assert exposed.timeline.idle(0) == exposed.idle(0) == pytest.approx(1 / 19), "behind the list too, as it is drawn"


def test_sums_that_start_at_the_end_are_exposed_whole_and_one_after_another():
    found = step(1, 2, gradients={0: [GradientExchange(Cost(0.5, 1.0))] * 2}, update_s={0: 0.25}, after_s=0.125)
    assert found.seconds == pytest.approx(6 + 3 + 0.375)


def test_stages_meet_in_the_norm():
    found = step(2, 1, gradients={1: [GradientExchange(Cost(0.0, 4.0))]}, together=Cost(0.5, 0.0), update_s={0: 1.0})
    assert found.seconds == pytest.approx(max(6.0, 4.0 + 4.0) + 0.5 + 1.0)


def test_weights_of_the_step_before_come_while_the_first_forward_runs():
    """Layer 1's weights need 1.5 s, of which layer 0's forward hides 1 s."""
    found = step(
        1, 2, layers=2, gradients={0: [GradientExchange(Cost(0.0, 1.5), "updated", ((0, 1),), lane="weights")]}
    )
    assert found.seconds == pytest.approx(2 * 6 + 0.5)
    assert found.exposed_s(0) == {"weights": pytest.approx(0.5)}


def test_a_sum_of_several_layers_waits_for_all_of_them():
    uses = ((0, 0), (0, 2))
    found = step(1, 2, layers=3, gradients={0: [GradientExchange(Cost(0.0, 1.0), "ready", uses)]})
    assert found.exposed_s(0) == {"reduce": pytest.approx(1.0)}


def test_a_tie_is_summed_by_the_stages_that_hold_it_behind_their_own_sums():
    tie = GradientExchange(Cost(0.0, 1.0), handler=1, lane="tie", members=(0, 1), key="tie")
    own = GradientExchange(Cost(0.0, 2.0), handler=0)
    found = step(2, 1, gradients={0: [tie, own], 1: [tie]})
    assert found.seconds == pytest.approx(6 + 2 + 1)


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

"""A search ranks by a formula and shows what layouts take by their own steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest

from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search import find as finding
from sley_estimate.search.choices import Choice, choices_of
from sley_estimate.search.find import ExactEstimate, exact, find, one_of_each_first, rank_layouts
from sley_estimate.search.layouts import Candidate, Layouts, Shape, Sizes
from sley_estimate.search.roofline import Roofline, Rough
from sley_estimate.seconds_of_plan import estimate_both
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan

MACHINE = machine_from_dict(small_machine())


def plan_of(**changes: Any) -> Plan:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(**{"data": data, "batch": {"global_size": 8, "micro_size": 1}, **changes}))


def space_of(plan: Plan, world: int = 2) -> Layouts:
    return Layouts(plan, world, choices_of(plan), ["offload", "sp", "wp", "micro_size"])


def test_what_is_shown_is_what_estimate_says() -> None:
    plan = plan_of()
    with patch.object(finding, "NUM_EXACT", 2):
        found = find(space_of(plan), MACHINE, top=2)
    for one in found.fastest:
        held, seconds = estimate_both(one.layout.plan(plan, 2), 2, MACHINE)
        assert isinstance(one.takes, ExactEstimate)
        assert one.takes.seconds == pytest.approx(seconds.step.seconds)
        assert one.takes.num_bytes == max(stage.peak for stage in held)
    assert found.fastest[0].takes.seconds <= found.fastest[1].takes.seconds


def test_more_layouts_take_their_steps_until_enough_fit() -> None:
    """Three at a time, of which none fits at first."""
    space = space_of(plan_of())
    called = []

    def some_fit(plan: Plan, *others: Any) -> ExactEstimate | None:
        called.append(plan)
        return exact(plan, *others) if len(called) > 4 else None

    told: list[tuple[int, int]] = []
    with (
        patch.object(finding, "NUM_EXACT", 3),
        patch.object(finding, "can_fork", lambda: False),
        patch.object(finding, "exact", some_fit),
    ):
        found = find(space, MACHINE, memory=1 << 40, top=1, tell=lambda *both: told.append(both))
    assert found.dropped == 4
    assert len(found.fastest) == 1
    assert found.num_exact == len(called) == 6
    assert told[:3] == [(1, 3), (2, 3), (3, 3)]


def test_the_budget_ends_the_steps_once_the_best_have_taken_theirs_and_one_fits() -> None:
    """Two take theirs whatever the budget is, and here a third, until one fits."""
    called = []

    def third_fits(plan: Plan, *others: Any) -> ExactEstimate | None:
        called.append(plan)
        return exact(plan, *others) if len(called) == 3 else None

    with (
        patch.object(finding, "LEAST_EXACT", 2),
        patch.object(finding, "NUM_EXACT", 5),
        patch.object(finding, "can_fork", lambda: False),
        patch.object(finding, "exact", third_fits),
    ):
        found = find(space_of(plan_of(), 4), MACHINE, memory=1 << 40, top=2, budget_s=0.0)
    assert found.num_exact == len(called) == 3
    assert found.not_begun >= 2
    assert len(found.fastest) == 1


def test_layouts_that_differ_in_what_can_hardly_matter_come_behind_the_others() -> None:
    """Two slices with micro-batches twice as large take as long; when to reduce cannot matter with one micro-batch."""
    keep, default, by_step = (Choice("core.keep", {}), Choice("mine.shards", {}), Choice("mine.shards", {"reduce": "step"}))

    def layout(sp: int, micro_size: int, weights: Choice) -> Candidate:
        return Candidate(Shape(Sizes(1, sp, 2, micro_size), keep, weights, None), None, None)

    space = space_of(plan_of(), 2)  # 8 samples per step: two ranks take 4 micro-batches of one
    sliced, own, stepped = layout(2, 2, default), layout(1, 1, default), layout(1, 1, by_step)
    whole, also_whole = layout(1, 4, default), layout(1, 4, by_step)
    best = [(own, Rough(1.0, 8.0)), (stepped, Rough(1.0, 8.0)), (sliced, Rough(1.005, 8.0)), (whole, Rough(2.0, 9.0))]
    best.append((also_whole, Rough(2.0, 9.0)))
    best.append((layout(2, 1, default), Rough(1.5, 4.0)))
    assert one_of_each_first(best, space) == [own, stepped, whole, layout(2, 1, default), sliced, also_whole]


def test_what_exceeds_the_memory_is_counted_and_the_smallest_is_named() -> None:
    ranking = rank_layouts(space_of(plan_of()), MACHINE, 1, 30, 5)
    assert ranking.too_large + sum(ranking.refused.values()) == ranking.num_layouts
    assert ranking.too_large > 1, "with core alone there are two sizes of micro-batches"
    assert not ranking.best
    assert ranking.smallest is not None


def test_slower_layouts_with_less_memory_are_ranked_too() -> None:
    ranking = rank_layouts(space_of(plan_of(), 4), MACHINE, None, 30, 1)
    (fastest, *_), front = ranking.best.values(), [*ranking.front.values()]
    sizes = [fastest.num_bytes, *(one.num_bytes for one in front)]
    assert all(other <= finding.LESS * one for one, other in pairwise(sizes))
    assert all(one.seconds <= finding.SLOWEST * fastest.seconds for one in front)


def test_the_formula_is_near_the_steps_of_a_layout() -> None:
    """What many small operators take beside layers is the greatest difference."""
    plan = plan_of(model__hidden=128, model__ffn_hidden=384)
    choices = choices_of(plan)
    roofline = Roofline(plan, 1, machine_from_dict(small_machine(device__launch_s=1e-9)), choices)
    for layout in Layouts(plan, 1, choices, ["offload", "micro_size"]).every():
        if layout.shape.activations.copies:
            continue
        takes = exact(layout.plan(plan, 1), 1, roofline.machine)
        assert takes is not None
        assert roofline.of(layout).seconds == pytest.approx(takes.seconds, rel=0.1), layout

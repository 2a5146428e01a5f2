"""A search tries what plugins name, ranks by a formula, and shows what layouts take by their own steps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from sley_core.errors import UsageError
from sley_core.hookspecs import hookimpl
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import ActivationPolicyRecord, GradientHandlerRecord, ScheduleRecord
from sley_core.table import Table
from sley_estimate.machine import machine_from_dict
from sley_estimate.search import find as finding
from sley_estimate.search.find import ExactEstimate, estimate_plan, order_by_variety, search_layouts
from sley_estimate.search.layouts import Choice, Layout, Layouts, list_choices
from sley_estimate.search.roofline import Roofline, RooflineEstimate
from sley_estimate.testing import small_machine
from sley_testing.plans import loader_of, small_plan


class Deep(Table):
    depth: int = 1


class Outsider:
    @hookimpl
    def sley_records(self):
        build = "sley_core.engine.call:keep"
        return [
            ActivationPolicyRecord(name="deep", config=Deep, build=build),
            ActivationPolicyRecord(name="silent", config=Deep, build=build),
            ScheduleRecord(name="own", config=Deep, build=build, ties=None),
        ]

    @hookimpl
    def sley_gradient_handlers(self):
        build = "sley_core.engine.handlers:GradientNorms"
        return [GradientHandlerRecord(name="watch", config=Deep, build=build, role="observer")]

    @hookimpl(optionalhook=True)
    def sley_estimate_hints(self):
        return {
            "out.deep": {"variants": [{}, {"depth": 3}]},
            "out.own": {"variants": [{"depth": 2}]},
            "out.watch": {"variants": [{}]},
        }


class Broken:
    @hookimpl
    def sley_records(self):
        raise RuntimeError("no")


DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 24}


def plan_with(plugins=None, **changes):
    return plan_from_dict(small_plan(data=DATA, **changes), loader=loader_of(plugins or {}))


def plan_of(**changes: Any) -> Plan:
    return plan_with(**{"batch": {"global_size": 8, "micro_size": 1}, **changes})


def test_what_a_plugin_names_is_offered_and_nothing_else():
    choices = list_choices(plan_with({"out": Outsider()}))
    assert [str(one) for one in choices.policies] == ["core.keep", "core.recompute", "out.deep", "out.deep (depth = 3)"]
    assert [str(one) for one in choices.reducers] == ["core.each"]
    assert [str(one) for one in choices.schedules] == ["out.own (depth = 2)"]
    assert choices.weights == choices.attention == ()


def test_the_plans_own_choice_comes_first_even_if_nothing_is_said_of_it():
    choices = list_choices(plan_with({"out": Outsider()}, activations={"use": "out.silent", "depth": 5}))
    assert choices.policies[0] == Choice("out.silent", {"depth": 5})
    assert Choice("out.deep", {}) in choices.policies


def test_a_broken_plugin_is_skipped_by_name():
    choices = list_choices(plan_with({"bad": Broken()}))
    assert len(choices.skipped) == 1
    assert choices.skipped[0].startswith("bad: ")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"out.gone": {}}, "names `out.gone`, which the plugin does not have"),
        ({"out.deep": {"speed": 3}}, "failed in `sley_estimate_hints`: TypeError: "),
    ],
)
def test_a_plugin_that_says_what_cannot_be_is_skipped_by_name(said, message):
    class Wrong(Outsider):
        @hookimpl(optionalhook=True)
        def sley_estimate_hints(self):
            return said

    choices = list_choices(plan_with({"out": Wrong()}))
    assert len(choices.skipped) == 1
    assert message in choices.skipped[0]
    assert "out.deep" not in map(str, choices.policies)


def test_sizes_divide_the_world_and_the_batch():
    plan = plan_with({"out": Outsider()}, batch={"global_size": 24, "micro_size": 3})
    found = list(Layouts(plan, 8, list_choices(plan)).all_layouts())
    assert {(one.pp, one.sp, one.wp) for one in found} == {(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1)}
    for one in found:
        dp = 8 // one.pp
        assert 24 % (dp * one.micro_size) == 0
        assert one.num_micro_batches(plan, 8) * one.micro_size * dp == 24


def test_an_axis_that_is_kept_has_the_plans_value():
    plan = plan_with({"out": Outsider()}, batch__micro_size=2)
    choices = list_choices(plan)
    layouts = list(Layouts(plan, 4, choices, keep=["pp", "micro_size", "activations"]).all_layouts())
    assert {layout[:4] for layout in layouts} == {(1, 1, 1, 2)}
    assert {layout.activations.name for layout in layouts} == {"core.keep"}
    with pytest.raises(UsageError, match="unknown axis `tp`"):
        Layouts(plan, 4, choices, keep=["tp"])


def test_a_layout_is_a_plan_that_check_accepts_and_keeps_what_the_user_wrote():
    handlers = [{"use": "core.each"}, {"use": "core.gradient_norms"}]
    plan = plan_with({"out": Outsider()}, gradient_handlers=handlers, parallel={"dp": 2, "reduction": "canonical"}, run__seed=5)
    space = Layouts(plan, 4, list_choices(plan), keep=["pp"])
    found = list(space.all_layouts())
    assert found
    for layout in found:
        made = layout.plan(plan, 4)
        assert check_plan(made, 4) == []
        assert made.parallel.dp == 4
        assert made.parallel.reduction == "canonical"
        assert made.run.seed == 5
        assert [one.name for one in made.gradient_handlers] == ["core.each", "core.gradient_norms"]


MACHINE = machine_from_dict(small_machine())
FITS = ExactEstimate(1.0, 1, frozenset())


def space_of(plan: Plan, world: int = 2) -> Layouts:
    return Layouts(plan, world, list_choices(plan), ["offload", "sp", "wp", "micro_size"])


def test_more_layouts_take_their_steps_until_enough_fit() -> None:
    """Three at a time, of which none fits at first."""
    space = space_of(plan_of())
    called = []

    def some_fit(plan: Plan, *_: Any) -> ExactEstimate | None:
        called.append(plan)
        return FITS if len(called) > 4 else None

    told: list[tuple[int, int]] = []
    with (
        patch.object(finding, "NUM_EXACT", 3),
        patch.object(finding, "can_fork", lambda: False),
        patch.object(finding, "estimate_plan", some_fit),
    ):
        found = search_layouts(space, MACHINE, memory=1 << 40, top=1, report_progress=lambda *both: told.append(both))
    assert found.dropped == 4
    assert len(found.fastest) == 1
    assert found.num_exact == len(called) == 6
    assert told[:3] == [(1, 3), (2, 3), (3, 3)]


def test_the_budget_ends_the_steps_once_the_best_have_taken_theirs_and_one_fits() -> None:
    """Two take theirs whatever the budget is, and here a third, until one fits."""
    called = []

    def third_fits(plan: Plan, *_: Any) -> ExactEstimate | None:
        called.append(plan)
        return FITS if len(called) == 3 else None

    with (
        patch.object(finding, "MIN_EXACT", 2),
        patch.object(finding, "NUM_EXACT", 5),
        patch.object(finding, "can_fork", lambda: False),
        patch.object(finding, "estimate_plan", third_fits),
    ):
        found = search_layouts(space_of(plan_of(), 4), MACHINE, memory=1 << 40, top=2, budget_s=0.0)
    assert found.num_exact == len(called) == 3
    assert found.not_begun >= 2
    assert len(found.fastest) == 1


def test_layouts_that_differ_in_what_can_hardly_matter_come_behind_the_others() -> None:
    """Two slices with microbatches twice as large take as long; when to reduce cannot matter with one microbatch."""
    keep, default, by_step = (Choice("core.keep", {}), Choice("mine.shards", {}), Choice("mine.shards", {"reduce": "step"}))

    def layout(sp: int, micro_size: int, weights: Choice) -> Layout:
        return Layout(1, sp, 2, micro_size, None, keep, None, weights)

    space = space_of(plan_of(), 2)  # 8 samples per step: two ranks take 4 microbatches of one
    sliced, own, stepped = layout(2, 2, default), layout(1, 1, default), layout(1, 1, by_step)
    whole, also_whole = layout(1, 4, default), layout(1, 4, by_step)
    best = [
        (own, RooflineEstimate(1.0, 8.0)),
        (stepped, RooflineEstimate(1.0, 8.0)),
        (sliced, RooflineEstimate(1.005, 8.0)),
        (whole, RooflineEstimate(2.0, 9.0)),
    ]
    best.append((also_whole, RooflineEstimate(2.0, 9.0)))
    best.append((layout(2, 1, default), RooflineEstimate(1.5, 4.0)))
    assert order_by_variety(best, space) == [own, stepped, whole, layout(2, 1, default), sliced, also_whole]


def test_the_formula_is_near_the_steps_of_a_layout() -> None:
    """What many small operators take beside layers is the greatest difference."""
    plan = plan_of(model__hidden=128, model__ffn_hidden=384)
    choices = list_choices(plan)
    roofline = Roofline(plan, 1, machine_from_dict(small_machine(device__launch_s=1e-9)), choices)
    for layout in Layouts(plan, 1, choices, ["offload", "micro_size"]).all_layouts():
        if layout.activations.copies:
            continue
        takes = estimate_plan(layout.plan(plan, 1), 1, roofline.machine)
        assert takes is not None
        assert roofline.estimate(layout).seconds == pytest.approx(takes.seconds, rel=0.1), layout

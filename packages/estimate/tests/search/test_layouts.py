"""Layouts come from the plan and from what installed plugins say to searches, an outsider's too."""

from __future__ import annotations

import pytest

from sley_core.errors import UsageError
from sley_core.hookspecs import hookimpl
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict, with_tables
from sley_core.records import ActivationPolicyRecord, GradientHandlerRecord, ScheduleRecord
from sley_core.table import Table
from sley_estimate.search.choices import Choice, choices_of
from sley_estimate.search.layouts import Layouts, Sizes, divisors
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


def test_what_a_plugin_names_is_offered_and_nothing_else():
    choices = choices_of(plan_with({"out": Outsider()}))
    assert [str(one) for one in choices.policies] == ["core.keep", "core.recompute", "out.deep", "out.deep (depth = 3)"]
    assert [str(one) for one in choices.reducers] == ["core.each"]
    assert [str(one) for one in choices.schedules] == ["out.own (depth = 2)"]
    assert choices.weights == choices.attention == ()


def test_the_plans_own_choice_comes_first_even_if_nothing_is_said_of_it():
    choices = choices_of(plan_with({"out": Outsider()}, activations={"use": "out.silent", "depth": 5}))
    assert choices.policies[0] == Choice("out.silent", {"depth": 5})
    assert Choice("out.deep", {}) in choices.policies


def test_a_variant_that_is_no_table_of_its_record_is_skipped_by_name():
    class Wrong:
        @hookimpl
        def sley_records(self):
            build = "sley_core.engine.call:keep"
            return [ActivationPolicyRecord(name="w", config=Deep, build=build)]

        @hookimpl(optionalhook=True)
        def sley_estimate_hints(self):
            return {"bad.w": {"variants": [{"dept": 1}, {"depth": 2}]}}

    choices = choices_of(plan_with({"bad": Wrong()}))
    assert Choice("bad.w", {"depth": 2}) in choices.policies
    assert len(choices.skipped) == 1
    assert choices.skipped[0].startswith("bad.w: its variant {'dept': 1} is no table of it")


def test_a_broken_plugin_is_skipped_by_name():
    choices = choices_of(plan_with({"bad": Broken()}))
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

    choices = choices_of(plan_with({"out": Wrong()}))
    assert len(choices.skipped) == 1
    assert message in choices.skipped[0]
    assert "out.deep" not in map(str, choices.policies)


def test_sizes_divide_the_world_and_the_batch():
    plan = plan_with({"out": Outsider()}, batch={"global_size": 24, "micro_size": 3})
    found = list(Layouts(plan, 8, choices_of(plan)).sizes())
    assert {(one.pp, one.sp, one.wp) for one in found} == {(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1)}
    for one in found:
        dp = 8 // one.pp
        assert 24 % (dp * one.micro_size) == 0
        assert one.micros(plan, 8) * one.micro_size * dp == 24


def test_an_axis_that_is_kept_has_the_plans_value():
    plan = plan_with({"out": Outsider()}, batch__micro_size=2)
    choices = choices_of(plan)
    found = list(Layouts(plan, 4, choices, keep=["pp", "micro_size", "activations"]).shapes())
    assert {one.sizes for one in found} == {Sizes(1, 1, 1, 2)}
    assert {one.activations.name for one in found} == {"core.keep"}
    with pytest.raises(UsageError, match="no axis `tp`"):
        Layouts(plan, 4, choices, keep=["tp"])


def test_a_layout_is_a_plan_that_check_accepts_and_keeps_what_the_user_wrote():
    handlers = [{"use": "core.each"}, {"use": "core.gradient_norms"}]
    plan = plan_with({"out": Outsider()}, gradient_handlers=handlers, parallel={"dp": 2, "reduction": "canonical"}, run__seed=5)
    space = Layouts(plan, 4, choices_of(plan), keep=["pp"])
    found = list(space.every())
    assert found
    for layout in found:
        made = layout.plan(plan, 4)
        assert check_plan(made, 4) == []
        assert made.parallel.dp == 4
        assert made.parallel.reduction == "canonical"
        assert made.run.seed == 5
        assert [one.name for one in made.gradient_handlers] == ["core.each", "core.gradient_norms"]


def test_tables_are_replaced_whole_and_none_removes_one():
    plan = plan_with(activations={"use": "core.recompute"})
    assert with_tables(plan, {"activations": None}).activations.name == "core.keep"
    assert with_tables(plan, {"evaluation": {"every": 2}}).evaluation.every == 2
    assert plan.activations.name == "core.recompute"


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(12, 4) == [1, 2, 3, 4]
    assert divisors(1) == [1]

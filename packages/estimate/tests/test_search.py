"""Tests searches: the choices of plugins, the list of layouts, the formula, and the verification of the best layouts."""

from types import SimpleNamespace
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
from sley_estimate.bytes.fake_tensors import StageTooLargeError
from sley_estimate.machine import machine_from_dict
from sley_estimate.search import find as finding
from sley_estimate.search.find import Roofline, RooflineEstimate, order_by_variety, search_layouts
from sley_estimate.search.layouts import Choice, Layout, Layouts, list_choices
from sley_estimate.step.estimate import estimate_plan
from sley_estimate.testing import small_machine
from sley_testing.plans import loader_of, small_plan


class Deep(Table):
    depth: int = 1


class Outsider:
    @hookimpl
    def sley_records(self):
        build = "sley_core.engine.call:build_keep"
        return [
            ActivationPolicyRecord(name="deep", config=Deep, build=build),
            ActivationPolicyRecord(name="silent", config=Deep, build=build),
            ScheduleRecord(name="own", config=Deep, build=build, ties=None),
            GradientHandlerRecord(name="watch", config=Deep, build=build, role="observer"),
        ]

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


def test_choices_come_from_hints():
    choices = list_choices(plan_with({"out": Outsider()}))
    assert [str(choice) for choice in choices.policies] == ["core.keep", "core.recompute", "out.deep", "out.deep (depth = 3)"]
    assert [str(choice) for choice in choices.reducers] == ["core.each"]
    assert [str(choice) for choice in choices.schedules] == ["out.own (depth = 2)"]
    assert choices.weights == choices.attention == ()


def test_choice_of_plan_comes_first_without_hint_and_a_failing_plugin_is_skipped():
    choices = list_choices(plan_with({"out": Outsider(), "bad": Broken()}, activations={"use": "out.silent", "depth": 5}))
    assert choices.policies[0] == Choice("out.silent", {"depth": 5})
    assert Choice("out.deep", {}) in choices.policies
    assert [reason.partition(":")[0] for reason in choices.skip_reasons] == ["bad"]


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"out.gone": {}}, "names `out.gone`, which the plugin does not have"),
        ({"out.deep": {"speed": 3}}, "failed in `sley_estimate_hints`: TypeError: "),
    ],
)
def test_plugin_with_invalid_hints_is_skipped(hints, message):
    class Wrong(Outsider):
        @hookimpl(optionalhook=True)
        def sley_estimate_hints(self):
            return hints

    choices = list_choices(plan_with({"out": Wrong()}))
    (reason,) = choices.skip_reasons
    assert message in reason
    assert "out.deep" not in map(str, choices.policies)


def test_sizes_divide_world_and_batch_or_are_those_of_the_plan():
    plan = plan_with({"out": Outsider()}, batch={"global_size": 24, "micro_size": 3})
    layouts = list(Layouts(plan, 8, list_choices(plan)).all_layouts())
    assert {(layout.pp, layout.sp, layout.wp) for layout in layouts} == {(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1)}
    for layout in layouts:
        dp = 8 // layout.pp
        assert 24 % (dp * layout.micro_size) == 0
        assert layout.num_microbatches(plan, 8) * layout.micro_size * dp == 24
    choices = list_choices(plan)
    layouts = list(Layouts(plan, 4, choices, keep_axes=["pp", "micro_size", "activations"]).all_layouts())
    assert {layout[:4] for layout in layouts} == {(1, 1, 1, 3)}
    assert {layout.activations.name for layout in layouts} == {"core.keep"}
    with pytest.raises(UsageError, match="unknown axis `tp`"):
        Layouts(plan, 4, choices, keep_axes=["tp"])


def test_layouts_are_valid_plans_with_other_tables_unchanged():
    handlers = [{"use": "core.each"}, {"use": "core.gradient_norms"}]
    plan = plan_with({"out": Outsider()}, gradient_handlers=handlers, parallel={"dp": 2, "reduction": "canonical"}, run__seed=5)
    space = Layouts(plan, 4, list_choices(plan), keep_axes=["pp"])
    plans = [layout.apply(plan, 4) for layout in space.all_layouts()]
    assert plans
    for layout_plan in plans:
        assert check_plan(layout_plan, 4) == []
        assert (layout_plan.parallel.dp, layout_plan.parallel.reduction, layout_plan.run.seed) == (4, "canonical", 5)
        assert [handler.name for handler in layout_plan.gradient_handlers] == ["core.each", "core.gradient_norms"]


MACHINE = machine_from_dict(small_machine())


def layouts_of_two_ranks() -> Layouts:
    """Returns the layouts of a plan of 8 samples per step."""
    plan = plan_from_dict(small_plan(data=DATA, batch={"global_size": 8, "micro_size": 1}))
    return Layouts(plan, 2, list_choices(plan), ["sp", "wp", "micro_size"])


def test_more_layouts_are_verified_until_enough_fit() -> None:
    """The fifth layout is the first to fit, so the second round of three is the last."""
    verified_plans = []

    def estimate(plan: Plan, *_: Any, **__: Any) -> Any:
        verified_plans.append(plan)
        if len(verified_plans) <= 4:
            raise StageTooLargeError(1 << 50)
        return SimpleNamespace(step=SimpleNamespace(seconds=1.0), layers=[], stage_bytes=[SimpleNamespace(peak=1024)])

    progress: list[tuple[int, int]] = []
    with patch.object(finding, "NUM_VERIFIED", 3), patch.object(finding, "estimate_plan", estimate):
        space, report_progress = layouts_of_two_ranks(), lambda done, total: progress.append((done, total))
        result = search_layouts(space, MACHINE, max_bytes=1 << 40, top=1, report_progress=report_progress)
    assert result.num_dropped == 4
    assert len(result.fastest_layouts) == 1
    assert result.num_verified == len(verified_plans) == 6
    assert progress[:4] == [(1, 3), (2, 3), (3, 3), (4, 6)]


def test_nearly_equal_layouts_come_last() -> None:
    """Two slices of twice as large microbatches take as long. The time of the reduction does not matter with one microbatch."""
    keep, default, by_step = (Choice("core.keep", {}), Choice("mine.shards", {}), Choice("mine.shards", {"reduce": "step"}))

    def layout(sp: int, micro_size: int, weights: Choice) -> Layout:
        return Layout(1, sp, 2, micro_size, None, keep, None, weights)

    sliced, first, stepped = layout(2, 2, default), layout(1, 1, default), layout(1, 1, by_step)
    full, similar, small = layout(1, 4, default), layout(1, 4, by_step), layout(2, 1, default)
    costs = [(1.0, 8.0), (1.0, 8.0), (1.005, 8.0), (2.0, 9.0), (2.0, 9.0), (1.5, 4.0)]
    best = list(zip([first, stepped, sliced, full, similar, small], map(RooflineEstimate._make, costs), strict=True))
    assert order_by_variety(best, layouts_of_two_ranks()) == [first, stepped, full, small, sliced, similar]


def test_formula_is_close_to_verified_seconds() -> None:
    """The many small operators outside layers cause most of the difference."""
    plan = plan_with(batch={"global_size": 2, "micro_size": 1}, model__hidden=128, model__ffn_hidden=384)
    choices = list_choices(plan)
    roofline = Roofline(plan, 1, machine_from_dict(small_machine(device__launch_s=1e-9)), choices)
    for layout in Layouts(plan, 1, choices, ["micro_size"]).all_layouts():
        if layout.activations.offloads_activations:
            continue
        exact = estimate_plan(layout.apply(plan, 1), 1, roofline.machine)
        assert roofline.estimate(layout).seconds == pytest.approx(exact.step.seconds, rel=0.1), layout

"""What a pipeline's plan takes beside its schedule where it does not say: what the schedule's record names, or the only one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sley_core.errors import SleyError
from sley_core.hookspecs import hookimpl
from sley_core.plan.document import Origin
from sley_core.plan.load import plan_from_text
from sley_core.plan.plan import Plan
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_core.table import Table
from sley_testing.plans import loader_of

Make = Callable[..., Plan]


def plugin(links: int = 0, partitions: int = 0, **schedule: str | None) -> Any:
    """A plugin with a schedule `s`, stage links `l0`, `l1`, ..., partitioners `p0`, ... and a handler of ties `t`."""

    @hookimpl
    def sley_records() -> list[Record]:
        return [
            ScheduleRecord(name="s", config=Table, build="nowhere:s", **schedule),
            *(StageLinkRecord(name=f"l{at}", config=Table, build="nowhere:l") for at in range(links)),
            *(PartitionerRecord(name=f"p{at}", config=Table, build="nowhere:p") for at in range(partitions)),
        ]

    @hookimpl
    def sley_gradient_handlers() -> list[GradientHandlerRecord]:
        return [GradientHandlerRecord(name="t", config=Table, build="nowhere:t", role="tie")]

    return SimpleNamespace(sley_records=sley_records, sley_gradient_handlers=sley_gradient_handlers)


@pytest.fixture
def resolved(text: str) -> Make:
    """`resolved(more, stages=2, mine=plugin(), ...)`: the small plan in two stages, with these plugins and no others."""

    def resolved(more: str = "", stages: int = 2, **plugins: Any) -> Plan:
        tables = f'dp = 2\npp = {stages}\n\n[pipeline]\nuse = "mine.s"\n{more}'
        return plan_from_text(text.replace("dp = 2\n", tables), loader=loader_of(plugins))

    return resolved


def refused(resolved: Make, *arguments: Any, **plugins: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(SleyError) as caught:
        resolved(*arguments, **plugins)
    return [(found.code, found.message, found.hint or "") for found in caught.value.diagnostics]


def test_the_schedule_s_record_says_what_is_taken(resolved: Make) -> None:
    mine = plugin(2, 2, link="mine.l1", partition="other.p0", ties="mine.t")
    plan = resolved(mine=mine, other=plugin(1, 1))
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("mine.l1", "other.p0")
    assert [handler.name for handler in plan.gradient_handlers] == ["core.each", "mine.t"]
    named = (("link", "use"), ("partition", "use"), ("gradient_handlers", 1, "use"))
    assert [plan.origins[path] for path in named] == [Origin("record", named_by="mine.s")] * 3
    assert str(plan.origins["link", "use"]) == "mine.s"
    assert plan.origins["gradient_handlers", 0, "use"] == Origin("core")
    assert list(plan.plugins) == ["core", "models", "data", "mine", "other"]


def test_the_plan_has_the_last_word(resolved: Make) -> None:
    mine = plugin(2, 2, link="mine.l1", partition="mine.p1", ties="mine.t")
    plan = resolved('[link]\nuse = "mine.l0"\n[partition]\nuse = "mine.p0"\n', mine=mine)
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("mine.l0", "mine.p0")


def test_a_schedule_may_leave_it_to_the_only_ones_of_the_plan_s_plugins(resolved: Make) -> None:
    """Of the schedule's own, and of any other plugin that the plan names, before or behind it."""
    plan = resolved(mine=plugin(1, 1))
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("mine.l0", "mine.p0")
    assert [handler.name for handler in plan.gradient_handlers] == ["core.each"]
    plan = resolved('[partition]\nuse = "other.p1"\n', mine=plugin(), other=plugin(1, 2))
    assert plan.link is not None
    assert plan.link.name == "other.l0"
    plan = resolved('[link]\nuse = "other.l1"\n', mine=plugin(), other=plugin(2, 1))
    assert plan.partition is not None
    assert plan.partition.name == "other.p0"


def test_a_plan_with_its_defaults_written_in_is_the_same_plan(resolved: Make) -> None:
    plugins = {"mine": plugin(1, 1, ties="mine.t")}
    plan = resolved(**plugins)
    assert plan_from_text(plan.to_toml(), loader=loader_of(plugins)) == plan


def test_what_nobody_decides_is_missing_by_name(resolved: Make) -> None:
    """Plugins that the plan does not name are not looked at."""
    (partition, link) = refused(resolved, mine=plugin(), other=plugin(1, 1))
    assert partition[:2] == (
        "missing-table",
        "the plan needs a table [partition] with `use`: `mine.s` names no partitioner, and the plan's plugins have none",
    )
    assert "the plan needs a table [link] with `use`: `mine.s` names no stage link" in link[1]
    assert '`use = "pp.link"` of sley-pp, or with a stage link of another plugin; install sley-pp' in link[2]
    (link,) = refused(resolved, mine=plugin(2, 1))
    assert link[1].endswith("and the plan's plugins have `mine.l0`, `mine.l1`")
    assert link[2] == "name one of them"


def test_one_stage_sends_nothing(resolved: Make) -> None:
    assert resolved(stages=1, mine=plugin(0, 1)).link is None


@pytest.mark.parametrize("key", ["link", "partition", "ties"])
def test_a_default_of_a_plugin_that_is_not_there_is_said_where_the_schedule_stands(resolved: Make, key: str) -> None:
    mine = plugin(1, 1, **{key: "pp.it"})
    assert refused(resolved, mine=mine)[0][:2] == ("plugin-missing", "`mine.s` names `pp.it`: plugin `pp` is not installed")
    (found,) = refused(resolved, mine=mine, pp=plugin())
    assert found[0] == "unknown-record"
    assert found[1].startswith("`mine.s` names `pp.it`: plugin `pp` (given 0) has no ")
    (found,) = refused(resolved, mine=plugin(1, 1, **{key: "it"}))
    assert found[0] == "plugin-invalid"
    assert f"gives `s` the {key} `it`, which is no record's name" in found[1]


def test_a_broken_schedule_is_the_only_thing_to_mend(resolved: Make) -> None:
    (found,) = refused(resolved, mine=SimpleNamespace())
    assert found[0] == "unknown-record"


def test_tables_of_a_pipeline_mean_nothing_without_one(text: str) -> None:
    with pytest.raises(SleyError, match=r"\[link\] means nothing without \[pipeline\]"):
        plan_from_text(text + '\n[link]\nuse = "mine.l0"\n', loader=loader_of({"mine": plugin(1)}))

"""Tables to which a plan gives names, `[pools.NAME]`: who names one is given it, and a name that leads nowhere is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import PlanError, PluginError
from sley_core.plan.load import plan_from_text
from sley_core.plan.plan import Plan
from sley_core.table import Positive, Table

Tables = dict[str, Any]
MakePlan = Callable[..., Plan]


class Sized(Table):
    """A pool with a key."""

    size: Positive = 8
    """A key."""


def borrower(name: str) -> Tables:
    return {"scheduler_hooks": [{"use": "handlers.borrower", "pool": name}]}


def code(caught: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str, str | None]]:
    return [(found.code, found.message, found.hint) for found in caught.value.diagnostics]


def test_a_named_pool_resolves_and_is_written_and_read_again(make: MakePlan, tmp_path: Path) -> None:
    plan = make(**borrower("shared"), pools={"shared": {"use": "pools.arena"}})
    assert {name: one.name for name, one in plan.pools.items()} == {"shared": "pools.arena"}
    assert list(plan.plugins) == ["core", "models", "data", "handlers", "pools"]
    assert '[pools.shared]\nuse = "pools.arena"\n' in plan.to_toml()
    again = plan_from_text(plan.to_toml(), loader=plan.loader)
    assert again == plan
    assert again.digest == plan.digest != make(**borrower("pools.arena")).digest


def test_a_plan_without_such_tables_has_none(make: MakePlan) -> None:
    assert make().pools == {}
    assert "pools" not in make().tables


def test_options_of_a_named_pool_are_checked_and_set(make: MakePlan) -> None:
    with pytest.raises(PlanError) as caught:
        make(**borrower("shared"), pools={"shared": {"use": "pools.arena", "size": 3}})
    assert code(caught) == [("unknown-key", "`size` is not a key of `pools.arena`", "it has no keys")]
    with pytest.raises(PlanError, match="missing-key"):
        make(**borrower("shared"), pools={"shared": {}})


def test_a_name_that_no_table_has_is_an_error_with_the_closest(make: MakePlan) -> None:
    with pytest.raises(PlanError) as caught:
        make(**borrower("shraed"), pools={"shared": {"use": "pools.arena"}})
    assert code(caught) == [("unknown-name", "the plan has no table [pools.shraed]", "did you mean `shared`?")]
    assert caught.value.diagnostics[0].path == ("scheduler_hooks", 0, "pool")
    with pytest.raises(PlanError) as caught:
        make(**borrower("shared"))
    hint = 'add it with `use`, or name a memory pool as "plugin.record"'
    assert code(caught) == [("unknown-name", "the plan has no table [pools.shared]", hint)]


def test_a_table_that_nobody_names_is_an_error(make: MakePlan) -> None:
    with pytest.raises(PlanError) as caught:
        make(pools={"spare": {"use": "pools.arena"}})
    assert [found[0] for found in code(caught)] == ["table-without-effect"]


@pytest.mark.parametrize(
    ("pools", "wrong"),
    [
        ({"a.b": {"use": "pools.arena"}}, "wrong-name"),
        ({"1": {"use": "pools.arena"}}, "wrong-name"),
        ([{"use": "pools.arena"}], "wrong-type"),
        ({"shared": "pools.arena"}, "wrong-type"),
        ({"use": "pools.arena"}, "wrong-type"),
        ({"shared": {"use": "pools.arean"}}, "unknown-record"),
    ],
)
def test_what_is_no_name_or_no_table_is_an_error(make: MakePlan, pools: Any, wrong: str) -> None:
    with pytest.raises(PlanError) as caught:
        make(**borrower("shared" if "shared" in pools else "pools.arena"), pools=pools)
    assert [found[0] for found in code(caught)] == [wrong]


def test_a_plugin_that_is_not_there_is_named(make: MakePlan) -> None:
    with pytest.raises(PluginError, match="there is no plugin `nobody`"):
        make(**borrower("shared"), pools={"shared": {"use": "nobody.arena"}})

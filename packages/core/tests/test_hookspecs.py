"""The hooks are documented in one form, and docs/hooks.md is what they say."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference_pages

from sley_core import hookspecs, records
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.config import JsonlConfig
from sley_core.errors import PluginError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.run import Run
from sley_core.topology import Topology
from sley_testing.plans import loader_of, small_plan

PAGE = Path(__file__).parents[3] / "docs" / "hooks.md"
HOOKS = [name for name in vars(hookspecs) if name.startswith("sley_")]
JSONL = "sley_core.metrics.jsonl:JsonlWriter"
NOTIFICATIONS = {"sley_run_started", "sley_step_finished", "sley_run_finished"}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_the_fixed_lines_and_its_example_implements_it(name: str) -> None:
    function = getattr(hookspecs, name)
    text = reference_pages.read_hook(name, function)
    assert text.lines["Since"].startswith("core ")
    assert text.lines["May communicate"].split(",")[0] in ("yes", "no")
    tree = ast.parse(text.lines["Example"])
    (implementation,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert implementation.name == name
    assert [ast.unparse(decorator) for decorator in implementation.decorator_list] == ["hookimpl"]
    assert {argument.arg for argument in implementation.args.args} <= set(inspect.signature(function).parameters)


class Everything:
    """Implements the hooks that are given something, and writes down which were called with what they promise."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @hookimpl
    def sley_process_groups(self, plan: Any, topology: Any) -> Any:
        assert isinstance(plan, Plan), plan
        assert topology == Topology.of(1)
        self.called.append("sley_process_groups")
        return [records.ProcessGroupRecord("own", ((0,),))]

    @hookimpl
    def sley_check_plan(self, plan: Any, topology: Any) -> Any:
        assert isinstance(plan, Plan), plan
        assert topology == Topology.of(1)
        self.called.append("sley_check_plan")
        yield from ()

    @hookimpl
    def sley_run_started(self, run: Any) -> None:
        assert isinstance(run, Run), run
        assert run.num_steps_done == 0
        assert run.groups["own"].size == 1
        self.called.append("sley_run_started")

    @hookimpl
    def sley_step_finished(self, run: Any, row: Any) -> None:
        assert (run.num_steps_done, row["step"]) == (1, 1)
        self.called.append("sley_step_finished")

    @hookimpl
    def sley_run_finished(self, run: Any, outcome: Any) -> None:
        assert (run.num_steps_done, outcome) == (1, "finished")
        self.called.append("sley_run_finished")


def everything(told: Everything) -> SimpleNamespace:
    """A plugin with an implementation of every hook that there is."""

    def of_records(name: str) -> Any:
        def implementation() -> Any:
            told.called.append(name)
            if name == "sley_records":  # by which the plan names this plugin
                return [records.MetricsWriterRecord(name="writer", config=JsonlConfig, build=JSONL)]
            return []

        implementation.__name__ = name
        return hookimpl(implementation)

    return SimpleNamespace(**{name: getattr(told, name, None) or of_records(name) for name in HOOKS})


def test_every_hook_is_called_with_what_it_promises(texts: Path) -> None:
    """A hook that nothing calls, or calls with something else, promises in vain."""
    tables = small_plan(run__steps=1, metrics=[{"use": "all.writer"}])
    told = Everything()
    plan = plan_from_dict(tables, texts, loader=loader_of({"all": everything(told)}))
    with assemble(plan, World.alone("cpu")) as run:
        assert run.train() == "finished"
    assert set(HOOKS) - set(told.called) == set()
    for name in ("sley_process_groups", *NOTIFICATIONS):
        assert told.called.count(name) == 1, name


def test_a_hook_whose_mark_was_forgotten_is_refused() -> None:
    """pluggy would pass it over, and the plan would run without its check."""
    plugin = everything(Everything())
    plugin.sley_check_plan = lambda plan: ()
    with pytest.raises(PluginError) as caught:
        loader_of({"all": plugin}).load("all")
    (found,) = caught.value.diagnostics
    assert found.code == "plugin-hook"
    assert found.message.endswith("its `sley_check_plan` would never be called, because it is not marked as a hook")
    assert found.hint == "add `@hookimpl` of `sley_core.hookspecs` above the function"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of the sdist")
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == reference_pages.hooks_page(), "run `python .ci/reference_pages.py hooks > docs/hooks.md`"

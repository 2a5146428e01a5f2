"""What a plugin's hooks may return, and whose fault it is where they fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sley_core import records
from sley_core.errors import EXIT_PLUGIN, Diagnostic, PluginError
from sley_core.hookspecs import hookimpl
from sley_core.plan.loader import Loader, is_of_surroundings
from sley_core.table import Table


def fault_of(name: str, loader: Loader | None = None) -> Diagnostic:
    with pytest.raises(PluginError) as caught:
        (loader or Loader()).load(name)
    assert caught.value.exit_code == EXIT_PLUGIN
    assert len(caught.value.diagnostics) == 1
    return caught.value.diagnostics[0]


def module_with(returned: Any) -> Any:
    """A plugin whose hook `sley_records` returns, or raises, what is given."""

    class Plugin:
        @hookimpl
        def sley_records(self) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    return Plugin()


def pool(name: str = "arena", config: Any = Table) -> records.MemoryPoolRecord:
    return records.MemoryPoolRecord(name=name, config=config, build="nowhere:Arena")


class Greedy(Table):
    use: str


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (RuntimeError("no luck"), "failed in `sley_records`: RuntimeError: no luck"),
        (3, "failed in `sley_records`: TypeError"),
        ([3], "returns a int, not a Record"),
        ([pool(), pool()], "two records of the name `arena`"),
        ([pool("a.b")], "has the name `a.b`, which is none"),
        ([pool(config=dict)], "a config that is no subclass of Table"),
        ([pool(config=Greedy)], "a config with the key `use`"),
    ],
)
def test_records_that_are_none(returned: Any, words: str) -> None:
    found = fault_of("zeta", Loader(plugins={"zeta": module_with(returned)}))
    assert found.code == "plugin-invalid"
    assert words in found.message


def test_a_hook_of_one_kind_returns_no_other() -> None:
    class Plugin:
        @hookimpl
        def sley_gradient_handlers(self) -> Any:
            return [pool()]

    found = fault_of("zeta", Loader(plugins={"zeta": Plugin()}))
    assert "`sley_gradient_handlers` returns a MemoryPoolRecord, not a GradientHandlerRecord" in found.message


def test_a_record_must_have_its_kinds_base() -> None:
    class Plugin:
        @hookimpl
        def sley_records(self) -> Any:
            return [records.OptimizerRecord(name="own", config=Table, build="")]

    found = fault_of("zeta", Loader(plugins={"zeta": Plugin()}))
    assert "no subclass of OptimizerConfig" in found.message


def test_a_partitioner_that_wants_seconds_has_a_place_for_them() -> None:
    class Plugin:
        @hookimpl
        def sley_records(self) -> Any:
            return [records.PartitionerRecord(name="own", config=Table, build="", timer="own:time")]

    found = fault_of("zeta", Loader(plugins={"zeta": Plugin()}))
    assert "a config without the key `layer_costs`" in found.message


def test_a_hook_that_fails_names_the_plugin() -> None:
    class Plugin:
        @hookimpl
        def sley_check_plan(self, plan: Any) -> Any:
            yield plan.nothing_like_this

    plugin = Loader(plugins={"zeta": Plugin()}).load("zeta")
    with pytest.raises(PluginError, match=r"plugin `zeta` .* failed in `sley_check_plan`: AttributeError"):
        plugin.call("sley_check_plan", plan=SimpleNamespace(), topology=None)
    assert plugin.call("sley_run_started", run=None) == []


@pytest.mark.parametrize(
    ("error", "is_theirs"),
    [
        (MemoryError(), False),
        (ImportError("libtorch.so: failed to map segment: Cannot allocate memory"), False),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), False),
        (FileExistsError(17, "File exists", "/tmp/torchinductor_me"), False),
        (ModuleNotFoundError("No module named 'odd'", name="odd"), True),
        (AttributeError("no `Model`"), True),
    ],
)
def test_a_plugin_is_not_to_blame_for_its_surroundings(error: Exception, is_theirs: bool) -> None:
    """To install it again would not help."""
    assert is_of_surroundings(error) is not is_theirs

"""The loader imports what a plan names and nothing else, and each way in which a plugin can fail has its own error.

The distributions are folders with a `.dist-info` on `sys.path`, as pip leaves them.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sley_core import records
from sley_core.errors import EXIT_PLAN_INVALID, EXIT_PLUGIN, Diagnostic, PlanError, PluginError, is_installed
from sley_core.hookspecs import hookimpl
from sley_core.plan.loader import PluginLoader, find_plugins
from sley_core.table import Table

GOOD = """
from sley_core.hookspecs import hookimpl
from sley_core.table import Table
from sley_core.records import GradientHandlerRecord

@hookimpl
def sley_gradient_handlers():
    return [GradientHandlerRecord(name="topk", config=Table, build="{module}_live:TopK", role="reducer")]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one plugin on `sys.path`."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, source: str = GOOD, *, dist: str = "", requires: str = "", version: str = "1.0") -> None:
        dist = dist or f"sley-{name}"
        module = f"fake_{dist.replace('-', '_')}"
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires.split(";;") if line]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\nx = y:z\n\n[sley.plugins]\n{name} = {module}\n")
        (tmp_path / f"{module}.py").write_text(source.replace("{module}", module))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return make


def fault_of(name: str, loader: PluginLoader | None = None) -> Diagnostic:
    with pytest.raises(PluginError) as caught:
        (loader or PluginLoader()).load(name)
    assert caught.value.exit_code == EXIT_PLUGIN
    assert len(caught.value.diagnostics) == 1
    return caught.value.diagnostics[0]


def test_a_good_plugin_loads_beside_broken_neighbours(install: Install, tmp_path: Path) -> None:
    install("zeta")
    install("alpha", "raise RuntimeError('broken')")
    install("beta", "import a_module_that_is_not_there")
    (tmp_path / "rotten-1.0.dist-info").mkdir()
    (tmp_path / "rotten-1.0.dist-info" / "entry_points.txt").write_text("[sley.plugins]\nno equals sign\n[[[\n")
    (tmp_path / "binary-1.0.dist-info").mkdir()
    (tmp_path / "binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff[sley.plugins]\n")

    loader = PluginLoader()
    plugin = loader.load("zeta")
    assert (plugin.dist, plugin.version) == ("sley-zeta", "1.0")
    assert loader.record(records.GradientHandlerRecord, "zeta.topk").name == "topk"
    assert {"core", "alpha", "beta", "zeta"} <= set(loader.names())
    assert not {"fake_sley_alpha", "fake_sley_beta", "fake_sley_zeta_live"} & sys.modules.keys()
    with pytest.raises(PlanError) as caught:
        loader.record(records.GradientHandlerRecord, "zeta.topq")
    assert caught.value.exit_code == EXIT_PLAN_INVALID
    assert [(found.code, found.hint) for found in caught.value.diagnostics] == [("unknown-record", "did you mean `zeta.topk`?")]
    with pytest.raises(PluginError, match=r"plugin `zeta` \(sley-zeta 1.0\): cannot import `fake_sley_zeta_live:TopK`"):
        plugin.load_builder(loader.record(records.GradientHandlerRecord, "zeta.topk"))


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (
            "import a_module_that_is_not_there",
            "plugin-import",
            "ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
        ),
        ("def broken(:", "plugin-import", "SyntaxError"),
        ("raise SystemExit(3)", "plugin-import", "SystemExit: 3"),
        ("raise ValueError()", "plugin-import", "ValueError"),
        (GOOD.replace("_handlers()", "_handler()"), "plugin-hook", "unknown hook 'sley_gradient_handler'"),
        (GOOD.replace("gradient_handlers()", "process_groups(topology, devices)"), "plugin-hook", "{'devices'} are declared"),
    ],
)
def test_a_module_that_is_no_plugin(install: Install, source: str, code: str, words: str) -> None:
    install("zeta", source)
    found = fault_of("zeta")
    assert found.code == code
    assert words in f"{found.message} {found.hint}"


def test_two_distributions_of_one_name(install: Install) -> None:
    install("zeta", dist="sley-zeta")
    install("zeta", dist="other-zeta", version="0.3")
    found = fault_of("zeta")
    assert found.code == "plugin-ambiguous"
    assert "sley-zeta 1.0" in found.message
    assert "other-zeta 0.3" in found.message


def test_a_second_copy_of_a_distribution_does_not_count(
    install: Install, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("zeta")
    monkeypatch.syspath_prepend(shutil.copytree(tmp_path, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True))
    assert [source.dist for source in find_plugins()["zeta"]] == ["sley-zeta"]


def test_a_plugin_that_is_installed_after_a_search_is_a_plugin(install: Install, tmp_path: Path) -> None:
    """As with `pip install` beside an open notebook."""
    os.utime(tmp_path, ns=(0, 0))  # a change within a tick of the file system's clock would not be seen
    assert "zeta" not in find_plugins()
    install("zeta")
    assert "zeta" in find_plugins()


def test_a_project_in_or_beside_an_environment_is_not_installed() -> None:
    environment = sysconfig.get_path("data")
    assert not is_installed(f"{environment}-project/model.py")
    assert not is_installed(str(Path(environment, "src", "model.py")))


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        *[(text, False) for text in ("sley-core>=9", "numpy;;Sley_Core ~= 9.0", "sley-core>=9; python_version>'3'")],
        *[(text, True) for text in ("sley-core>=0.1", "sley-core>=9; extra == 'new'", "no requirement ==", "sley-cores>=9")],
    ],
)
def test_a_plugin_is_imported_if_it_fits_this_core(
    install: Install, requires: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sley_core.plan.loader.core_version", lambda: "0.1.0")
    install("zeta", "" if fits else "raise RuntimeError('imported although it cannot work')", requires=requires)
    if fits:
        assert PluginLoader().load("zeta").version == "1.0"
    else:
        assert fault_of("zeta").code == "plugin-incompatible"


def policy(name: str = "lean", config: Any = Table) -> records.ActivationPolicyRecord:
    return records.ActivationPolicyRecord(name=name, config=config, build="nowhere:Lean")


class Greedy(Table):
    use: str


def fails() -> Any:
    raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda: 3, "failed in `sley_records`: TypeError"),
        (fails, "failed in `sley_records`: RuntimeError: no luck"),
        (lambda: [3], "returns a int, not a Record"),
        (lambda: [policy(), policy()], "two records with the name `lean`"),
        (lambda: [policy("a.b")], "letters, digits and `_`, but is `a.b`"),
        (lambda: [policy(config=dict)], "a config that is not a subclass of Table"),
        (lambda: [records.OptimizerRecord(name="own", config=Table, build="")], "not a subclass of OptimizerConfig"),
        (lambda: [policy(config=Greedy)], "the reserved key `use`"),
    ],
)
def test_records_that_no_plan_could_name(hook: Any, words: str) -> None:
    plugin = SimpleNamespace(sley_records=hookimpl(hook))
    found = fault_of("zeta", PluginLoader(plugins={"zeta": plugin}))
    assert found.code == "plugin-invalid"
    assert words in found.message


def test_a_hook_that_fails_or_returns_records_of_another_kind_names_the_plugin() -> None:
    handlers = SimpleNamespace(sley_gradient_handlers=hookimpl(lambda: [policy()]))
    assert "not a GradientHandlerRecord" in fault_of("zeta", PluginLoader(plugins={"zeta": handlers})).message
    plugin = PluginLoader(plugins={"zeta": SimpleNamespace(sley_check_plan=hookimpl(lambda plan: fails()))}).load("zeta")
    with pytest.raises(PluginError, match=r"plugin `zeta` .* failed in `sley_check_plan`: RuntimeError"):
        plugin.call("sley_check_plan", plan=SimpleNamespace(), topology=None)
    assert plugin.call("sley_run_started", run=None) == []

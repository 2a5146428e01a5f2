"""The loader imports what a plan names and nothing else, and each way in which a plugin can fail has its own error.

The distributions are folders with a `.dist-info` on `sys.path`, as pip leaves them.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from sley_core import discovery, records
from sley_core.errors import EXIT_PLAN_INVALID, EXIT_PLUGIN, Diagnostic, PlanError, PluginError
from sley_core.hookspecs import hookimpl
from sley_core.plan.loader import Loader
from sley_core.table import RecordKind, Table

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


def fault_of(name: str, loader: Loader | None = None) -> Diagnostic:
    with pytest.raises(PluginError) as caught:
        (loader or Loader()).load(name)
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

    loader = Loader()
    plugin = loader.load("zeta")
    assert (plugin.dist, plugin.version) == ("sley-zeta", "1.0")
    assert loader.record("gradient_handlers", "zeta.topk").name == "topk"
    assert {"core", "alpha", "beta", "zeta"} <= set(loader.names())
    assert not {"fake_sley_alpha", "fake_sley_beta", "fake_sley_zeta_live"} & sys.modules.keys()


def test_a_plugin_is_looked_at_again_only_if_it_has_changed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zeta")
    first = Loader().load("zeta")
    assert Loader().load("zeta").hooks is first.hooks
    module = sys.modules["fake_sley_zeta"]

    @hookimpl
    def nothing() -> list[records.GradientHandlerRecord]:
        return []

    monkeypatch.setattr(module, "sley_gradient_handlers", nothing)
    assert not Loader().load("zeta").records["gradient_handlers"]
    monkeypatch.setattr(module, "sley_gradient_handlrs", nothing, raising=False)
    assert fault_of("zeta").code == "plugin-hook"
    install("eta", dist="sley-eta")
    monkeypatch.setitem(sys.modules, "fake_sley_zeta", importlib.import_module("fake_sley_eta"))
    assert Loader().load("zeta").hooks is not first.hooks


def test_only_lines_about_core_are_read(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan that is loaded asks, and a distribution has many lines."""
    read = []

    def counted(line: str) -> Requirement:
        read.append(line)
        return Requirement(line)

    monkeypatch.setattr("packaging.requirements.Requirement", counted)
    install("zeta", requires="numpy>=1;;sley.CORE >=0.0;;sley-core-x>=9;;torch")
    Loader().load("zeta")
    assert read == ["sley.CORE >=0.0"]


def test_listing_imports_no_plugin(install: Install) -> None:
    install("zeta")
    assert "zeta" in Loader().names()
    assert [one.label for one in Loader().found("zeta")] == ["plugin `zeta` (sley-zeta 1.0)"]
    assert "fake_sley_zeta" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "words", "name", "plugin"),
    [
        ("datasets", "dataset", "text", "data"),
        ("metrics_writers", "metrics writer", "tensorboard", "metrics"),
        ("metrics_writers", "metrics writer", "wandb", "metrics"),
    ],
)
def test_a_former_name_is_answered_with_the_present_one(kind: RecordKind, words: str, name: str, plugin: str) -> None:
    with pytest.raises(PlanError, match=f"has no {words} `{name}`") as caught:
        Loader().record(kind, f"core.{name}")
    assert str(caught.value.diagnostics[0].hint).startswith(f"it is `{plugin}.{name}` now; install sley-{plugin}")


def test_a_missing_plugin_of_ours_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fault_of("pp", Loader(plugins={}))
    assert found.code == "plugin-missing"
    assert found.hint == "install sley-pp, in a clone of Sley's repository: `pip install -e packages/pp`"


def test_a_typo(install: Install) -> None:
    install("gamma")
    found = fault_of("gama")
    assert found.code == "plugin-unknown"
    assert found.hint == "did you mean `gamma`?"


def test_a_name_like_no_other_says_what_to_install() -> None:
    found = fault_of("quite_else", Loader(plugins={}))
    assert found.hint == "install the package that has it, by custom `sley-quite-else`; the plugins here are `core`"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError()", "ValueError"),
    ],
)
def test_an_import_that_fails(install: Install, source: str, cause: str) -> None:
    install("zeta", source)
    found = fault_of("zeta")
    assert found.code == "plugin-import"
    assert found.message.startswith("plugin `zeta` (sley-zeta 1.0) cannot be imported: ")
    assert cause in found.message
    assert found.hint
    assert "sley-zeta" in found.hint


def test_an_entry_point_without_a_module(install: Install, tmp_path: Path) -> None:
    install("zeta")
    (tmp_path / "fake_sley_zeta.py").unlink()
    assert fault_of("zeta").code == "plugin-import"


def test_a_hook_that_is_none(install: Install) -> None:
    install("zeta", GOOD.replace("sley_gradient_handlers", "sley_gradient_handler"))
    found = fault_of("zeta")
    assert found.code == "plugin-hook"
    assert found.message == "plugin `zeta` (sley-zeta 1.0): there is no hook `sley_gradient_handler`"
    assert found.hint == "did you mean `sley_gradient_handlers`?"


def test_an_argument_of_a_newer_core(install: Install) -> None:
    source = GOOD.replace("sley_gradient_handlers()", "sley_process_groups(topology, devices)")
    install("zeta", source)
    found = fault_of("zeta")
    assert found.code == "plugin-argument"
    assert "plugin `zeta` (sley-zeta 1.0): its `sley_process_groups` wants `devices`" in found.message
    assert "gives `plan`, `topology`" in found.message
    assert found.hint
    assert "newer core: take a newer sley-core (`git pull`" in found.hint


def test_two_distributions_of_one_name(install: Install) -> None:
    install("zeta", dist="sley-zeta")
    install("zeta", dist="other-zeta", version="0.3")
    found = fault_of("zeta")
    assert found.code == "plugin-ambiguous"
    assert "sley-zeta 1.0" in found.message
    assert "other-zeta 0.3" in found.message


def test_one_distribution_seen_twice_is_one(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zeta", version="1.0")
    second = tmp_path / "second"
    info = second / "Sley_Zeta-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Sley_Zeta\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[sley.plugins]\nzeta = elsewhere\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    assert Loader().load("zeta").version == "1.0"


@pytest.mark.parametrize("requires", ["sley-core>=9", "numpy;;Sley_Core ~= 9.0", "sley-core>=9; python_version>'3'"])
def test_a_plugin_that_needs_another_core(install: Install, requires: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "core_version", lambda: "0.1.0")
    monkeypatch.setattr("sley_core.plan.loader.core_version", lambda: "0.1.0")
    install("zeta", "raise RuntimeError('imported although it cannot work')", requires=requires)
    found = fault_of("zeta")
    assert found.code == "plugin-incompatible"
    assert "needs sley-core" in found.message
    assert "sley-core 0.1.0 is installed" in found.message
    assert found.hint is not None
    assert "`git pull` in the clone" in found.hint


@pytest.mark.parametrize("requires", ["sley-core>=0.1", "sley-core>=9; extra == 'new'", "no requirement ==", "sley-cores>=9"])
def test_a_plugin_that_fits_this_core(install: Install, requires: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "core_version", lambda: "0.1.0")
    install("zeta", requires=requires)
    assert Loader().load("zeta").version == "1.0"


def test_an_unknown_record_is_the_plans_fault(install: Install) -> None:
    install("zeta")
    with pytest.raises(PlanError) as caught:
        Loader().record("gradient_handlers", "zeta.topq")
    assert caught.value.exit_code == EXIT_PLAN_INVALID
    assert caught.value.diagnostics[0].code == "unknown-record"
    assert caught.value.diagnostics[0].message == "plugin `zeta` (sley-zeta 1.0) has no gradient handler `topq`"
    assert caught.value.diagnostics[0].hint == "did you mean `zeta.topk`?"
    with pytest.raises(PlanError, match="has no memory pool `topk`"):
        Loader().record("memory_pools", "zeta.topk")


def test_a_build_that_cannot_be_imported_names_the_plugin(install: Install) -> None:
    install("zeta")
    loader = Loader()
    record = loader.record("gradient_handlers", "zeta.topk")
    with pytest.raises(PluginError, match=r"plugin `zeta` \(sley-zeta 1.0\): cannot import `fake_sley_zeta_live:TopK`"):
        loader.load("zeta").build_of(record)


def test_given_plugins_are_all_there_are(install: Install) -> None:
    install("zeta")
    arena = records.MemoryPoolRecord(name="arena", config=Table, build="nowhere:Arena")
    loader = Loader(plugins={"mine": SimpleNamespace(sley_records=hookimpl(lambda: [arena]))})
    assert loader.names() == ["core", "mine"]
    assert loader.record("memory_pools", "mine.arena").name == "arena"
    assert fault_of("zeta", loader).code == "plugin-unknown"


def test_core_loads_without_torch_and_without_plugins_of_others() -> None:
    program = (
        "import sys\n"
        "from sley_core.plan.loader import Loader\n"
        "loader = Loader()\n"
        "loader.names(); loader.load('core')\n"
        "assert loader.record('losses', 'core.cross_entropy').name == 'cross_entropy'\n"
        "print([name for name in ('torch', 'numpy', 'packaging') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

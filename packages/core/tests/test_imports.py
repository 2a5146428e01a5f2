"""Who names whom, annotations included: what import-linter, which looks at what runs, does not see."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli

from sley_core.plan.loader import CORE, FIRST_PARTY_PLUGINS

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).parents[1] / "src"
needs_plugins = pytest.mark.skipif(not (ROOT / "packages" / "dp").exists(), reason="the plugins are not part of the sdist")


def modules() -> dict[str, ast.Module]:
    """The modules of sley_core, parsed, by name."""
    files = {file.relative_to(SOURCE).with_suffix(""): file for file in (SOURCE / "sley_core").rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(file.read_text("utf-8")) for name, file in files.items()}


def imports(node: ast.AST) -> Iterator[str]:
    """The names that imports within `node` bring, without those for annotations."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports(child)


def test_folders_are_layers():
    """A folder, or a module beside them, imports only what is below it; names in annotations do not count."""

    def place(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 1 else ""

    folders: dict[str, set[str]] = {}
    trees = modules()
    for name, tree in trees.items():
        targets = {target if target in trees else target.rpartition(".")[0] for target in imports(tree)}
        folders.setdefault(place(name), set()).update(place(target) for target in targets & trees.keys())
    edges = {name: targets - {name, ""} for name, targets in folders.items()}
    TopologicalSorter(edges).prepare()  # raises CycleError with the names of a cycle


SUBJECTS = sorted(path.stem for path in (SOURCE / "sley_core" / "api").glob("*.py") if path.stem != "__init__")
PUBLIC = {f"sley_core.api.{subject}" for subject in SUBJECTS} | {
    f"sley_core.{name}" for name in ("errors", "hookspecs", "protocols", "records")
}
PLUGINS = [
    ROOT / "packages" / name / "src"
    for name in ("checkpoint", "cma", "data", "dp", "hf", "isp", "memory", "metrics", "models", "optim", "pp")
] + [ROOT / "examples" / "plugins"]


@needs_plugins
def test_every_plugin_of_this_repository_has_an_install_hint() -> None:
    """A plan that names a plugin which is not installed is told how to install it."""
    manifests = [tomli.loads(file.read_text("utf-8"))["project"] for file in ROOT.glob("packages/*/pyproject.toml")]
    plugins = {name for manifest in manifests for name in manifest.get("entry-points", {}).get("sley.plugins", {})}
    assert plugins == {CORE, *FIRST_PARTY_PLUGINS}


@needs_plugins
def test_plugins_import_public_modules_and_no_others() -> None:
    files = [file for folder in PLUGINS for file in folder.rglob("*.py") if "tests" not in file.parts]
    files += (ROOT / "packages" / "testing" / "tests" / "outsider" / "own" / "sley_wave").glob("*.py")
    of_api = ("from sley_core.api import ", "import sley_core.api.")
    texts = [(file.name, file.read_text("utf-8").replace(*of_api)) for file in files]
    imports = re.compile(r"^\s*(?:from|import) (sley_core[.\w]*)", re.MULTILINE)
    used = {(module, name) for name, text in texts for module in imports.findall(text)}
    assert {module for module, _ in used} <= PUBLIC, sorted(pair for pair in used if pair[0] not in PUBLIC)
    assert len(PUBLIC) <= 15


@needs_plugins
@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_a_subject_names_is_used_by_a_plugin_or_said_in_the_docs(subject: str) -> None:
    """Nothing is public that nobody needs: what is public cannot change."""
    users = [*PLUGINS, ROOT / "examples" / "models"]
    templates = ROOT / "apps" / "train-cli" / "src" / "train_cli" / "templates"
    found = [*(file for folder in users for file in folder.rglob("*.py")), *templates.rglob("*.py.in")]
    texts = [file.read_text("utf-8") for file in (*found, ROOT / "docs" / "write-a-plugin.md")]
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    module = importlib.import_module(f"sley_core.api.{subject}")
    for name in (name for name in vars(module) if not name.startswith("__")):
        assert re.search(rf"`{name}`", page), f"docs/api.md does not say what {name} of api.{subject} is"
        assert any(re.search(rf"\b{name}\b", text) for text in texts), f"nobody uses {name} of api.{subject}"


NO_TORCH = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
from sley_core.plan.load import load_plan
from sley_core.plan.check import check_plan
plan = load_plan(sys.argv[1])
assert check_plan(plan, plan.world_size()) == []
assert "torch" not in sys.modules, "loading and checking a plan needs torch"
"""


@needs_plugins
def test_what_a_check_imports_needs_no_torch() -> None:
    """Records, tables, schedules and partitions; one process imports them one after the other, and checks a plan."""
    files = [*ROOT.glob("packages/*/src/sley_*/plugin.py"), *ROOT.glob("packages/*/src/sley_*/config.py")]
    installed = {file.parent.name for file in files if find_spec(file.parent.name)} - {"sley_testing"}
    names = [f"{file.parent.name}.{file.stem}" for file in sorted(files) if file.parent.name in installed]
    assert {"sley_data.plugin", "sley_models.plugin"} <= set(names)
    others = ["sley_isp.prefetch", "sley_pp.schedules"]
    names += [name for name in others if name.partition(".")[0] in installed]
    names += ["sley_core.api.plan", "sley_core.api.actions", "sley_core.actions.simulate", "sley_core.run_folder"]
    command = [sys.executable, "-c", NO_TORCH, str(ROOT / "examples/plans/quickstart.toml"), *names]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

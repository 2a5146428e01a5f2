"""What core makes public, and that the plugins of this repository use nothing else."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
API = Path(__file__).parents[1] / "src" / "sley_core" / "api"
SUBJECTS = sorted(path.stem for path in API.glob("*.py") if path.stem != "__init__")
PUBLIC = {f"sley_core.api.{subject}" for subject in SUBJECTS} | {
    f"sley_core.{name}" for name in ("errors", "hookspecs", "protocols", "records")
}
OUTSIDER = Path(__file__).parent / "outsider" / "own" / "sley_wave"
PLUGINS = [
    ROOT / "packages" / name / "src" for name in ("checkpoint", "cma", "data", "dp", "isp", "memory", "metrics", "models", "pp")
] + [ROOT / "examples" / "plugins"]


def imports(file: Path) -> Iterator[str]:
    """The modules of core that the file names, for annotations too."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sley_core"):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("sley_core"))


@pytest.mark.skipif(not PLUGINS[0].exists(), reason="the plugins are not part of the sdist")
def test_plugins_import_public_modules_and_no_others() -> None:
    files = [file for folder in PLUGINS for file in folder.rglob("*.py") if "tests" not in file.parts]
    files += OUTSIDER.glob("*.py")
    used = {(module, file.name) for file in files for module in imports(file)}
    assert {module for module, _ in used} <= PUBLIC, sorted(pair for pair in used if pair[0] not in PUBLIC)
    assert len(PUBLIC) <= 15


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_a_subject_names_is_used_by_a_plugin_or_said_in_the_docs(subject: str) -> None:
    """Nothing is public that nobody needs: what is public cannot change."""
    if not PLUGINS[0].exists():
        pytest.skip("the plugins are not part of the sdist")
    users = [*PLUGINS, ROOT / "examples" / "models"]
    templates = ROOT / "apps" / "train-cli" / "src" / "train_cli" / "templates"
    found = [*(file for folder in users for file in folder.rglob("*.py")), *templates.rglob("*.py.in")]
    texts = [file.read_text("utf-8") for file in (*found, ROOT / "docs" / "write-a-plugin.md")]
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    module = importlib.import_module(f"sley_core.api.{subject}")
    for name in module.__all__:
        assert re.search(rf"`{name}`", page), f"docs/api.md does not say what {name} of api.{subject} is"
        assert any(re.search(rf"\b{name}\b", text) for text in texts), f"nobody uses {name} of api.{subject}"


@pytest.mark.parametrize("subject", ["plan", "actions"])
def test_what_a_plugin_file_imports_needs_no_torch(subject: str) -> None:
    program = f"import sys, sley_core.api.{subject}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

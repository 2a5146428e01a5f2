"""The packages of `new` pass their own tests, need only core, and are those of the documentation."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from started_program import Program

from train_cli.commands.plugins import SLEY_PLUGINS, PluginKind, make_package_files

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "plugins" / "sley-narrow"
PUBLIC = ("sley_core.api.", "sley_core.errors", "sley_core.hookspecs", "sley_core.protocols", "sley_core.records")


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the example is not part of the sdist")
def test_the_handler_is_the_example_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_cli.commands.plugins.check_name", lambda _: None)  # the example may be installed
    files = make_package_files("handler", "narrow")
    del files["README.md"]  # the example's is a page of this repository
    assert len(files) == 7
    for path, text in files.items():
        assert text == (EXAMPLE / path).read_text("utf-8"), path


@pytest.mark.sample(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["writer", "hook", "model", "schedule", "handler"])
def test_a_new_package_passes_its_tests(cli: Any, tmp_path: Path, kind: str) -> None:
    """The tests of a handler are those of the example, which always run."""
    out = tmp_path / "new" / "package"
    cli("new", kind, "my_own", "--out", out).expect(0, f"cd {out}")
    info = out / "src" / "sley_my_own-0.1.0.dist-info"  # as pip writes it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sley-my_own\nVersion: 0.1.0\nRequires-Dist: sley-core\n")
    (info / "entry_points.txt").write_text("[sley.plugins]\nmy_own = sley_my_own.plugin\n")
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins are imported before the fork
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error", *imported]
    program = Program(command, out, {"PYTHONPATH": str(out / "src")})
    try:
        tested = program.finish(280)
    finally:
        program.close()
    assert tested.code == 0, tested.out + tested.err


@pytest.mark.parametrize("kind", list(PluginKind))
def test_a_package_imports_existing_names_and_only_public_modules_of_core(kind: PluginKind) -> None:
    files = make_package_files(kind, "my_own")
    assert "@" not in "".join(text for path, text in files.items() if "plugin.py" not in path and "test_" not in path)
    for path, text in files.items():
        nodes = ast.walk(ast.parse(text)) if path.endswith(".py") else ()
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module):
            if path.startswith("src/") and node.module.startswith("sley_core"):
                assert node.module.startswith(PUBLIC), (path, node.module)
            if node.module.startswith("sley_") and not node.module.startswith("sley_my_own"):
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), (path, ast.unparse(node))


@pytest.mark.parametrize("name", ["9lives", "TopK", "class", "../out", "odd", min(SLEY_PLUGINS)])
def test_an_invalid_name_is_refused(cli: Any, folder: Path, install: Any, name: str) -> None:
    install("sley-odd", "odd", "")
    before = set(folder.iterdir())
    cli("new", "handler", name).expect(2, "error[plugin-name]")
    cli("new", "writer", "mine", "--out", folder).expect(2, "error[new-folder]")
    assert set(folder.iterdir()) == before

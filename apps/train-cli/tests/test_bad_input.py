"""A mistake in a plan, a plugin or the user's code is one diagnostic at its place; no rank starts, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.discovery import installed

PLAN_INVALID, PLUGIN = 3, 4

Refused = Callable[..., None]
Own = Callable[[str], Path]
Install = Callable[..., None]


@pytest.fixture
def refused(folder: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, no_children: None) -> Refused:
    """`refused(path, code, at)`: `run` and `check` end with one diagnostic of that code, its caret at the text `at`."""
    started: list[object] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        """torch may ask the machine about itself; what must not start is a rank."""

        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            if "train_cli" in str(args):
                started.append(args)
            super().__init__(args, *more, **options)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def refuse(
        path: Path, code: str, at: str | None, *options: str, exit_code: int = PLAN_INVALID, command: str = "run"
    ) -> None:
        before = files(folder)
        result = cli(command, path, "--message-format", "json", *options)
        found = [json.loads(line) for line in result.err.splitlines()]
        assert ([each["code"] for each in found], result.code, result.out) == ([code], exit_code, ""), result.err
        assert text_at(path, found[0]).startswith(at or ""), found[0]
        assert (found[0]["file"] is not None) == (at is not None), found[0]
        assert files(folder) == before
        assert not started

    return refuse


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def text_at(path: Path, diagnostic: dict[str, object]) -> str:
    """The text of the plan where the diagnostic points, or the name of the file that it names as a whole."""
    line, column = diagnostic["line"], diagnostic["column"]
    if not isinstance(line, int) or not isinstance(column, int):
        return str(diagnostic["file"])
    return path.read_bytes().decode("utf-8", "replace").splitlines()[line - 1][column - 1 :]


def replace(plan: Path, old: str, new: str) -> None:
    text = plan.read_text("utf-8")
    assert old in text
    plan.write_text(text.replace(old, new), "utf-8")


EDITS = {
    "syntax error": ("steps = 4", "steps = = 4", "syntax", "= 4"),
    "unknown table": ("[batch]", "[batsch]\na = 1\n[batch]", "unknown-table", "batsch"),
    "unknown key of a record": ("hidden =", "hiden = 3\nhidden =", "unknown-key", "hiden"),
    "missing key": ("steps = 4", "", "missing-key", "[run]"),
    "stages without a schedule": ("dp = 2", "dp = 2\npp = 2", "pipeline-missing", "2"),
    "data file empty": ("corpus.txt", "empty.txt", "data-empty", '"empty.txt"'),
}
"""What is replaced by what in a valid plan, the code, and the text under the caret."""


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_plan(plan: Path, folder: Path, refused: Refused, name: str) -> None:
    old, new, code, at = EDITS[name]
    (folder / "empty.txt").touch()
    replace(plan, old, new)
    for command in ("run", "check"):
        refused(plan, code, at, command=command)


def test_a_plan_that_cannot_be_read(plan: Path, folder: Path, refused: Refused) -> None:
    refused(Path("absent.toml"), "plan-missing", "absent.toml")
    (folder / "plans").mkdir()
    refused(Path("plans"), "plan-is-folder", "plans")
    plan.write_bytes(plan.read_bytes() + b'x = "\xff"\n')
    refused(plan, "plan-not-utf8", "\N{REPLACEMENT CHARACTER}")


def test_options_have_a_place_too(plan: Path, refused: Refused) -> None:
    refused(plan, "layout", "2", "--nproc", "3")
    refused(plan, "layout", "2", "--world", "3", command="check")
    refused(plan, "unknown-key", "--set #2", "--set", "run.seed=3", "--set", "run.sed=3")


def test_all_problems_at_once(plan: Path, cli: Callable[..., Any]) -> None:
    replace(plan, "steps = 4", "steps = true")
    replace(plan, "lr =", "lrr =")
    *lines, count = cli("run", plan, "--message-format", "short").err.splitlines()
    assert [line.split("error[")[1].split("]")[0] for line in lines] == ["wrong-type", "missing-key", "unknown-key"]
    assert count == "found 3 errors"


# -- plugins -----------------------------------------------------------------------------------------------------------


def with_handlers(plan: Path, *names: str) -> Path:
    tables = "".join(f'[[gradient_handlers]]\nuse = "{name}"\n' for name in names)
    plan.write_text(plan.read_text("utf-8") + tables, "utf-8")
    return plan


def test_a_plugin_that_is_not_there(plan: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan.read_text("utf-8")
    refused(with_handlers(plan, "nobody.knows"), "plugin-unknown", '"nobody.knows"', exit_code=PLUGIN)
    plan.write_text(text, "utf-8")
    others = {name: found for name, found in installed().items() if name != "dp"}
    monkeypatch.setattr("sley_core.plan.loader.installed", lambda: others)
    refused(with_handlers(plan, "dp.bucketed"), "plugin-missing", '"dp.bucketed"', exit_code=PLUGIN)


def test_a_plugin_that_cannot_be_imported(plan: Path, install: Install, refused: Refused) -> None:
    install("sley-odd", "odd", "raise RuntimeError('not today')")
    refused(with_handlers(plan, "odd.sum"), "plugin-import", '"odd.sum"', exit_code=PLUGIN)


# -- the user's code, and the run's folder -----------------------------------------------------------------------------

HELD = """
from torch import nn

def layers():
    table = nn.Embedding(256, 256)
    table.held = [table.weight]
    return [table]
"""


@pytest.mark.parametrize(
    ("source", "code", "at"),
    [
        ("import nothing_of_this_name", "factory-import", '"own:layers"'),
        ("def layers(): return 42", "model-factory", "[model]"),
        (HELD, "model-init", "[model]"),
    ],
    ids=["not importable", "no layers", "held unregistered"],
)
def test_a_wrong_factory(own_model: Own, refused: Refused, source: str, code: str, at: str) -> None:
    refused(own_model(source), code, at)


def test_an_error_in_a_factory_is_placed_in_its_file(own_model: Own, cli: Callable[..., Any], folder: Path) -> None:
    result = cli("run", own_model("def layers():\n    return [1 / 0]"), "--message-format", "short")
    assert result.code == PLAN_INVALID
    assert "ZeroDivisionError" in result.err
    assert "Traceback" not in result.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("mode", [None, pytest.param(0o500, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root"))])
def test_a_run_folder_that_cannot_be_written(plan: Path, folder: Path, refused: Refused, mode: int | None) -> None:
    (folder / "runs").touch() if mode is None else (folder / "runs").mkdir(mode=mode)
    refused(plan, "run-folder", "[run]")

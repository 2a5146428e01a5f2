"""How a command refuses what a user got wrong: one diagnostic, no process, nothing written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLAN_INVALID = 3

Refused = Callable[..., None]


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
        assert [each["code"] for each in found] == [code], result.err
        assert result.code == exit_code, result.err
        assert result.out == ""
        assert text_at(path, found[0]).startswith(at or ""), found[0]
        assert (found[0]["file"] is not None) == (at is not None), found[0]
        assert files(folder) == before
        assert not started

    return refuse


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def text_at(path: Path, diagnostic: dict[str, object]) -> str:
    """What stands in the plan where the diagnostic points, or the name of the file it names as a whole."""
    line, column = diagnostic["line"], diagnostic["column"]
    if not isinstance(line, int) or not isinstance(column, int):
        return str(diagnostic["file"])
    return path.read_bytes().decode("utf-8", "replace").splitlines()[line - 1][column - 1 :]

"""Every way in which a plan cannot be read has its code, its place and, where there is a remedy, a hint."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sley_core.errors import EXIT_PLAN_INVALID, Diagnostic, PlanError
from sley_core.plan.read import read_file


def problem_of(path: Path) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        read_file(path)
    assert caught.value.exit_code == EXIT_PLAN_INVALID
    assert len(caught.value.diagnostics) == 1
    return caught.value.diagnostics[0]


def write(folder: Path, content: bytes) -> Path:
    path = folder / "plan.toml"
    path.write_bytes(content)
    return path


def test_a_missing_file_names_the_plans_beside_it(tmp_path: Path) -> None:
    write(tmp_path, b"")
    found = problem_of(tmp_path / "plam.toml")
    assert found.code == "plan-missing"
    assert found.hint == "the plans there are `plan.toml`"


def test_a_folder(tmp_path: Path) -> None:
    write(tmp_path, b"")
    found = problem_of(tmp_path)
    assert found.code == "plan-is-folder"
    assert found.hint
    assert "plan.toml" in found.hint


def test_not_utf8(tmp_path: Path) -> None:
    found = problem_of(write(tmp_path, "a = 1\n# é".encode() + b"\xff\n"))
    assert found.code == "plan-not-utf8"
    assert found.place
    assert (found.place.line, found.place.column) == (2, 4)


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        ("[run\nname = 1", 1, 5),
        ("a = 1\nb = ", 2, 5),
        ("a = 1\na = 2", 2, 6),
        ("[run]\nsteps = 010", 2, 10),
        ("x = '''\n\n", 3, 1),
        ("a = 1\r\nb = 'open", 2, 10),
        ('a = "\\', 1, 7),
    ],
)
def test_syntax(tmp_path: Path, content: str, line: int, column: int) -> None:
    found = problem_of(write(tmp_path, content.encode()))
    assert found.code == "syntax"
    assert found.place
    assert (found.place.line, found.place.column) == (line, column)
    assert found.source_line == content.replace("\r", "").split("\n")[line - 1]
    assert "(at line" not in found.message


@pytest.mark.parametrize(
    "content",
    ["x = 9" + "9" * 5000, "[" * 10, "x = " + "[" * 3000 + "]" * 3000, "d = 2024-13-45", "x = " + "{a=" * 3000],
    ids=["digits", "brackets", "nested", "date", "inline"],
)
def test_what_python_refuses_is_a_syntax_error_too(tmp_path: Path, content: str) -> None:
    assert problem_of(write(tmp_path, content.encode())).code == "syntax"


def test_a_mark_at_the_start_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    document = read_file(write(tmp_path, b"\xef\xbb\xbf[run]\r\nname = 'x'\r\n"))
    assert document.tables == {"run": {"name": "x"}}
    place, line = document.place(("run", "name"))
    assert (place.line, place.column, place.length) == (2, 8, 3)
    assert line == "name = 'x'"


def test_a_pipe_that_somebody_writes_is_a_plan(tmp_path: Path) -> None:
    """As a shell's `<(...)` is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("plan = 1\n" + "# more\n" * 20_000, "utf-8"))
    writer.start()
    assert read_file(pipe).tables == {"plan": 1}
    writer.join()

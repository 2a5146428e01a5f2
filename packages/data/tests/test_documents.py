from __future__ import annotations

import os
from pathlib import Path

import pytest

from sley_data.files import find_files

KEY = ("data", "files")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "a.md", "what?.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "sub/empty.txt").touch()
    return tmp_path


def names(*patterns: Path) -> list[str]:
    files, problems = find_files(patterns, KEY)
    assert not problems
    return [file.name for file in files]


def test_files_are_sorted_within_a_pattern_and_named_from_where_it_starts(corpus: Path) -> None:
    assert names(corpus / "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt", "what?.txt"]
    assert names(corpus / "sub/**/*.txt", corpus / "a.*") == ["c.txt", "deep/d.txt", "a.md", "a.txt"]


def test_a_path_that_exists_is_no_pattern(corpus: Path) -> None:
    assert names(corpus / "what?.txt") == ["what?.txt"]


def test_a_file_is_taken_once(corpus: Path) -> None:
    assert names(corpus / "b.txt", corpus / "*.txt", corpus / "sub/../a.txt") == ["b.txt", "a.txt", "what?.txt"]


@pytest.mark.parametrize(
    ("pattern", "code", "message"),
    [
        ("none.txt", "data-missing", "there is no file"),
        ("none/*.txt", "data-missing", "matches no file"),
        ("*.rst", "data-missing", "matches no file"),
        ("sub", "data-missing", "is a folder"),
        ("", "data-missing", "is a folder"),
        ("sub/empty.txt", "data-empty", "is empty"),
        ("sub/e*.txt", "data-empty", "every file that"),
        ("a.txt/b", "data-missing", "there is no file"),
        ("a\0b", "data-missing", "there is no file"),
        ("**.txt/[", "data-missing", ""),
        ("x" * 5000, "data-missing", "cannot be read"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(corpus: Path, pattern: str, code: str, message: str) -> None:
    files, problems = find_files([corpus / "a.txt", corpus / pattern], KEY)
    assert [file.name for file in files] == ["a.txt"]
    assert [(problem.path, problem.code) for problem in problems] == [((*KEY, 1), code)]
    assert message in problems[0].message


def test_what_is_no_regular_file_is_refused(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe")
    _, problems = find_files([corpus / "pipe"], KEY)
    assert "is not a regular file" in problems[0].message

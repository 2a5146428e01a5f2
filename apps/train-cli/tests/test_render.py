"""The three forms of diagnostics."""

from __future__ import annotations

import io
import json
from textwrap import dedent

import pytest

from sley_core.errors import Diagnostic, Place
from train_cli.console import default_format, wants_color
from train_cli.options import MessageFormat
from train_cli.render import render

TYPO = Diagnostic(
    "unknown-key",
    "`buckt_mb` is not an option of `dp.bucketed`",
    path=("gradient_handlers", 0, "buckt_mb"),
    place=Place("plan.toml", 24, 1, 8),
    source_line="buckt_mb = 25",
    hint="did you mean `bucket_mb`?",
)
DIED = Diagnostic("rank-died", "rank 1 of 2 was killed by SIGKILL")


def test_full_is_a_picture() -> None:
    expected = """\
        error[unknown-key]: `buckt_mb` is not an option of `dp.bucketed`
          --> plan.toml:24:1
           |
        24 | buckt_mb = 25
           | ^^^^^^^^
           |

        hint: did you mean `bucket_mb`?

        """
    assert render([TYPO], MessageFormat.full) == dedent(expected)


def test_full_without_a_place_is_the_message() -> None:
    assert render([DIED], MessageFormat.full) == "error[rank-died]: rank 1 of 2 was killed by SIGKILL\n\n"


def test_short_is_a_line_each_and_a_count() -> None:
    first, second, count = render([TYPO, DIED], MessageFormat.short).splitlines()
    assert first == (
        "plan.toml:24:1: error[unknown-key]: `buckt_mb` is not an option of `dp.bucketed` (hint: did you mean `bucket_mb`?)"
    )
    assert second == "error[rank-died]: rank 1 of 2 was killed by SIGKILL"
    assert count == "found 2 errors"


def test_json_is_an_object_per_line() -> None:
    first, second = map(json.loads, render([TYPO, DIED], MessageFormat.json).splitlines())
    assert first == {
        "code": "unknown-key",
        "file": "plan.toml",
        "line": 24,
        "column": 1,
        "path": "gradient_handlers.0.buckt_mb",
        "message": "`buckt_mb` is not an option of `dp.bucketed`",
        "hint": "did you mean `bucket_mb`?",
    }
    assert second["code"] == "rank-died"
    assert {second[key] for key in ("file", "line", "column", "path", "hint")} == {None}


@pytest.mark.parametrize(
    ("line", "column", "length", "carets"),
    [
        ("\tlr = 3", 7, 1, "\t     ^"),
        ("名前 = 3", 1, 2, "^^^^"),
        ("名前 = 3", 6, 1, "       ^"),
        ("lr", 1, 99, "^^"),
        ("", 1, 1, "^"),
    ],
)
def test_carets_stand_under_the_culprit(line: str, column: int, length: int, carets: str) -> None:
    found = Diagnostic("code", "message", place=Place("plan.toml", 3, column, length), source_line=line)
    lines = render([found], MessageFormat.full).splitlines()
    assert lines[3:5] == [f"3 | {line}", f"  | {carets}"]


def test_a_long_line_is_cut_around_the_culprit() -> None:
    line = "x" * 5000 + "HERE" + "y" * 5000
    found = Diagnostic("code", "message", place=Place("plan.toml", 3, 5001, 4), source_line=line)
    shown, carets = render([found], MessageFormat.full).splitlines()[3:5]
    assert len(shown) < 200
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "HERE"


def test_a_place_on_the_command_line_has_no_number() -> None:
    place = Place("--set #1", 0, 1, 7)
    found = Diagnostic("code", "message", place=place, source_line="run.x=3")
    assert render([found], MessageFormat.full).splitlines()[1:5] == ["--> --set #1", " |", " | run.x=3", " | ^^^^^^^"]


def test_what_a_plan_contains_does_not_steer_the_terminal() -> None:
    found = Diagnostic("code", "a\x1b[31mb", place=Place("p", 1, 1), source_line="k\x1b[2J = 1", hint="h\x07")
    for form in (MessageFormat.full, MessageFormat.short):
        text = render([found], form)
        assert "\x1b" not in text
        assert "\x07" not in text


def test_short_stays_on_one_line() -> None:
    assert render([Diagnostic("code", "two\nlines")], MessageFormat.short) == "error[code]: two lines\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_form_follows_the_stream() -> None:
    assert default_format(Terminal()) is MessageFormat.full
    assert default_format(io.StringIO()) is MessageFormat.short


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


def test_colour_changes_nothing_but_colour() -> None:
    plain, painted = (render([TYPO], MessageFormat.full, color=color) for color in (False, True))
    assert "\x1b[" in painted
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain

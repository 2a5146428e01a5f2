"""The three forms of diagnostics."""

from __future__ import annotations

import io
import json
import re
from textwrap import dedent

import pytest

from sley_core.errors import Diagnostic, Place
from train_cli.console import Settings, render, show
from train_cli.faults import Fault
from train_cli.options import MessageFormat

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
    assert render([DIED], MessageFormat.full) == "error[rank-died]: rank 1 of 2 was killed by SIGKILL\n\n"
    painted = render([TYPO], MessageFormat.full, color=True)
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == dedent(expected)


def test_short_is_a_line_each_and_a_count() -> None:
    assert render([TYPO, DIED, Diagnostic("code", "two\nlines")], MessageFormat.short).splitlines() == [
        "plan.toml:24:1: error[unknown-key]: `buckt_mb` is not an option of `dp.bucketed` (hint: did you mean `bucket_mb`?)",
        "error[rank-died]: rank 1 of 2 was killed by SIGKILL",
        "error[code]: two lines",
        "found 3 errors",
    ]


def test_json_is_an_object_per_line() -> None:
    first, second = map(json.loads, render([TYPO, DIED], MessageFormat.json).splitlines())
    place = {"file": "plan.toml", "line": 24, "column": 1, "path": "gradient_handlers.0.buckt_mb"}
    assert first == {"code": "unknown-key", **place, "message": TYPO.message, "hint": TYPO.hint}
    assert second == {"code": "rank-died", **dict.fromkeys(place), "message": DIED.message, "hint": None}


@pytest.mark.parametrize(
    ("line", "column", "length", "carets"),
    [("\tlr = 3", 7, 1, "\t     ^"), ("名前 = 3", 1, 2, "^^^^"), ("名前 = 3", 6, 1, "       ^"), ("", 1, 1, "^")],
)
def test_carets_stand_under_the_culprit(line: str, column: int, length: int, carets: str) -> None:
    found = Diagnostic("code", "message", place=Place("plan.toml", 3, column, length), source_line=line)
    assert render([found], MessageFormat.full).splitlines()[3:5] == [f"3 | {line}", f"  | {carets}"]


def test_the_content_of_a_plan_does_not_control_the_terminal() -> None:
    found = Diagnostic("code", "a\x1b[31mb", place=Place("p", 1, 1), source_line="k\x1b[2J = 1", hint="h\x07")
    for form in (MessageFormat.full, MessageFormat.short):
        assert not {"\x1b", "\x07"} & set(render([found], form))


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_full", "is_painted"),
    [
        (False, {}, False, False),
        (True, {}, True, True),
        (True, {"TERM": "dumb"}, True, False),
        (True, {"NO_COLOR": "1"}, True, False),
    ],
)
def test_form_and_colour_follow_the_stream(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str], is_full: bool, is_painted: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    show(Fault((TYPO,), 3), Settings())
    assert ("-->" in stream.getvalue(), "\x1b[" in stream.getvalue()) == (is_full, is_painted)

"""Prints to stderr: lines for the user, and diagnostics in one of three forms. stdout is for data (`show`, `--format json`).

full     a picture of the line with a caret under the culprit; the default on a terminal
short    `plan.toml:24:1: error[unknown-key]: ...`, a line each, clickable everywhere; the default elsewhere
json     an object per line: code, file, line, column, path, message, hint
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from sley_core.errors import Diagnostic, dotted
from train_cli.options import MessageFormat

if TYPE_CHECKING:
    from train_cli.faults import Fault


@dataclass
class Settings:
    """The options that every command has; `None` if the user has not chosen."""

    message_format: MessageFormat | None = None
    traceback: bool = False


def say(text: str) -> None:
    """Prints a line for the user on stderr; a closed stderr is no error."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show(fault: Fault, settings: Settings) -> None:
    """Prints a fault's diagnostics on stderr, and its traceback if asked for; a closed stderr is no error."""
    stream = sys.stderr
    form = settings.message_format or (MessageFormat.full if stream.isatty() else MessageFormat.short)
    color = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    with suppress(OSError, ValueError):
        if settings.traceback and fault.trace:
            print(fault.trace, file=stream)
        stream.write(render(fault.diagnostics, form, color=color))
        stream.flush()


def render(diagnostics: Iterable[Diagnostic], form: MessageFormat, *, color: bool = False) -> str:
    """Returns the text to print, ending in a newline, in the order given; the last line counts the problems if there are
    several.
    """
    problems = list(diagnostics)
    if form is MessageFormat.json:
        return "".join(f"{json.dumps(_fields(each), ensure_ascii=False)}\n" for each in problems)
    if form is MessageFormat.short:
        parts = [_short(each) for each in problems]
    else:
        parts = ["\n".join(_picture(each, color)) + "\n" for each in problems]
    if len(parts) > 1:
        parts.append(f"found {len(parts)} errors")
    return "".join(f"{part}\n" for part in parts)


def _fields(diagnostic: Diagnostic) -> dict[str, object]:
    place = diagnostic.place
    return {
        "code": diagnostic.code,
        "file": place.file if place else None,
        "line": place.line or None if place else None,
        "column": place.column or None if place else None,
        "path": dotted(diagnostic.path) or None,
        "message": diagnostic.message,
        "hint": diagnostic.hint,
    }


def _short(diagnostic: Diagnostic) -> str:
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    hint = f" (hint: {diagnostic.hint})" if diagnostic.hint else ""
    return _printable(" ".join(f"{where}error[{diagnostic.code}]: {diagnostic.message}{hint}".split("\n")))


def _picture(diagnostic: Diagnostic, color: bool) -> Iterator[str]:
    """Yields the lines of one diagnostic as the compilers of Rust and ruff draw it: error, source line with a caret, hint."""

    def paint(text: str, fg: str) -> str:
        return typer.style(text, fg=fg, bold=True) if color else text

    yield f"{paint(f'error[{diagnostic.code}]', 'red')}: {_printable(diagnostic.message)}"
    place = diagnostic.place
    if place is not None:
        number = str(place.line) if place.line else ""
        margin, bar = " " * len(number), paint("|", "blue")
        yield f"{margin}{paint('-->', 'blue')} {place}"
        if diagnostic.source_line is not None and place.column:
            shown, start = _printable(diagnostic.source_line.rstrip("\r\n")), place.column - 1
            culprit = shown[start : start + max(1, place.length)]
            blank = "".join("\t" if char == "\t" else " " * _width(char) for char in shown[:start])
            yield f"{margin} {bar}"
            yield f"{paint(number, 'blue')} {bar} {shown}"
            yield f"{margin} {bar} {blank}{paint('^' * max(1, _width(culprit)), 'red')}"
            yield f"{margin} {bar}"
    if diagnostic.hint:
        yield ""
        yield f"{paint('hint', 'cyan')}: {_printable(diagnostic.hint)}"


def _printable(text: str) -> str:
    """Returns `text` without control characters: a plan's content must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _width(text: str) -> int:
    """Returns the number of columns of `text` on a terminal, where East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)

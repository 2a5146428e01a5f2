"""Formats diagnostics in one of three forms, in the order given: core has sorted them by place.

full     a picture of the line with a caret under the culprit; the default on a terminal
short    `plan.toml:24:1: error[unknown-key]: ...`, a line each, clickable everywhere; the default elsewhere
json     an object per line: code, file, line, column, path, message, hint
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

import typer

from sley_core.errors import Diagnostic, dotted
from train_cli.options import MessageFormat

_WIDEST_LINE = 160
_BEFORE_CULPRIT = 60
"""How much of a very long line is shown, and how much of that stands before the place."""


def render(diagnostics: Iterable[Diagnostic], form: MessageFormat, *, color: bool = False) -> str:
    """Returns the text to print, ending in a newline; the last line counts the problems if there are several."""
    found = list(diagnostics)
    if form is MessageFormat.json:
        return "".join(f"{_as_json(each)}\n" for each in found)
    if form is MessageFormat.short:
        parts = [_short(each) for each in found]
    else:
        parts = [_Picture(each, color).text() + "\n" for each in found]
    if len(parts) > 1:
        parts.append(f"found {len(parts)} errors")
    return "".join(f"{part}\n" for part in parts)


def _as_json(diagnostic: Diagnostic) -> str:
    """Returns a diagnostic as one line of JSON."""
    place = diagnostic.place
    return json.dumps(
        {
            "code": diagnostic.code,
            "file": place.file if place else None,
            "line": place.line or None if place else None,
            "column": place.column or None if place else None,
            "path": dotted(diagnostic.path) or None,
            "message": diagnostic.message,
            "hint": diagnostic.hint,
        },
        ensure_ascii=False,
    )


def _short(diagnostic: Diagnostic) -> str:
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    hint = f" (hint: {diagnostic.hint})" if diagnostic.hint else ""
    return _printable(" ".join(f"{where}error[{diagnostic.code}]: {diagnostic.message}{hint}".split("\n")))


class _Picture:
    """Draws one diagnostic as the compilers of Rust and ruff do."""

    def __init__(self, diagnostic: Diagnostic, color: bool) -> None:
        self._it = diagnostic
        self._color = color

    def text(self) -> str:
        """Returns the picture: error, source line with a caret, and hint."""
        head = f"{self._paint(f'error[{self._it.code}]', 'red')}: {_printable(self._it.message)}"
        lines = [head, *self._source()]
        if self._it.hint:
            lines += ["", f"{self._paint('hint', 'cyan')}: {_printable(self._it.hint)}"]
        return "\n".join(lines)

    def _source(self) -> Iterable[str]:
        """Yields the lines with the place and, if known, the source line and a caret."""
        place, source = self._it.place, self._it.source_line
        if place is None:
            return
        number = str(place.line) if place.line else ""
        margin = " " * len(number)
        yield f"{margin}{self._paint('-->', 'blue')} {place}"
        if source is None or not place.column:
            return
        shown, column = _window(source, place.column)
        culprit = shown[column - 1 : column - 1 + max(1, place.length)]
        carets = "^" * max(1, _width(culprit))
        bar = self._paint("|", "blue")
        yield f"{margin} {bar}"
        yield f"{self._paint(number, 'blue')} {bar} {shown}"
        yield f"{margin} {bar} {_blank(shown[: column - 1])}{self._paint(carets, 'red')}"
        yield f"{margin} {bar}"

    def _paint(self, text: str, color: str) -> str:
        return typer.style(text, fg=color, bold=True) if self._color else text


def _window(source: str, column: int) -> tuple[str, int]:
    """Returns the part of a long line to show, and the culprit's column in it."""
    line = _printable(source.rstrip("\r\n"))
    if len(line) <= _WIDEST_LINE:
        return line, column
    start = max(0, column - 1 - _BEFORE_CULPRIT)
    shown = line[start : start + _WIDEST_LINE]
    return (f"...{shown}", column - start + 3) if start else (shown, column)


def _printable(text: str) -> str:
    """Returns `text` without control characters: a plan's content must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _width(text: str) -> int:
    """Returns the number of columns of `text` on a terminal, where East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _blank(text: str) -> str:
    """Returns blanks exactly as wide as `text`; a tab stays one."""
    return "".join("\t" if char == "\t" else " " * _width(char) for char in text)

"""Finds the position of each key of a TOML document.

tomli reports only the position of a syntax error. `index` scans a document that tomli has already accepted, so it need not
validate: it only has to tell keys, headers and values apart.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import tomli

from sley_core.errors import KeyPath


class TextSpan(NamedTuple):
    """Names characters of one line, counted from 1."""

    line: int
    column: int
    length: int


class Spot(NamedTuple):
    """Holds where a key and its value are in the text; for a table header, and for an item of an array, both are the same."""

    key: TextSpan
    value: TextSpan


def index(text: str) -> dict[KeyPath, Spot]:
    r"""Returns the spots of every key, table and array item of `text`, which tomli must accept; line ends are "\\n".

    A table that only longer keys imply (`a` in `[a.b]`) is located at its part of the first of them.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.spots


_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[\s,]|#[^\n]*)*")
_BARE = re.compile(r"[^\s=.\[\]{}\"'#,]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRING = re.compile(
    r'"""(?:[^\\"]|\\[\s\S]|"{1,2}(?!"))*"{3,5}'
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:[^\\"\n]|\\.)*"'
    r"|'[^'\n]*'"
)


class _Scanner:
    """Scans a TOML text from start to end and collects the spots of its keys."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.spots: dict[KeyPath, Spot] = {}
        self.lengths: dict[KeyPath, int] = {}  # of arrays of tables, as far as they have been read

    def document(self) -> None:
        """Scans the full text and fills `spots`."""
        table: KeyPath = ()
        while self.skip(_GAP):
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.key_and_value(table)

    def header(self) -> KeyPath:
        """Scans a table header; returns the path of its table, with the item's number for `[[key]]`."""
        start = self.at
        double = self.text.startswith("[[", start)
        self.at += 2 if double else 1
        parts = self.key()
        self.at += 2 if double else 1
        whole = self.span(start, self.at)
        path: KeyPath = ()
        for name, span in parts[:-1]:
            path = (*path, name)
            self.spots.setdefault(path, Spot(span, span))
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
        name, span = parts[-1]
        path = (*path, name)
        if double:
            self.spots.setdefault(path, Spot(span, whole))
            item = self.lengths.get(path, 0)
            self.lengths[path] = item + 1
            path = (*path, item)
        self.spots[path] = Spot(span, whole)
        return path

    def key_and_value(self, table: KeyPath) -> None:
        """Scans `key = value` in the table at `table` and records their spots."""
        path = table
        parts = self.key()
        for name, span in parts:
            path = (*path, name)
            self.spots.setdefault(path, Spot(span, span))
        self.at += 1  # the equals sign
        self.skip(_BLANK)
        self.spots[path] = Spot(parts[-1][1], self.value(path))

    def key(self) -> list[tuple[str, TextSpan]]:
        """Returns the parts of a dotted key; leaves the scanner at what follows it."""
        parts = []
        while True:
            self.skip(_BLANK)
            start = self.at
            quoted = self.text[start] in "\"'"
            self.skip(_STRING if quoted else _BARE)
            spelled = self.text[start : self.at]
            name = tomli.loads(f"key = {spelled}")["key"] if quoted else spelled
            parts.append((name, self.span(start, self.at)))
            self.skip(_BLANK)
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def value(self, path: KeyPath) -> TextSpan:
        """Scans the value at `path`, with all that it contains, and returns its span."""
        start = self.at
        match self.text[start]:
            case "[":
                self.array(path)
            case "{":
                self.inline_table(path)
            case '"' | "'":
                self.skip(_STRING)
            case _:
                scalar = _SCALAR.match(self.text, start)
                assert scalar, f"no value at {self.span(start, start)}"
                self.at = start + len(scalar.group().rstrip())
        return self.span(start, self.at)

    def array(self, path: KeyPath) -> None:
        """Scans an array and records the spot of each item."""
        self.at += 1
        item = 0
        while self.skip(_GAP) and self.text[self.at] != "]":
            span = self.value((*path, item))
            self.spots[*path, item] = Spot(span, span)
            item += 1
        self.at += 1

    def inline_table(self, path: KeyPath) -> None:
        """Scans an inline table and records the spots of its keys."""
        self.at += 1
        while self.skip(_GAP) and self.text[self.at] != "}":
            self.key_and_value(path)
        self.at += 1

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Moves past `pattern` if it matches here; returns whether there is text left."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return self.at < len(self.text)

    def span(self, start: int, end: int) -> TextSpan:
        """Returns the characters from `start` to `end`, or to the end of the first line."""
        line = bisect_right(self.line_starts, start)
        begin = self.line_starts[line - 1]
        newline = self.text.find("\n", start, end)
        stop = end if newline < 0 else newline
        return TextSpan(line, start - begin + 1, max(1, stop - start))

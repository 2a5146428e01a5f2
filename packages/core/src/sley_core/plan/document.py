"""A plan as its author wrote it: the tables as plain data, and the place of every key in the file or on the command line.

Later code works on the data, and asks the document for the place of a key path that has a problem.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli

from sley_core.errors import Diagnostic, KeyPath, Place, SleyError
from sley_core.table import Table
from sley_core.words import make_printable


@dataclass(frozen=True)
class Override:
    """One `--set`. number: its position on the command line, from 1. text: its unchanged text."""

    number: int
    text: str
    path: KeyPath

    @property
    def place(self) -> Place:
        return Place(f"--set #{self.number}", column=1, length=len(self.text))


@dataclass(frozen=True)
class Document:
    """A plan's tables with the places of their keys.

    file: the file name for messages. spans: the positions of keys and values; empty for tables that a program built.
    """

    file: str
    folder: Path | None
    tables: dict[str, Any]
    lines: tuple[str, ...] = ()
    spans: Mapping[KeyPath, KeySpan] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    def origin(self, path: KeyPath) -> Place | None:
        """Returns the place of the value at `path`, or None if the document does not contain the path."""
        if not _has_path(self.tables, path):
            return None
        if override := self._find_override(path):
            return override.place
        key_span = self.spans.get(path)
        return Place(self.file, *key_span.key) if key_span else None if self.spans else Place(self.file)

    def diagnostic(
        self, code: str, message: str, path: KeyPath, hint: str | None = None, at: Literal["key", "value"] = "value"
    ) -> Diagnostic:
        """Returns a diagnostic with the place of the key or value at `path`, or of the closest enclosing table."""
        place, line = self.place(path, at)
        hint = make_printable(hint) if hint else None
        return Diagnostic(code, make_printable(message), path=path, place=place, source_line=line, hint=hint)

    def place(self, path: KeyPath, at: Literal["key", "value"] = "value") -> tuple[Place, str | None]:
        """Returns the place of `path`, or of the closest enclosing table, and the text of the line."""
        for length in range(len(path), 0, -1):
            prefix = path[:length]
            override = self._find_override(prefix)
            if override:
                return override.place, make_printable(override.text)
            if prefix in self.spans:
                key_span = self.spans[prefix]
                place = Place(self.file, *(key_span.key if at == "key" and length == len(path) else key_span.value))
                return place, self.line(place.line)
        return Place(self.file), None

    def line(self, number: int) -> str | None:
        """Returns the text of line `number`, counted from 1, with every character one column wide."""
        return make_printable(self.lines[number - 1].replace("\t", " ")) if 0 < number <= len(self.lines) else None

    def _find_override(self, path: KeyPath) -> Override | None:
        """Returns the last override of `path` or an enclosing table. If the file does not contain `path`, overrides of keys
        inside `path` also count.
        """
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                return override
            if override.path[: len(path)] == path and path not in self.spans:
                return override
        return None


_OVERRIDE = re.compile(r"--set #([0-9]+)")


def sort_by_place(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics without duplicates: first those in files, from top to bottom, then those of each `--set`."""

    def sort_key(diagnostic: Diagnostic) -> tuple[bool, int, str, int, int]:
        place = diagnostic.place or Place("")
        override = _OVERRIDE.fullmatch(place.file)
        return (bool(override), int(override[1]) if override else 0, place.file, place.line, place.column)

    return sorted(dict.fromkeys(diagnostics), key=sort_key)


def add_places(error: SleyError, document: Document) -> SleyError:
    """Adds the places in `document` to the diagnostics of `error` that have a path; returns the same error."""
    located = []
    for diagnostic in error.diagnostics:
        if diagnostic.path and not diagnostic.place:
            place, line = document.place(diagnostic.path)
            diagnostic = replace(diagnostic, place=place, source_line=line)
        located.append(diagnostic)
    error.diagnostics = tuple(located)
    error.args = ("\n".join(str(diagnostic) for diagnostic in error.diagnostics),)
    return error


def to_plain_data(value: Any) -> Any:
    """Converts a value to TOML types: tables to dicts without None, arrays to lists, paths to strings."""
    if isinstance(value, Table):
        return to_plain_data(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [to_plain_data(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _has_path(tables: Any, path: KeyPath) -> bool:
    for part in path:
        if isinstance(tables, dict) and part in tables:
            tables = tables[str(part)]
        elif isinstance(tables, list) and isinstance(part, int) and part < len(tables):
            tables = tables[part]
        else:
            return False
    return True


class TextSpan(NamedTuple):
    """A range of characters in one line; line and column start at 1."""

    line: int
    column: int
    length: int


class KeySpan(NamedTuple):
    """The positions of a key and its value in the text. Table headers and array items have two equal positions."""

    key: TextSpan
    value: TextSpan


def index_keys(text: str) -> dict[KeyPath, KeySpan]:
    """Returns the positions of every key, table and array item in the valid TOML `text`, with line ends "\\n".

    An implicit table (`a` in `[a.b]`) has the position of its name in the first such header or key. tomli does not report
    positions. It has validated the text, so the scanner only distinguishes keys, headers and values.
    """
    scanner = _Scanner(text)
    scanner.scan_document()
    return scanner.spans


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
    """Scans a TOML text and collects the positions of its keys in `spans`. offset: the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offset = 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.spans: dict[KeyPath, KeySpan] = {}
        self.array_lengths: dict[KeyPath, int] = {}  # the number of `[[key]]` headers so far

    def scan_document(self) -> None:
        table: KeyPath = ()
        while self.skip(_GAP):
            if self.text[self.offset] == "[":
                table = self.scan_header()
            else:
                self.scan_pair(table)

    def scan_header(self) -> KeyPath:
        """Scans a table header; returns the path of its table, with the item's index for `[[key]]`."""
        start = self.offset
        is_array = self.text.startswith("[[", start)
        self.offset += 2 if is_array else 1
        parts = self.scan_key()
        self.offset += 2 if is_array else 1
        header_span = self.line_span(start, self.offset)
        path: KeyPath = ()
        for name, span in parts[:-1]:
            path = (*path, name)
            self.spans.setdefault(path, KeySpan(span, span))
            if path in self.array_lengths:
                path = (*path, self.array_lengths[path] - 1)
        name, span = parts[-1]
        path = (*path, name)
        if is_array:
            self.spans.setdefault(path, KeySpan(span, header_span))
            index = self.array_lengths.get(path, 0)
            self.array_lengths[path] = index + 1
            path = (*path, index)
        self.spans[path] = KeySpan(span, header_span)
        return path

    def scan_pair(self, table: KeyPath) -> None:
        """Scans `key = value` in the table at `table` and records the positions."""
        path = table
        parts = self.scan_key()
        for name, span in parts:
            path = (*path, name)
            self.spans.setdefault(path, KeySpan(span, span))
        self.offset += 1  # the equals sign
        self.skip(_BLANK)
        self.spans[path] = KeySpan(parts[-1][1], self.scan_value(path))

    def scan_key(self) -> list[tuple[str, TextSpan]]:
        """Scans a dotted key and returns its parts."""
        parts = []
        while True:
            self.skip(_BLANK)
            start = self.offset
            is_quoted = self.text[start] in "\"'"
            self.skip(_STRING if is_quoted else _BARE)
            text = self.text[start : self.offset]
            name = tomli.loads(f"key = {text}")["key"] if is_quoted else text
            parts.append((name, self.line_span(start, self.offset)))
            self.skip(_BLANK)
            if self.text[self.offset] != ".":
                return parts
            self.offset += 1

    def scan_value(self, path: KeyPath) -> TextSpan:
        """Scans the value at `path`, including its items, and returns its position."""
        start = self.offset
        match self.text[start]:
            case "[":
                self.scan_array(path)
            case "{":
                self.scan_inline_table(path)
            case '"' | "'":
                self.skip(_STRING)
            case _:
                scalar = _SCALAR.match(self.text, start)
                assert scalar, f"no value at {self.line_span(start, start)}"
                self.offset = start + len(scalar.group().rstrip())
        return self.line_span(start, self.offset)

    def scan_array(self, path: KeyPath) -> None:
        self.offset += 1
        index = 0
        while self.skip(_GAP) and self.text[self.offset] != "]":
            span = self.scan_value((*path, index))
            self.spans[*path, index] = KeySpan(span, span)
            index += 1
        self.offset += 1

    def scan_inline_table(self, path: KeyPath) -> None:
        self.offset += 1
        while self.skip(_GAP) and self.text[self.offset] != "}":
            self.scan_pair(path)
        self.offset += 1

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Skips a match of `pattern` at the current offset; returns whether any text remains."""
        match = pattern.match(self.text, self.offset)
        if match:
            self.offset = match.end()
        return self.offset < len(self.text)

    def line_span(self, start: int, end: int) -> TextSpan:
        """Returns the span of the characters from `start` to `end`, limited to the first line."""
        line = bisect_right(self.line_starts, start)
        newline = self.text.find("\n", start, end)
        stop = end if newline < 0 else newline
        return TextSpan(line, start - self.line_starts[line - 1] + 1, max(1, stop - start))

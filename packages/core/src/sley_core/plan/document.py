"""A plan as its author wrote it: its tables as plain data, and the place of every key in the file or on the command line.

All later code works on the data; code that finds a problem at a key path gets the place from the document.
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
    """Holds one `--set`: `number` counts from 1, `text` is as it was typed."""

    number: int
    text: str
    path: KeyPath

    @property
    def place(self) -> Place:
        return Place(f"--set #{self.number}", column=1, length=len(self.text))


@dataclass(frozen=True)
class Document:
    """Holds tables with places. `file` is the name to show; `spots` is empty for tables that were never text.

    bases: for each path that the plan took from a file that it extends, that file's document.
    """

    file: str
    folder: Path | None
    tables: dict[str, Any]
    lines: tuple[str, ...] = ()
    spots: Mapping[KeyPath, KeySpan] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    bases: Mapping[KeyPath, Document] = field(default_factory=dict, repr=False)

    def owner(self, path: KeyPath) -> Document:
        """Returns the document of the file that wrote `path`: this one, or one that it extends."""
        return self.bases.get(path, self)

    def folder_of(self, path: KeyPath) -> Path | None:
        """Returns the folder in which a relative path at `path` starts: the plan's for a `--set`, else that of its file."""
        return self.folder if self._find_override(path) else self.owner(path).folder

    def origin(self, path: KeyPath) -> Place | None:
        """Returns where the user wrote the value at `path`; None if it is not in the document."""
        if not _has_path(self.tables, path):
            return None
        if override := self._find_override(path):
            return override.place
        owner = self.owner(path)
        spot = owner.spots.get(path)
        return Place(owner.file, *spot.key) if spot else None if owner.spots else Place(owner.file)

    def diagnostic(
        self, code: str, message: str, path: KeyPath, hint: str | None = None, at: Literal["key", "value"] = "value"
    ) -> Diagnostic:
        """Returns a diagnostic at `path`, placed at its key or value, or at the closest table around it that was written."""
        place, line = self.place(path, at)
        hint = make_printable(hint) if hint else None
        return Diagnostic(code, make_printable(message), path=path, place=place, source_line=line, hint=hint)

    def place(self, path: KeyPath, at: Literal["key", "value"] = "value") -> tuple[Place, str | None]:
        """Returns the place of `path`, or of the closest table around it, and the text there."""
        for length in range(len(path), 0, -1):
            near = path[:length]
            override = self._find_override(near)
            if override:
                return override.place, make_printable(override.text)
            owner = self.owner(near)
            if near in owner.spots:
                spot = owner.spots[near]
                place = Place(owner.file, *(spot.key if at == "key" and length == len(path) else spot.value))
                return place, owner.line(place.line)
        return Place(self.file), None

    def line(self, number: int) -> str | None:
        """Returns the text of a line, counted from 1, for display: each character is one column wide."""
        return make_printable(self.lines[number - 1].replace("\t", " ")) if 0 < number <= len(self.lines) else None

    def _find_override(self, path: KeyPath) -> Override | None:
        """Returns the last override that set `path`, something around it, or (if the file has no such table) inside it."""
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                return override
            if override.path[: len(path)] == path and path not in self.owner(path).spots:
                return override
        return None


_OVERRIDE = re.compile(r"--set #([0-9]+)")


def sort_by_place(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics without duplicates, in reading order: the file top to bottom, then each `--set`."""

    def order(diagnostic: Diagnostic) -> tuple[bool, int, str, int, int]:
        place = diagnostic.place or Place("")
        override = _OVERRIDE.fullmatch(place.file)
        return (bool(override), int(override[1]) if override else 0, place.file, place.line, place.column)

    return sorted(dict.fromkeys(diagnostics), key=order)


def add_places(error: SleyError, document: Document) -> SleyError:
    """Gives the diagnostics of `error` that have a path their places in `document`; returns the same error."""
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
    """Returns a value as TOML has it: tables as dicts without absent keys, arrays as lists."""
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
    """Names characters of one line, counted from 1."""

    line: int
    column: int
    length: int


class KeySpan(NamedTuple):
    """Holds where a key and its value are in the text; for a table header, and for an item of an array, both are the same."""

    key: TextSpan
    value: TextSpan


def index_keys(text: str) -> dict[KeyPath, KeySpan]:
    """Returns the spots of every key, table and array item of `text`, which tomli must accept; line ends are "\\n".

    A table that only longer keys imply (`a` in `[a.b]`) is located at its part of the first of them. tomli has no places of
    keys, and has validated the text, so `index_keys` only has to tell keys, headers and values apart.
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
        self.spots: dict[KeyPath, KeySpan] = {}
        self.lengths: dict[KeyPath, int] = {}  # of arrays of tables, as far as they have been read

    def document(self) -> None:
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
            self.spots.setdefault(path, KeySpan(span, span))
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
        name, span = parts[-1]
        path = (*path, name)
        if double:
            self.spots.setdefault(path, KeySpan(span, whole))
            item = self.lengths.get(path, 0)
            self.lengths[path] = item + 1
            path = (*path, item)
        self.spots[path] = KeySpan(span, whole)
        return path

    def key_and_value(self, table: KeyPath) -> None:
        """Scans `key = value` in the table at `table` and records their spots."""
        path = table
        parts = self.key()
        for name, span in parts:
            path = (*path, name)
            self.spots.setdefault(path, KeySpan(span, span))
        self.at += 1  # the equals sign
        self.skip(_BLANK)
        self.spots[path] = KeySpan(parts[-1][1], self.value(path))

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
        self.at += 1
        item = 0
        while self.skip(_GAP) and self.text[self.at] != "]":
            span = self.value((*path, item))
            self.spots[*path, item] = KeySpan(span, span)
            item += 1
        self.at += 1

    def inline_table(self, path: KeyPath) -> None:
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

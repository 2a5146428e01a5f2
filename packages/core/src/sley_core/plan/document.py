"""Reads a plan as its author wrote it: the tables as plain data, and the place of every key in the file or on the command line.

Later code works on the data, and asks the document for the place of a key path that has a problem.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli  # unlike tomllib before Python 3.14, its errors have a line and a column

from sley_core.errors import Diagnostic, KeyPath, Place, PlanError, SleyError, format_path
from sley_core.table import Table
from sley_core.words import describe_value, is_utf8, make_printable


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

    file: the file name for messages. lines, spans: the text and the positions of its keys; empty for tables that a program
    built.
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
        if not self.lines:
            return Place(self.file)
        return Place(self.file, *self.spans[path].key) if path in self.spans else None

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
            if override := self._find_override(prefix):
                return override.place, make_printable(override.text)
            if prefix in self.spans:
                key_span = self.spans[prefix]
                place = Place(self.file, *(key_span.key if at == "key" and length == len(path) else key_span.value))
                return place, printable_line(self.lines[place.line - 1])
        return Place(self.file), None

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
    table: KeyPath = ()
    while scanner.skip(_GAP):
        if text[scanner.offset] == "[":
            table = scanner.scan_header()
        else:
            scanner.scan_pair(table)
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
        """Scans the value at `path`, including its items and keys, and returns its position."""
        start = self.offset
        first = self.text[start]
        if first in "[{":
            self.offset += 1
            index = 0
            while self.skip(_GAP) and self.text[self.offset] not in "]}":
                if first == "{":
                    self.scan_pair(path)
                else:
                    span = self.scan_value((*path, index))
                    self.spans[*path, index] = KeySpan(span, span)
                    index += 1
            self.offset += 1
        else:
            scalar = (_STRING if first in "\"'" else _SCALAR).match(self.text, start)
            assert scalar, f"no value at {self.line_span(start, start)}"
            self.offset = start + len(scalar.group().rstrip())
        return self.line_span(start, self.offset)

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


def printable_line(line: str) -> str:
    """Returns a line of a plan's text for messages, with every character one column wide."""
    return make_printable(line.replace("\t", " "))


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of the plan at `path`.

    Raises PlanError "plan-missing", "plan-is-folder", "plan-unreadable", "plan-not-utf8", "syntax" or "set-invalid".
    """
    name = str(path)
    place = Place(name)
    try:
        with Path(path).open("rb") as file:
            content = file.read()
    except FileNotFoundError:
        hint = "use a path relative to the current folder"
        raise PlanError("plan-missing", f"the file `{name}` does not exist", place=place, hint=hint) from None
    except IsADirectoryError:
        raise PlanError("plan-is-folder", f"`{name}` is a folder, not a plan", place=place) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("plan-unreadable", f"cannot read `{name}`: {reason}", place=place) from None
    folder = Path(path).absolute().parent
    if not is_utf8(str(folder)):
        message = f"the name of the folder `{make_printable(str(folder))}` is not UTF-8"
        raise PlanError("plan-unreadable", message, place=place)
    return read_text(_decode(content, name), name, folder, overrides)


def read_text(text: str, file: str, folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of a plan's text; `file` is its name in messages. Raises the same errors as `read_file`."""
    return _apply_overrides(_parse(text, file, folder), overrides)


def _parse(text: str, file: str, folder: Path | None) -> Document:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    try:
        tables, spans = tomli.loads(text), index_keys(text)
    except tomli.TOMLDecodeError as error:
        # The position may be after the end of the document.
        line = min(error.lineno, len(lines))
        column = min(error.colno, len(lines[line - 1]) + 1)
        problem = Diagnostic(
            "syntax",
            f"this is not TOML: {_lower_first(error.msg)}",
            place=Place(file, line, column),
            source_line=printable_line(lines[line - 1]),
        )
        raise PlanError.from_diagnostics([problem]) from None
    except (RecursionError, ValueError) as error:
        # Python rejects deep nesting, numbers with thousands of digits, and invalid dates.
        raise PlanError("syntax", f"this is not TOML: {_lower_first(str(error))}", place=Place(file)) from None
    return Document(file, folder and folder.absolute(), tables, lines, spans)


def read_tables(tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of a copy of `tables`, which a program built."""
    return _apply_overrides(Document("<tables>", folder and folder.absolute(), to_plain_data(tables)), overrides)


def _apply_overrides(document: Document, texts: Sequence[str]) -> Document:
    """Returns the document with the overrides applied in order. Raises a single PlanError for all invalid overrides."""
    overrides: list[Override] = []
    problems: list[Diagnostic] = []
    for number, text in enumerate(texts, start=1):
        try:
            path = apply_override(document.tables, text)
        except PlanError as error:
            place = Override(number, text, ()).place
            problems += [
                Diagnostic(
                    problem.code, make_printable(problem.message), problem.path, place, make_printable(text), problem.hint
                )
                for problem in error.diagnostics
            ]
        else:
            overrides.append(Override(number, text, path))
    if problems:
        raise PlanError.from_diagnostics(problems)
    return replace(document, overrides=tuple(overrides))


def _decode(content: bytes, name: str) -> str:
    """Decodes the content of a plan. Raises PlanError "plan-not-utf8" with line and column."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        lines = content[: error.start].decode().split("\n")
        message = f"`{name}` is not UTF-8: invalid byte 0x{content[error.start]:02x}"
        place = Place(name, len(lines), len(lines[-1]) + 1)
        raise PlanError("plan-not-utf8", message, place=place, hint="save the file as UTF-8") from None


def _lower_first(message: str) -> str:
    """Returns tomli's message without its position, beginning with a lower-case letter."""
    message = re.sub(r" \(at .*\)$", "", message)
    return message[:1].lower() + message[1:]


_BARE_WORD = re.compile(r"[^\s\"'\[\]{}=,#](?:[^\"'\[\]{}=,#\n]*[^\s\"'\[\]{}=,#])?")
_QUOTE_HINT = "write VALUE as TOML and protect the quotes of a string from the shell: --set 'run.name=\"first try\"'"


def apply_override(tables: dict[str, Any], text: str) -> KeyPath:
    """Sets the value of the override `text` in `tables`, and creates the tables on its path; returns the path.

    A number is an index of an array; the index after the last item appends an item. Raises PlanError "set-invalid", without a
    place.
    """
    if not is_utf8(text):
        raise PlanError("set-invalid", f"`{make_printable(text)}` is not UTF-8")
    match = re.match(r"((?:[^=\"']|\"(?:[^\"\\]|\\.)*\"|'[^']*')*)(=?)", text)
    assert match, text
    name, equals, value_text = match[1].strip(), match[2], text[match.end() :].strip()
    if not equals:
        raise PlanError("set-invalid", f"`{text}` must have the form key.path=VALUE", hint=_QUOTE_HINT)
    parts = _parse_key(name)
    value = _parse_value(value_text)
    container: Any = tables
    path: KeyPath = ()
    for part, next_part in zip(parts, (*parts[1:], None), strict=True):
        key = _resolve_key(container, part, path)
        path = (*path, key)
        if next_part is None:
            container[key] = value
            break
        if isinstance(container, dict):
            container.setdefault(key, [] if next_part == "0" else {})
        container = container[key]
        if not isinstance(container, dict | list):
            raise PlanError("set-invalid", f"`{format_path(path)}` is {describe_value(container)}, which has no keys")
    return path


def _resolve_key(container: Any, part: str, path: KeyPath) -> str | int:
    """Converts `part` to a key of the table `container`, or to an index of the array. Appends an empty item for the index after
    the last item.
    """
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or int(part) > len(container):
        indices = f"0 to {len(container)}" if container else "0"
        raise PlanError("set-invalid", f"`{format_path(path)}` is an array: `{part}` must be a number, {indices}")
    if int(part) == len(container):
        container.append({})
    return int(part)


def _parse_key(name: str) -> list[str]:
    """Returns the parts of a dotted TOML key. Raises PlanError "set-invalid"."""
    try:
        nested: Any = tomli.loads(f"{name} = 0") if "\n" not in name else {}
    except (tomli.TOMLDecodeError, RecursionError):
        nested = {}
    parts = []
    while isinstance(nested, dict) and len(nested) == 1:
        ((part, nested),) = nested.items()
        parts.append(part)
    if nested != 0 or not parts:
        raise PlanError("set-invalid", f"`{name}` is not a key path such as `gradient_handlers.0.bucket_mb`")
    return parts


def _parse_value(text: str) -> Any:
    """Returns the TOML value of `text`, or `text` itself if it is a bare word. Raises PlanError "set-invalid"."""
    try:
        parsed = tomli.loads(f"value = {text}")
        if parsed.keys() == {"value"}:
            return parsed["value"]
    except (tomli.TOMLDecodeError, ValueError, RecursionError):
        if _BARE_WORD.fullmatch(text):
            return text
    raise PlanError("set-invalid", f"{describe_value(text)} is neither a TOML value nor a bare word", hint=_QUOTE_HINT)

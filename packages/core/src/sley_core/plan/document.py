"""Reads a plan as its author wrote it: the tables as plain data, and the place of every key in the file or on the command line.

Later code works on the data. To report a problem, it asks the document for the place of the key path.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli  # unlike tomllib before Python 3.14, its errors have a line and a column

from sley_core.errors import Diagnostic, KeyPath, Place, PlanError, SleyError, format_path, make_printable
from sley_core.table import Table, describe_value

OVERRIDE = "--set #"
"""The start of the file name in the `Place` of an override. The number of the `--set` follows it."""


class Override(NamedTuple):
    """One `--set`: the path that it sets, its place for messages, and its text as the user wrote it."""

    path: KeyPath
    place: Place
    text: str


class KeySpan(NamedTuple):
    """The places of a key and its value. They are equal for an array item and for a name before a dot."""

    key: Place
    value: Place


@dataclass(frozen=True)
class Document:
    """A plan's tables with the places of their keys. file: the file name for messages. folder: the folder in which relative
    paths start, or None. lines, spans: the lines of the text and the places of its keys; empty if a program built the tables.
    overrides: the `--set`s, which `tables` includes.
    """

    file: str
    folder: Path | None
    tables: dict[str, Any]
    lines: tuple[str, ...] = ()
    spans: Mapping[KeyPath, KeySpan] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    def origin(self, path: KeyPath) -> Place | None:
        """Returns the place that sets the value at `path`, or None if the document does not contain the path."""
        value: Any = self.tables
        try:
            for part in path:
                value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
        if override := self._find_override(path):
            return override.place
        if not self.lines:
            return Place(self.file)
        return self.spans[path].key if path in self.spans else None

    def diagnostic(
        self, code: str, message: str, path: KeyPath, hint: str | None = None, at: Literal["key", "value"] = "value"
    ) -> Diagnostic:
        """Returns a diagnostic with the place of the key or value at `path`, or else of the closest enclosing table."""
        place, line = self.place(path, at)
        hint = make_printable(hint) if hint else None
        return Diagnostic(code, make_printable(message), path=path, place=place, source_line=line, hint=hint)

    def place(self, path: KeyPath, at: Literal["key", "value"] = "value") -> tuple[Place, str | None]:
        """Returns the place of `path`, or else of the closest enclosing table, and the text of the line there. If neither place
        is known, returns the file and None. at: whether the place is that of the key or that of its value.
        """
        for length in range(len(path), 0, -1):
            prefix = path[:length]
            if override := self._find_override(prefix):
                return override.place, make_printable(override.text)
            if prefix in self.spans:
                key_span = self.spans[prefix]
                place = key_span.key if at == "key" and length == len(path) else key_span.value
                return place, printable_line(self.lines[place.line - 1])
        return Place(self.file), None

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """In a `with` block, adds places to the diagnostics of the block's error that have only a path."""
        try:
            yield
        except SleyError as error:
            add_locations(error, self)
            raise

    def _find_override(self, path: KeyPath) -> Override | None:
        """Returns the last override that sets `path`, a table around it or, if the file lacks `path`, a key in it; or None."""
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                return override
            if override.path[: len(path)] == path and path not in self.spans:
                return override
        return None


def sort_by_place(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics without duplicates: first problems in files from top to bottom, then problems of `--set`s."""

    def sort_key(diagnostic: Diagnostic) -> tuple[bool, int, Place]:
        place = diagnostic.place or Place("")
        is_override = place.file.startswith(OVERRIDE)
        return is_override, len(place.file) if is_override else 0, place  # `--set #2` comes before `--set #10`

    return sorted(dict.fromkeys(diagnostics), key=sort_key)


def add_locations(error: SleyError, document: Document) -> SleyError:
    """Adds the places in `document` to the diagnostics of `error` that have a path but no place; returns the same error."""

    def add_place(diagnostic: Diagnostic) -> Diagnostic:
        if diagnostic.place or not diagnostic.path:
            return diagnostic
        place, line = document.place(diagnostic.path)
        return replace(diagnostic, place=place, source_line=line)

    error.diagnostics = tuple(map(add_place, error.diagnostics))
    error.args = ("\n".join(map(str, error.diagnostics)),)
    return error


def to_plain_data(value: Any) -> Any:
    """Returns `value` as TOML types: tables become dicts without None values, tuples become lists, and paths become strings."""
    if isinstance(value, Table):
        return to_plain_data(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [to_plain_data(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def index_keys(text: str, file: str) -> dict[KeyPath, KeySpan]:
    """Returns the spans of all keys, tables and array items in `text`, the valid TOML content of `file`; tomli does not report
    them. An implicit table, such as `a` in `[a.b]`, gets the span of its name in the first header or key that contains it.
    Lines must end with "\\n".
    """
    scanner = _Scanner(text, file)
    table: KeyPath = ()
    while scanner.skip(_GAP):
        if text[scanner.offset] == "[":
            table = scanner.scan_header()
        else:
            scanner.scan_pair(table)
    return scanner.spans


_BLANK = re.compile(r"[ \t]*")  # spaces and tabs
_GAP = re.compile(r"(?:[\s,]|#[^\n]*)*")  # white space, commas and comments
_BARE = re.compile(r"[^\s=.\[\]{}\"'#,]+")  # a key without quotes
_SCALAR = re.compile(r"[^,\]}#\n]+")  # a number, boolean or date
_STRING = re.compile(  # a string with any of the four kinds of quotes
    r'"""(?:[^\\"]|\\[\s\S]|"{1,2}(?!"))*"{3,5}'
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:[^\\"\n]|\\.)*"'
    r"|'[^'\n]*'"
)


class _Scanner:
    """Finds the places of the keys in a valid TOML text, and collects them in `spans`."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.offset = 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.spans: dict[KeyPath, KeySpan] = {}
        self.array_lengths: dict[KeyPath, int] = {}  # the number of `[[key]]` headers so far

    def scan_header(self) -> KeyPath:
        """Scans a table header; returns the path of its table, with the item's index for `[[key]]`."""
        start = self.offset
        is_array = self.text.startswith("[[", start)
        self.offset += 2 if is_array else 1
        *outer_parts, (name, span) = self.scan_key()
        self.offset += 2 if is_array else 1
        header_span = self.line_span(start, self.offset)
        path: KeyPath = ()
        for outer_name, outer_span in outer_parts:
            path = (*path, outer_name)
            self.spans.setdefault(path, KeySpan(outer_span, outer_span))
            if path in self.array_lengths:
                path = (*path, self.array_lengths[path] - 1)
        path = (*path, name)
        if is_array:
            self.spans.setdefault(path, KeySpan(span, header_span))
            index = self.array_lengths.get(path, 0)
            self.array_lengths[path] = index + 1
            path = (*path, index)
        self.spans[path] = KeySpan(span, header_span)
        return path

    def scan_pair(self, table: KeyPath) -> None:
        """Scans `key = value` in the table at `table` and records the places."""
        path = table
        parts = self.scan_key()
        for name, span in parts:
            path = (*path, name)
            self.spans.setdefault(path, KeySpan(span, span))
        self.offset += 1  # the equals sign
        self.skip(_BLANK)
        self.spans[path] = KeySpan(parts[-1][1], self.scan_value(path))

    def scan_key(self) -> list[tuple[str, Place]]:
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

    def scan_value(self, path: KeyPath) -> Place:
        """Scans the value at `path`, including its items and keys, and returns the place of the whole value."""
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
        """Moves `offset` past a match of `pattern` at `offset`, if there is one. Returns whether any text remains."""
        match = pattern.match(self.text, self.offset)
        if match:
            self.offset = match.end()
        return self.offset < len(self.text)

    def line_span(self, start: int, end: int) -> Place:
        """Returns the place of the characters [start, end) of the text, or of the part of them on the first line."""
        line = bisect_right(self.line_starts, start)
        newline = self.text.find("\n", start, end)
        stop = end if newline < 0 else newline
        return Place(self.file, line, start - self.line_starts[line - 1] + 1, max(1, stop - start))


def printable_line(line: str) -> str:
    """Returns a line of a plan's text for messages. Every character of the result is one column wide."""
    return make_printable(line.replace("\t", " "))


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Returns the plan in `path`. overrides: `key=VALUE`s. Raises PlanError "plan-unreadable", "syntax" or "set-invalid"."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("plan-unreadable", f"cannot read `{path}`: {reason}", place=Place(str(path))) from None
    return read_text(text, str(path), Path(path).absolute().parent, overrides)


def read_text(text: str, file: str, folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of the plan `text`. file: a name for messages. Raises PlanError "syntax" or "set-invalid"."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    try:
        tables, spans = tomli.loads(text), index_keys(text, file)
    except (RecursionError, ValueError) as error:  # Python rejects deep nesting, long numbers and invalid dates
        place, source_line, reason = Place(file), None, str(error)
        if isinstance(error, tomli.TOMLDecodeError):
            line = min(error.lineno, len(lines))  # the position may be after the end of the document
            place = Place(file, line, min(error.colno, len(lines[line - 1]) + 1))
            source_line, reason = printable_line(lines[line - 1]), error.msg
        message = f"this is not TOML: {reason[:1].lower()}{reason[1:]}"
        raise PlanError.from_diagnostics([Diagnostic("syntax", message, place=place, source_line=source_line)]) from None
    return add_overrides(Document(file, folder and folder.absolute(), tables, lines, spans), overrides)


def read_tables(tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of a copy of `tables`, which a program built. Raises PlanError "set-invalid"."""
    return add_overrides(Document("<tables>", folder and folder.absolute(), to_plain_data(tables)), overrides)


def add_overrides(document: Document, texts: Sequence[str]) -> Document:
    """Applies the `key=VALUE`s in `texts` to `document.tables`, in place. Returns the document with the overrides. Raises
    PlanError "set-invalid".
    """
    overrides: list[Override] = []
    problems: list[Diagnostic] = []
    for number, text in enumerate(texts, start=1):
        place = Place(f"{OVERRIDE}{number}", column=1, length=len(text))
        try:
            overrides.append(Override(apply_override(document.tables, text), place, text))
        except PlanError as error:
            problems += [
                replace(problem, message=make_printable(problem.message), place=place, source_line=make_printable(text))
                for problem in error.diagnostics
            ]
    if problems:
        raise PlanError.from_diagnostics(problems)
    return replace(document, overrides=tuple(overrides))


_KEY = re.compile(r"[\w-]+")  # a part of the path in an override
_BARE_WORD = re.compile(r"[^\s\"'\[\]{}=,#](?:[^\"'\[\]{}=,#\n]*[^\s\"'\[\]{}=,#])?")  # a string without quotes
_QUOTE_HINT = "write VALUE as TOML and protect the quotes of a string from the shell: --set 'run.name=\"first try\"'"


def apply_override(tables: dict[str, Any], text: str) -> KeyPath:
    """Applies the override `text` to `tables`, and creates missing tables on its path; returns the path. The index after the
    last item of an array appends an item. Raises PlanError "set-invalid", without a place.
    """
    name, _, value_text = (part.strip() for part in text.partition("="))
    parts = name.split(".")
    if "=" not in text or not all(map(_KEY.fullmatch, parts)):
        message = f"`{text}` must have the form key.path=VALUE, such as gradient_handlers.0.bucket_mb=50"
        raise PlanError("set-invalid", message, hint=_QUOTE_HINT)
    value = _parse_value(value_text)
    container: Any = tables
    path: KeyPath = ()
    for part, next_part in zip(parts, (*parts[1:], None), strict=True):
        key: str | int = part
        if isinstance(container, list):
            if not part.isdecimal() or int(part) > len(container):
                indices = f"0 to {len(container)}" if container else "0"
                raise PlanError("set-invalid", f"`{format_path(path)}` is an array, so `{part}` must be an index ({indices})")
            key = int(part)
            container += [{}] if key == len(container) else []
        elif not isinstance(container, dict):
            raise PlanError("set-invalid", f"`{format_path(path)}` is {describe_value(container)}, which has no keys")
        path = (*path, key)
        if next_part is None:
            container[key] = value
        else:
            if isinstance(container, dict):
                container.setdefault(key, [] if next_part == "0" else {})
            container = container[key]
    return path


def _parse_value(text: str) -> Any:
    """Returns the TOML value of `text`, or `text` itself if it is a bare word. Raises PlanError "set-invalid", also for a word
    such as `False`: as a string, it would count as true.
    """
    try:
        parsed = tomli.loads(f"value = {text}")
        if parsed.keys() == {"value"}:
            return parsed["value"]
    except (ValueError, RecursionError):
        if text.lower() in ("true", "false") or text in ("None", "null"):
            hint = f"write true or false in lower case, or remove a key that has no value; quote a string: '\"{text}\"'"
            raise PlanError("set-invalid", f"`{text}` is not a TOML value", hint=hint) from None
        if _BARE_WORD.fullmatch(text):
            return text
    raise PlanError("set-invalid", f"{describe_value(text)} is neither a TOML value nor a bare word", hint=_QUOTE_HINT)

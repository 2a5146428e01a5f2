"""Reads a plan into a `Document`: its file or text, the plan that it extends, and the overrides of `--set`.

Every failure has its own code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli  # unlike tomllib before Python 3.14, its errors have a line and a column

from sley_core.errors import Diagnostic, KeyPath, Place, PlanError, format_path
from sley_core.plan.document import Document, Override, index_keys, to_plain_data
from sley_core.table import expand_path
from sley_core.words import describe_value, is_utf8, make_printable

MAX_DEPTH = 32
"""The deepest nesting of tables and arrays; a plan needs four levels."""

MAX_BYTES = 16 << 20
"""The largest plan; endless input is not read for ever."""

INTEGER_LIMIT = 2**63


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of the plan at `path`. Raises PlanError: "plan-missing", "plan-is-folder", "plan-unreadable",
    "plan-not-utf8", "syntax", "too-deep", "out-of-range" (an integer beyond 64 bits), "set-invalid", and those of
    `merge_bases`.
    """
    return _apply_overrides(merge_bases(_read(path), _read), overrides)


def _read(path: str | Path) -> Document:
    """Returns the document of one file, without its bases."""
    name = str(path)
    place = Place(name)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise PlanError("plan-missing", f"there is no file `{name}`", place=place, hint=_suggest_plans(Path(path))) from None
    except IsADirectoryError:
        inside = Path(path) / "plan.toml"
        hint = f"name the file in it: `{inside}`" if inside.is_file() else _suggest_plans(inside)
        raise PlanError("plan-is-folder", f"`{name}` is a folder, not a plan", place=place, hint=hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("plan-unreadable", f"cannot read `{name}`: {reason}", place=place) from None
    if len(content) > MAX_BYTES:
        raise PlanError("plan-unreadable", f"cannot read `{name}`: it has more than {MAX_BYTES >> 20} MB", place=place)
    folder = Path(path).absolute().parent
    if not is_utf8(str(folder)):
        message = f"the name of the folder `{make_printable(str(folder))}` is not UTF-8"
        raise PlanError("plan-unreadable", message, place=place)
    return _parse(_decode(content, name), name, folder)


def read_text(text: str, file: str, folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of a plan's text; `file` is the name that messages show. Raises PlanError as `read_file` does."""
    return _apply_overrides(merge_bases(_parse(text, file, folder), _read), overrides)


def _parse(text: str, file: str, folder: Path | None) -> Document:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # tomli may point beyond the end of the document.
        line = min(error.lineno, len(lines))
        column = min(error.colno, len(lines[line - 1]) + 1)
        problem = Diagnostic(
            "syntax",
            f"this is not TOML: {_lower_first(error.msg)}",
            place=Place(file, line, column),
            source_line=make_printable(lines[line - 1].replace("\t", " ")),
        )
        raise PlanError.many([problem]) from None
    except (RecursionError, ValueError) as error:
        # Python itself refuses numbers of thousands of digits, and invalid dates.
        raise PlanError("syntax", f"this is not TOML: {_lower_first(str(error))}", place=Place(file)) from None
    try:
        spots = index_keys(text)
    except RecursionError:
        spots = {}  # `_check_values` refuses it
    return Document(file, folder and folder.absolute(), tables, lines, spots)


def read_tables(tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of tables that a program made; they are copied."""
    return _apply_overrides(Document("<tables>", folder and folder.absolute(), to_plain_data(tables)), overrides)


def _apply_overrides(document: Document, texts: Sequence[str]) -> Document:
    """Returns the document with the overrides applied in order; raises one PlanError for all that are invalid."""
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
        raise PlanError.many(problems)
    document = replace(document, overrides=tuple(overrides))
    _check_values(document)
    return document


def _check_values(document: Document) -> None:
    """Raises PlanError "too-deep", so that later code may recurse, or "out-of-range" for every integer beyond 64 bits."""
    large: list[Diagnostic] = []

    def walk(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict | list):
            if len(path) > MAX_DEPTH:
                message = f"`{make_printable(str(path[0]))}` has tables and arrays more than {MAX_DEPTH} deep"
                raise PlanError.many([document.diagnostic("too-deep", message, path[:1])])
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                walk(inner, (*path, key))
        elif isinstance(value, int) and not -INTEGER_LIMIT <= value < INTEGER_LIMIT:
            message = f"`{format_path(path)}` must be an integer of 64 bits, not {describe_value(value)}"
            large.append(document.diagnostic("out-of-range", message, path))

    walk(document.tables, ())
    if large:
        raise PlanError.many(large)


def _decode(content: bytes, name: str) -> str:
    """Returns the content as text; raises PlanError "plan-not-utf8" with line and column."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode()) + 1
        message = f"`{name}` is not UTF-8: the byte 0x{content[error.start]:02x} starts no character"
        raise PlanError("plan-not-utf8", message, place=Place(name, line, column), hint="save the file as UTF-8") from None


def _suggest_plans(path: Path) -> str | None:
    """Returns a hint for a missing file: some `*.toml` files of its folder, or what the path is relative to; or None."""
    try:
        plans = sorted(file.name for file in path.absolute().parent.glob("*.toml"))
    except (OSError, ValueError):
        return None
    if plans:
        return f"the plans there are {', '.join(f'`{name}`' for name in plans[:5])}"
    return "the path is relative to the current folder"


def _lower_first(message: str) -> str:
    message = re.sub(r" \(at .*\)$", "", message)
    return message[:1].lower() + message[1:]


_BARE_WORD = re.compile(r"[^\s\"'\[\]{}=,#](?:[^\"'\[\]{}=,#\n]*[^\s\"'\[\]{}=,#])?")
_QUOTE = "VALUE is TOML; a string needs quotes, which the shell takes away: --set 'run.name=\"first try\"'"


def apply_override(tables: dict[str, Any], text: str) -> KeyPath:
    """Sets in `tables` the value that `text` gives, creating tables on the path; returns the path that was set.

    A number is an index into an array; the number after its last item appends one. Raises PlanError "set-invalid",
    without a place.
    """
    if not is_utf8(text):
        raise PlanError("set-invalid", f"`{make_printable(text)}` is not UTF-8")
    match = re.match(r"((?:[^=\"']|\"(?:[^\"\\]|\\.)*\"|'[^']*')*)(=?)", text)
    assert match, text
    name, equals, value_text = match[1].strip(), match[2], text[match.end() :].strip()
    if not equals:
        raise PlanError("set-invalid", f"`{text}` is not of the form key.path=VALUE", hint=_QUOTE)
    parts = _parse_key(name)
    value = _parse_value(value_text)
    here: Any = tables
    path: KeyPath = ()
    for part, following in zip(parts, (*parts[1:], None), strict=True):
        key = _resolve_key(here, part, path)
        path = (*path, key)
        if following is None:
            here[key] = value
            break
        if isinstance(here, dict):
            here.setdefault(key, [] if following == "0" else {})
        here = here[key]
        if not isinstance(here, dict | list):
            raise PlanError("set-invalid", f"`{format_path(path)}` is {describe_value(here)}, which has no keys")
    return path


def _resolve_key(here: Any, part: str, path: KeyPath) -> str | int:
    """Returns the key or index that `part` means in the table or array `here`; appends an empty item if it is the next."""
    if isinstance(here, dict):
        return part
    if not part.isdecimal() or int(part) > len(here):
        count = f"0 to {len(here)}" if here else "0"
        raise PlanError("set-invalid", f"`{format_path(path)}` is an array: `{part}` must be a number, {count}")
    if int(part) == len(here):
        here.append({})
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
    """Returns the TOML value of `text`, or `text` itself if it is a bare word; raises PlanError "set-invalid"."""
    try:
        parsed = tomli.loads(f"value = {text}")
        if parsed.keys() == {"value"}:
            return parsed["value"]
    except (tomli.TOMLDecodeError, ValueError, RecursionError):
        if _BARE_WORD.fullmatch(text):
            return text
    raise PlanError("set-invalid", f"{describe_value(text)} is neither a TOML value nor a bare word", hint=_QUOTE)


KEY = "extends"

_UNREADABLE = frozenset({"plan-missing", "plan-is-folder", "plan-unreadable"})
_MAX_CHAIN = 32
_DECIDING_KEYS = ("use", "factory")
"""Keys that decide what a table's other keys mean."""


def merge_bases(document: Document, read: Callable[[str], Document], chain: tuple[Path, ...] = ()) -> Document:
    """Returns the document with missing values filled in from its base; unchanged if it has no `extends`.

    read: returns the document of a file without its bases. chain: the files that led here. Raises PlanError at the key
    `extends`: "wrong-type", "extends-missing" for a file that cannot be read, "extends-cycle"; and the base's own errors, at
    their places.

        tables                         merged key by key, [pools.NAME] and nested tables too
        a table with another `use`     replaces the base's: keys of one record mean nothing to another
        arrays, arrays of tables       replace the base's

    Values from a base keep their place: errors and origins name the base's file and line, and relative paths start in its
    folder. A key of a base cannot be removed, only changed.
    """
    if KEY not in document.tables:
        return document
    path_text = document.tables[KEY]
    if not isinstance(path_text, str) or not path_text:
        raise _extends_error(document, "wrong-type", f"`{KEY}` must be the path of a plan, not {describe_value(path_text)}")
    if document.folder is None:
        raise _extends_error(
            document, "extends-missing", f"a text without a folder has nothing that `{path_text}` is relative to"
        )
    chain = chain or (_real_path(Path(document.folder, Path(document.file).name)),)
    try:
        path_text = expand_path(path_text)
    except ValueError as error:
        raise _extends_error(document, "extends-missing", str(error)) from None
    path = Path(document.folder, path_text)
    if _real_path(path) in chain or len(chain) > _MAX_CHAIN:
        way = " extends ".join(f"`{link.name}`" for link in (*chain, path))
        raise _extends_error(document, "extends-cycle", f"the plan extends itself: {way}", "take one `extends` out")
    # The name to show: relative to the first file's name, as a person would write it.
    name = os.path.normpath(Path(document.file).parent / path_text)
    try:
        base = read(name if _real_path(Path(name)) == _real_path(path) else str(path))
    except PlanError as error:
        first = error.diagnostics[0]
        if first.code not in _UNREADABLE:
            raise
        raise _extends_error(
            document, "extends-missing", f"the base plan does not exist: {first.message}", first.hint
        ) from None
    return _merge_documents(document, merge_bases(_resolve_source_folder(base), read, (*chain, _real_path(path))))


def _resolve_source_folder(base: Document) -> Document:
    """Returns a base without its `source_folder`, as in a resolved plan, in which its own relative paths start."""
    tables = dict(base.tables)
    source_folder = tables.pop("source_folder", None)
    try:
        folder = Path(base.folder or Path(), expand_path(source_folder)) if isinstance(source_folder, str) else base.folder
    except ValueError as error:
        problem = base.diagnostic("wrong-value", f"`source_folder`: {error}", ("source_folder",))
        raise PlanError.many([problem]) from None
    return replace(base, tables=tables, folder=folder)


def _merge_documents(own: Document, base: Document) -> Document:
    """Returns `own` merged with `base`; each path taken from the base is recorded with its document."""
    taken: list[KeyPath] = []
    tables = _merge_tables({key: value for key, value in own.tables.items() if key != KEY}, base.tables, (), taken)
    known = {*base.spots, *base.bases}
    bases = {path: base.owner(path) for path in known if any(path[: len(start)] == start for start in taken)}
    return replace(own, tables=tables, bases=bases)


def _merge_tables(own: dict[str, Any], base: dict[str, Any], path: KeyPath, taken: list[KeyPath]) -> dict[str, Any]:
    """Returns both tables merged, in the base's order; appends to `taken` the paths whose values are the base's."""
    if path and any(key in own and own[key] != base.get(key) for key in _DECIDING_KEYS):
        return own
    joined: dict[str, Any] = {}
    for key in dict.fromkeys([*base, *own]):
        here = (*path, key)
        if key not in own:
            joined[key] = base[key]
            taken.append(here)
        elif isinstance(own[key], dict) and isinstance(base.get(key), dict):
            joined[key] = _merge_tables(own[key], base[key], here, taken)
        else:
            joined[key] = own[key]
    return joined


def _extends_error(document: Document, code: str, message: str, hint: str | None = None) -> PlanError:
    problem: Diagnostic = document.diagnostic(code, message, (KEY,), hint)
    error = PlanError.many([problem])
    assert isinstance(error, PlanError), error
    return error


def _real_path(path: Path) -> Path:
    return Path(os.path.realpath(path))

"""Reads a file or a text into a `Document` and applies `--set`; every failure has its own code."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli

from sley_core.errors import Diagnostic, KeyPath, Place, PlanError, dotted
from sley_core.plan.document import Document, Override, first_of, plain
from sley_core.plan.extends import extended
from sley_core.plan.locate import index
from sley_core.plan.overrides import apply
from sley_core.words import is_utf8, printable, shown

DEEPEST = 32
"""The deepest nesting of tables and arrays; a plan needs four levels."""

MOST_BYTES = 16 << 20
PATIENCE_S = 10.0

LARGEST = 2**63
"""TOML's integers have 64 bits."""


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of the plan at `path`.

    Raises PlanError: "plan-missing", "plan-is-folder", "plan-unreadable", "plan-not-utf8", "syntax", "too-deep",
    "out-of-range" (an integer beyond 64 bits), "set-invalid" for an override that cannot be applied, and those of `extended`.
    """
    return _overridden(extended(_read(path), _read), overrides)


def _read(path: str | Path) -> Document:
    """Returns the document of one file, without its bases."""
    name = str(path)
    place = Place(name)
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        raise PlanError("plan-missing", f"there is no file `{name}`", place=place, hint=_near(Path(path))) from None
    except IsADirectoryError:
        inside = Path(path) / "plan.toml"
        hint = f"name the file in it: `{inside}`" if inside.is_file() else _near(inside)
        raise PlanError("plan-is-folder", f"`{name}` is a folder, not a plan", place=place, hint=hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("plan-unreadable", f"cannot read `{name}`: {reason}", place=place) from None
    folder = Path(path).absolute().parent
    if not is_utf8(str(folder)):
        message = f"the name of the folder `{printable(str(folder))}` is not UTF-8"
        raise PlanError("plan-unreadable", message, place=place)
    return _parsed(_decoded(content, name), name, folder)


def read_bounded(path: str | Path) -> bytes:
    """Returns the content of a file; blocks for at most `PATIENCE_S` on an empty pipe.

    Raises OSError, also for more than `MOST_BYTES`, so that endless input is not read for ever.
    """
    # Non-blocking: opening a pipe that nobody writes would otherwise wait for ever.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        return _read_open(file, str(path))
    finally:
        os.close(file)


def _read_open(file: int, name: str) -> bytes:
    """Reads an open file, which may be a non-blocking pipe, to its end. Raises OSError."""
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", name)
    found = bytearray()
    began = time.monotonic()
    while len(found) <= MOST_BYTES:
        try:
            part = os.read(file, 1 << 20)
        except BlockingIOError:
            part = None
        if part:
            found += part
        elif part is not None and (found or not stat.S_ISFIFO(mode)):
            return bytes(found)
        elif time.monotonic() - began > PATIENCE_S:
            raise OSError(errno.ETIMEDOUT, f"nothing came within {PATIENCE_S:g} s", name)
        else:
            time.sleep(0.01)
    raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MB", name)


def read_text(text: str, file: str, folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of a plan's text; `file` is the name that messages show. Raises PlanError as `read_file` does."""
    return _overridden(extended(_parsed(text, file, folder), _read), overrides)


def _parsed(text: str, file: str, folder: Path | None) -> Document:
    """Returns the document of a text, without its bases. Raises PlanError "syntax" or "too-deep"."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # tomli may point beyond the end of the document.
        line = min(error.lineno, len(lines))
        column = min(error.colno, len(lines[line - 1]) + 1)
        found = Diagnostic(
            "syntax",
            f"this is not TOML: {_lowered(error.msg)}",
            place=Place(file, line, column),
            source_line=printable(lines[line - 1].replace("\t", " ")),
        )
        raise PlanError.many([found]) from None
    except (RecursionError, ValueError) as error:
        # Python itself refuses numbers of thousands of digits, and invalid dates.
        raise PlanError("syntax", f"this is not TOML: {_lowered(str(error))}", place=Place(file)) from None
    _refuse_deep(tables, file, lines)
    return Document(file, folder and folder.absolute(), tables, lines, index(text))


def read_tables(tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = ()) -> Document:
    """Returns the document of tables that a program made; they are copied."""
    copied = plain(tables)
    _refuse_deep(copied, "<tables>")
    return _overridden(Document("<tables>", folder and folder.absolute(), copied), overrides)


def _overridden(document: Document, texts: Sequence[str]) -> Document:
    """Returns the document with the overrides applied in order; raises one PlanError for all that are invalid."""
    overrides: list[Override] = []
    problems: list[Diagnostic] = []
    for number, text in enumerate(texts, start=1):
        try:
            path = apply(document.tables, text)
        except PlanError as error:
            place = Override(number, text, ()).place
            problems += [
                Diagnostic(found.code, printable(found.message), found.path, place, printable(text), found.hint)
                for found in error.diagnostics
            ]
        else:
            overrides.append(Override(number, text, path))
    if problems:
        raise PlanError.many(problems)
    document = replace(document, overrides=tuple(overrides))
    _refuse_deep(document.tables, document.file)
    _refuse_large(document)
    return document


def _refuse_deep(tables: Any, file: str, lines: Sequence[str] = ()) -> None:
    """Raises PlanError "too-deep". Iterates instead of recursing, so that later code may recurse."""
    # Pairs of the top-level key and a table or array below it.
    level = [(str(key), value) for key, value in tables.items() if isinstance(value, dict | list)]
    for _ in range(DEEPEST):
        inner = [(key, value.values() if isinstance(value, dict) else value) for key, value in level]
        level = [(key, item) for key, items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    message = f"`{printable(level[0][0])}` has tables and arrays more than {DEEPEST} deep"
    # Spots are not known yet, since finding them recurses; so the line is searched for.
    bare = re.compile(rf"[\s\[]*{re.escape(level[0][0])}\s*[.=\]]")
    line = next((number for number, text in enumerate(lines, start=1) if bare.match(text)), 0)
    raise PlanError("too-deep", message, place=Place(file, line, int(line > 0)))


def _refuse_large(document: Document) -> None:
    """Raises PlanError "out-of-range" for every integer beyond 64 bits."""
    large: list[tuple[KeyPath, int]] = []

    def walk(value: Any, path: KeyPath) -> None:
        """Collects the integers beyond 64 bits in `value`."""
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, (*path, key))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                walk(inner, (*path, number))
        elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
            large.append((path, value))

    def told(found: tuple[KeyPath, int]) -> Diagnostic:
        """Returns the diagnostic of one such integer."""
        message = f"`{dotted(found[0])}` must be an integer of 64 bits, not {shown(found[1])}"
        return document.diagnostic("out-of-range", message, found[0])

    walk(document.tables, ())
    if large:
        raise PlanError.many(first_of(large, told, "the plan"))


def _decoded(content: bytes, name: str) -> str:
    """Returns the content as text; raises PlanError "plan-not-utf8" with line and column."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode()) + 1
        raise PlanError(
            "plan-not-utf8",
            f"`{name}` is not UTF-8: the byte 0x{content[error.start]:02x} starts no character",
            place=Place(name, line, column),
            hint="save the file as UTF-8",
        ) from None


def _near(path: Path) -> str | None:
    """Returns a hint for a missing file: the first five `*.toml` files of its folder, or, if that has none, what the path is
    relative to; None if the folder cannot be read.
    """
    try:
        plans = sorted(file.name for file in path.absolute().parent.glob("*.toml"))
    except (OSError, ValueError):
        return None
    if plans:
        return f"the plans there are {', '.join(f'`{name}`' for name in plans[:5])}"
    return "the path is relative to the current folder"


def _lowered(message: str) -> str:
    message = re.sub(r" \(at .*\)$", "", message)
    return message[:1].lower() + message[1:]

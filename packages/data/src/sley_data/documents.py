"""Finds the files that a `[data]` table names; torch-free.

A document is named relative to where its pattern starts, wherever the corpus lies.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from sley_core.api.data import Split
from sley_core.errors import Diagnostic, KeyPath, PlanError
from sley_core.records import Problem
from sley_data.config import TOKEN_BYTES, TextConfig, TokensConfig
from sley_data.formats import SUFFIXES, Format, format_of
from sley_data.token_bytes import wrong_ids

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
JSON_LINES = frozenset({".jsonl", ".ndjson"})
WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class File:
    """Names a file, with its name within the corpus in forward slashes: `sub/one.txt` of `corpus/**/*.txt`.

    num_bytes: as it is stored. is_compressed: whether it contains other bytes than that.
    """

    name: str
    path: Path
    num_bytes: int
    is_compressed: bool = False


Found = tuple[list[File], list[Problem]]
"""Files, and problems of the paths and patterns that name them."""


def as_error(problems: Iterable[Problem]) -> PlanError:
    """Returns one PlanError that carries all `problems`."""
    found = PlanError.many(Diagnostic(p.code, p.message, path=p.path, hint=p.hint) for p in problems)
    assert isinstance(found, PlanError)
    return found


def find_files(patterns: Sequence[Path], key: KeyPath) -> Found:
    """Returns the files that paths and patterns name, each once, and the problems found.

    patterns: as `table.PlanPattern` has them. A file that links lead to twice counts once, by its first name. Files are in the
    order of `patterns`, sorted within one. A problem is a path that is missing, not a regular file or empty, a pattern without
    a match, and a file or folder that may not be read. An empty file matched by a pattern is skipped.
    """
    files: dict[str, File] = {}
    problems = []
    for number, pattern in enumerate(patterns):
        try:
            for file in _named_by(str(pattern)):
                if not os.access(file.path, os.R_OK):
                    raise _BadPathError("data-missing", f"`{file.path}` may not be read", "change its permissions")
                files.setdefault(os.path.realpath(file.path), file)
        except _BadPathError as wrong:
            problems.append(Problem((*key, number), wrong.message, wrong.hint, wrong.code))
        except (OSError, ValueError) as error:
            message = f"`{_literal(str(pattern))}` cannot be read: {error}"
            problems.append(Problem((*key, number), message, None, "data-missing"))
    return list(files.values()), problems


class _BadPathError(Exception):
    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


_ESCAPED = re.compile(r"\[([*?\[])\]")


def _literal(pattern: str) -> str:
    """Returns the path that a pattern names if no character of it is special."""
    return _ESCAPED.sub(r"\1", pattern)


def _is_special(pattern: str) -> bool:
    return not WILDCARDS.isdisjoint(_ESCAPED.sub("", pattern))


def _named_by(pattern: str) -> Iterator[File]:
    """Yields the files of one path or pattern, sorted; raises `_BadPathError` if there is none."""
    alone = Path(_literal(pattern))
    if not _is_special(pattern) or alone.exists():
        yield _alone(alone)
        return
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if _is_special(part))
    root = Path(_literal(str(Path(*parts[:first]))))
    matching = sorted(_matching(root, parts[first:])) if root.is_dir() else []
    stats = ((path, path.stat()) for path in matching)
    sizes = {path: found.st_size for path, found in stats if S_ISREG(found.st_mode)}
    if not sizes:
        hint = "`**` stands for folders of any depth, `*` for a part of one name, `[[]` for a bracket in a name"
        hint = hint if root.exists() else f"there is no `{root}`"
        raise _BadPathError("data-missing", f"`{alone}` matches no file", hint)
    if not any(sizes.values()):
        raise _BadPathError("data-empty", f"every file that `{alone}` matches is empty")
    yield from (File(path.relative_to(root).as_posix(), path, size) for path, size in sizes.items() if size)


def _matching(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields what `parts`, a pattern by folders, matches in `folder`; links to folders are followed.

    As in a shell, `*` and `**` leave out names that begin with a dot.
    """
    first, rest = parts[0], parts[1:]
    if first == "**":
        for inner in _folders(folder, set()):
            yield from _matching(inner, rest or ("*",))
        return
    for name in _names(folder) if _is_special(first) else [_literal(first)]:
        if name == _literal(first) or (fnmatchcase(name, first) and (first[0] == "." or name[0] != ".")):
            path = folder / name
            if rest and path.is_dir():
                yield from _matching(path, rest)
            elif not rest and os.path.lexists(path):
                yield path


def _folders(folder: Path, known: set[str]) -> Iterator[Path]:
    """Yields `folder` and all folders below it, each real folder once; without those whose names begin with a dot."""
    real = os.path.realpath(folder)
    if real in known:
        return
    known.add(real)
    yield folder
    for name in _names(folder):
        if name[0] != "." and (folder / name).is_dir():
            yield from _folders(folder / name, known)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _alone(path: Path) -> File:
    """Returns the file at a plain path; raises `_BadPathError` if it is missing, empty or not a regular file."""
    if not path.exists():
        raise _BadPathError("data-missing", f"there is no file `{path}`", "a relative path starts at the plan's folder")
    found = path.stat()
    if S_ISDIR(found.st_mode):
        raise _BadPathError("data-missing", f"`{path}` is a folder", f"name its files: `{path.name}/*`")
    if not S_ISREG(found.st_mode):
        raise _BadPathError("data-missing", f"`{path}` is not a regular file")
    if not found.st_size:
        raise _BadPathError("data-empty", f"`{path}` is empty")
    return File(path.name, path, found.st_size)


def standard_library() -> Found:
    """Returns the source files of the running Python's standard library, sorted, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    if files := _sources(root):
        return [*files], []
    message = f"this Python has no source files in `{root}`"
    return [], [Problem(("data", "source"), message, "name `files` instead", "data-missing")]


@cache
def _sources(root: str) -> tuple[File, ...]:
    """Returns the files with source of a library, which stays as it is while a program runs."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        prefix = Path(folder, "_").relative_to(root).as_posix()[:-1]
        paths = [(name, Path(folder, name)) for name in names if name.endswith(".py")]
        files += [File(prefix + name, path, path.stat().st_size) for name, path in paths]
    return tuple(sorted((file for file in files if file.num_bytes), key=lambda file: file.name))


def text_files(config: TextConfig, split: Split) -> Found:
    """Returns the files that hold a split of a `data.text` table: all files for both splits without `held_out_files`."""
    if config.source is not None and not (split == "held_out" and config.held_out_files):
        return standard_library()
    key = "held_out_files" if split == "held_out" and config.held_out_files else "files"
    files, problems = find_files(getattr(config, key), ("data", key))
    lines = [file for file in files if _suffix(file.path) in JSON_LINES]
    if lines and config.field is None and config.separator is None:
        message = f"`{lines[0].path}` has JSON lines: braces, keys and escapes would be text too"
        hint = 'name the key of the text, as `field = "text"`; or `separator = "\\n"`, for lines as they stand'
        problems.append(Problem(("data", key), message, hint, "data-json"))
    formats = [format_of(file.path) for file in files]
    problems += _refused(files, formats, key)
    marked = zip(files, formats, strict=True)
    return [replace(file, is_compressed=True) if form.is_compressed else file for file, form in marked], problems


def _suffix(path: Path) -> str:
    """Returns how a file's name ends, in lower case: `.jsonl`, also of `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in SUFFIXES else suffix


def _refused(files: Sequence[File], formats: Sequence[Format], key: str) -> Iterator[Problem]:
    """Yields a problem for each file that has a format of its own."""
    for file, form in zip(files, formats, strict=True):
        if form.refused is not None:
            yield Problem(("data", key), f"`{file.path}` is {form.refused[0]}", form.refused[1], "data-format")


def token_files(config: TokensConfig, split: Split) -> Found:
    """Returns the files of a split of a `data.tokens` table; what shows that they are no such ids is a problem."""
    key, patterns = ("files", config.files) if split == "train" else ("held_out_files", config.held_out_files)
    files, problems = find_files(patterns, ("data", key))
    formats = [format_of(file.path) for file in files]
    packed = ("compressed", "unpack it: token files are mapped into memory")
    formats = [replace(form, refused=packed) if form.is_compressed else form for form in formats]
    problems += _refused(files, formats, key)
    for file in [] if problems else files:
        if file.num_bytes % TOKEN_BYTES[config.dtype]:
            message = f"`{file.path}` has {file.num_bytes} bytes, which is no whole number of {config.dtype} tokens"
            problems.append(Problem(("data", key), message, "is `dtype` right?", "data-size"))
        elif found := wrong_ids(file.path, config.dtype, config.vocab_size):
            problems.append(Problem(("data", key), f"`{file.path}` {found[0]}", found[1], "data-format"))
    return files, problems

"""Which files a `[data]` table names, and which documents are held out; torch-free.

A document is named relative to where its pattern starts, so that a corpus may move without its split changing, and to
which split it belongs depends on names alone: never on a rank, an order or a seed.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from sley_core.data.config import TOKEN_BYTES, TextConfig, TokensConfig
from sley_core.data.dataset import Split
from sley_core.errors import Diagnostic, KeyPath, PlanError
from sley_core.records import Problem

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class File:
    """A file, and its name within the corpus with forward slashes: `sub/one.txt` of `corpus/**/*.txt`."""

    name: str
    path: Path
    num_bytes: int


Found = tuple[list[File], list[Problem]]
"""Files, and what is wrong with what names them."""


def as_error(problems: Iterable[Problem]) -> PlanError:
    """One error that carries all `problems`."""
    found = PlanError.many(Diagnostic(p.code, p.message, path=p.path, hint=p.hint) for p in problems)
    assert isinstance(found, PlanError)
    return found


def find_files(patterns: Sequence[Path], key: KeyPath) -> Found:
    """The files that paths and patterns name, in their order and sorted within one, each once; and what is wrong.

    A path that is missing, no regular file, unreadable or empty is a problem, and so is a pattern that finds nothing.
    Among files that a pattern finds, an empty one is no document and no problem.
    """
    files: dict[Path, File] = {}
    problems = []
    for number, pattern in enumerate(patterns):
        try:
            for file in _named_by(pattern):
                files.setdefault(file.path.resolve(), file)
        except _BadPathError as wrong:
            problems.append(Problem((*key, number), wrong.message, wrong.hint, wrong.code))
        except (OSError, ValueError, NotImplementedError) as error:
            problems.append(Problem((*key, number), f"`{pattern}` cannot be read: {error}", None, "data-missing"))
    return list(files.values()), problems


class _BadPathError(Exception):
    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def _named_by(pattern: Path) -> Iterator[File]:
    if WILDCARDS.isdisjoint(str(pattern)) or pattern.exists():
        yield _file(pattern.name, pattern)
        return
    parts = pattern.parts
    first = next(number for number, part in enumerate(parts) if not WILDCARDS.isdisjoint(part))
    root = Path(*parts[:first])
    found = [path for path in sorted(root.glob(str(Path(*parts[first:])))) if path.is_file()]
    if not found:
        hint = "`**` stands for folders of any depth, `*` for a part of one name"
        raise _BadPathError(
            "data-missing", f"`{pattern}` matches no file", hint if root.exists() else f"there is no `{root}`"
        )
    if not any(path.stat().st_size for path in found):
        raise _BadPathError("data-empty", f"every file that `{pattern}` matches is empty")
    yield from (_file(path.relative_to(root).as_posix(), path) for path in found if path.stat().st_size)


def _file(name: str, path: Path) -> File:
    if path.is_dir():
        raise _BadPathError("data-missing", f"`{path}` is a folder", f"name its files: `{path.name}/*`")
    if not path.exists():
        raise _BadPathError("data-missing", f"there is no file `{path}`", "a relative path starts at the plan's folder")
    if not path.is_file():
        raise _BadPathError("data-missing", f"`{path}` is not a regular file")
    if not os.access(path, os.R_OK):
        raise _BadPathError("data-missing", f"`{path}` may not be read", "change its permissions")
    if not path.stat().st_size:
        raise _BadPathError("data-empty", f"`{path}` is empty")
    return File(name, path, path.stat().st_size)


def standard_library() -> Found:
    """The source files of the running Python's standard library, sorted, without its tests and what was installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [File(path.relative_to(root).as_posix(), path, path.stat().st_size) for path in paths]
    found = sorted((file for file in files if file.num_bytes), key=lambda file: file.name)
    if found:
        return found, []
    message = f"this Python has no source files in `{root}`"
    return [], [Problem(("data", "source"), message, "name `files` instead", "data-missing")]


def text_files(config: TextConfig) -> Found:
    """The files that a `core.text` table names, of both splits."""
    return find_files(config.files, ("data", "files")) if config.source is None else standard_library()


def token_files(config: TokensConfig, split: Split) -> Found:
    """The files that a `core.tokens` table names for a split; their sizes are whole numbers of tokens."""
    key, patterns = ("files", config.files) if split == "train" else ("held_out_files", config.held_out_files)
    files, problems = find_files(patterns, ("data", key))
    for file in files:
        if file.num_bytes % TOKEN_BYTES[config.dtype]:
            message = f"`{file.path}` has {file.num_bytes} bytes, which is no whole number of {config.dtype} tokens"
            problems.append(Problem(("data", key), message, "is `dtype` right?", "data-size"))
    return files, problems


def held_out(names: Sequence[str], share: float) -> list[bool]:
    """For each document whether it is held out: a hash of its name falls below `share`.

    With a share above 0 and more than one document, each side gets at least one: the name of lowest hash is held out,
    and the name of highest hash is trained on.
    """
    places = [int.from_bytes(blake2b(os.fsencode(name), digest_size=8).digest(), "big") / 2**64 for name in names]
    chosen = [place < share for place in places]
    if share and len(names) > 1 and not any(chosen):
        chosen[places.index(min(places))] = True
    if names and all(chosen):
        chosen[places.index(max(places))] = False
    return chosen

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

from sley_core.data.config import TextConfig
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


def as_error(problems: Iterable[Problem]) -> PlanError:
    """One error that carries all `problems`."""
    found = PlanError.many(Diagnostic(p.code, p.message, path=p.path, hint=p.hint) for p in problems)
    assert isinstance(found, PlanError)
    return found


def find_files(patterns: Sequence[Path], key: KeyPath) -> tuple[list[File], list[Problem]]:
    """The files that paths and patterns name, in their order and sorted within one, each once; and what is wrong.

    A path that is missing, a folder, unreadable or empty is a problem, and so is a pattern that finds no file. An empty
    file that a pattern finds is no document and no problem.
    """
    files: dict[Path, File] = {}
    problems = []
    for number, pattern in enumerate(patterns):
        where = (*key, number)
        is_pattern = not WILDCARDS.isdisjoint(str(pattern)) and not pattern.exists()
        found = list(_expand(pattern)) if is_pattern else [(pattern.name, pattern)]
        if not found:
            problems.append(Problem(where, f"`{pattern}` matches no file", _matching_hint(pattern), "data-missing"))
        for name, path in found:
            problem = _problem(path, where, is_pattern)
            if problem is not None:
                problems.append(problem)
            elif num_bytes := path.stat().st_size:
                files.setdefault(path.resolve(), File(name, path, num_bytes))
    return list(files.values()), problems


def _expand(pattern: Path) -> Iterator[tuple[str, Path]]:
    parts = pattern.parts
    first = next(number for number, part in enumerate(parts) if not WILDCARDS.isdisjoint(part))
    root = Path(*parts[:first])
    for path in sorted(root.glob(str(Path(*parts[first:])))):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def _matching_hint(pattern: Path) -> str:
    root = Path(*(part for part in pattern.parts if WILDCARDS.isdisjoint(part)))
    return f"`{root}` does not exist" if not root.exists() else "`**` matches folders of any depth, `*` within one"


def _problem(path: Path, where: KeyPath, is_pattern: bool) -> Problem | None:
    if path.is_dir():
        return Problem(where, f"`{path}` is a folder", f"name its files: `{path.name}/*.txt`", "data-missing")
    if not path.exists():
        hint = "relative paths start at the plan's folder"
        return Problem(where, f"there is no file `{path}`", hint, "data-missing")
    if not os.access(path, os.R_OK):
        return Problem(where, f"`{path}` may not be read", "change its permissions", "data-missing")
    if not is_pattern and not path.stat().st_size:
        return Problem(where, f"`{path}` is empty", None, "data-empty")
    return None


def standard_library() -> tuple[list[File], list[Problem]]:
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


def text_files(config: TextConfig) -> tuple[list[File], list[Problem]]:
    """The files that a `core.text` table names, of both splits."""
    return find_files(config.files, ("data", "files")) if config.source is None else standard_library()


def held_out(names: Sequence[str], share: float) -> list[bool]:
    """For each document whether it is held out: a hash of its name falls below `share`.

    With a share above 0 and more than one document, each side gets at least one: the name of lowest hash is held out,
    and the name of highest hash is trained on.
    """
    places = [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64 for name in names]
    chosen = [place < share for place in places]
    if share and len(names) > 1 and not any(chosen):
        chosen[places.index(min(places))] = True
    if all(chosen) and names:
        chosen[places.index(max(places))] = False
    return chosen

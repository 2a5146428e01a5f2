"""`extends = "base.toml"`: a plan that contains only what it changes of another file.

    tables                         merged key by key, [pools.NAME] and nested tables too
    a table with another `use`     replaces the base's: keys of one record mean nothing to another
    arrays, arrays of tables       replace the base's

Values from a base keep their place: errors and origins name the base's file and line, and relative paths start in its folder. A
key of a base cannot be removed, only changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sley_core.errors import Diagnostic, KeyPath, PlanError
from sley_core.plan.document import Document
from sley_core.table import expanded
from sley_core.words import shown

KEY = "extends"

_UNREADABLE = frozenset({"plan-missing", "plan-is-folder", "plan-unreadable"})
_DEEPEST = 32
_DECIDES = ("use", "factory")
"""Keys that decide what a table's other keys mean."""


def extended(document: Document, read: Callable[[str], Document], chain: tuple[Path, ...] = ()) -> Document:
    """Returns the document with what it does not say taken from its base; unchanged if it has no `extends`.

    read: returns the document of a file without its bases. chain: the files that led here. Raises PlanError at the key
    `extends`: "wrong-type", "extends-missing" for a file that cannot be read, "extends-cycle"; and the base's own errors, at
    their places.
    """
    if KEY not in document.tables:
        return document
    given = document.tables[KEY]
    if not isinstance(given, str) or not given:
        raise _refused(document, "wrong-type", f"`{KEY}` must be the path of a plan, not {shown(given)}")
    if document.folder is None:
        raise _refused(
            document, "extends-missing", f"a text without a folder has nothing that `{given}` is relative to"
        )
    chain = chain or (_real(Path(document.folder, Path(document.file).name)),)
    try:
        given = expanded(given)
    except ValueError as error:
        raise _refused(document, "extends-missing", str(error)) from None
    path = Path(document.folder, given)
    if _real(path) in chain or len(chain) > _DEEPEST:
        way = " extends ".join(f"`{one.name}`" for one in (*chain, path))
        raise _refused(document, "extends-cycle", f"the plan extends itself: {way}", "take one `extends` out")
    # The name to show: relative to the first file's name, as a person would write it.
    name = os.path.normpath(Path(document.file).parent / given)
    try:
        base = read(name if _real(Path(name)) == _real(path) else str(path))
    except PlanError as error:
        first = error.diagnostics[0]
        if first.code not in _UNREADABLE:
            raise
        raise _refused(
            document, "extends-missing", f"what it extends is not there: {first.message}", first.hint
        ) from None
    return _merged(document, extended(_at_home(base), read, (*chain, _real(path))))


def _at_home(base: Document) -> Document:
    """Returns a base without its `source_folder`, as in a resolved plan, in which its own relative paths start."""
    tables = dict(base.tables)
    given = tables.pop("source_folder", None)
    try:
        folder = Path(base.folder or Path(), expanded(given)) if isinstance(given, str) else base.folder
    except ValueError as error:
        found = base.diagnostic("wrong-value", f"`source_folder`: {error}", ("source_folder",))
        raise PlanError.many([found]) from None
    return replace(base, tables=tables, folder=folder)


def _merged(own: Document, base: Document) -> Document:
    """Returns `own` merged with `base`; each path taken from the base is recorded with its document."""
    taken: list[KeyPath] = []
    tables = _joined({key: value for key, value in own.tables.items() if key != KEY}, base.tables, (), taken)
    known = {*base.spots, *base.bases}
    bases = {path: base.owner(path) for path in known if any(path[: len(start)] == start for start in taken)}
    return replace(own, tables=tables, bases=bases)


def joined(own: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns both tables merged by the rules of `extends`; `own` has precedence."""
    return _joined(own, base, (), [])


def _joined(own: dict[str, Any], base: dict[str, Any], path: KeyPath, taken: list[KeyPath]) -> dict[str, Any]:
    """Returns both tables merged, in the base's order; appends to `taken` the paths whose values are the base's."""
    if path and any(key in own and own[key] != base.get(key) for key in _DECIDES):
        return own
    found: dict[str, Any] = {}
    for key in dict.fromkeys([*base, *own]):
        here = (*path, key)
        if key not in own:
            found[key] = base[key]
            taken.append(here)
        elif isinstance(own[key], dict) and isinstance(base.get(key), dict):
            found[key] = _joined(own[key], base[key], here, taken)
        else:
            found[key] = own[key]
    return found


def _refused(document: Document, code: str, message: str, hint: str | None = None) -> PlanError:
    """Returns a PlanError placed at the key `extends`."""
    found: Diagnostic = document.diagnostic(code, message, (KEY,), hint)
    error = PlanError.many([found])
    assert isinstance(error, PlanError), error
    return error


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))

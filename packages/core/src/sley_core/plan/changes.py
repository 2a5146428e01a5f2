"""Compares the plan of a checkpoint with the plan that resumes from it; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tomli

from sley_core.errors import Diagnostic, KeyPath, PlanError, dotted
from sley_core.plan.write import inline, leaves

NEEDED = (("model",), ("data",), ("loss",), ("run", "seed"), ("optimizer", "use"), ("optimizer", "factory"))
"""Keys that must not change, since the run would compute other numbers; the layout and the learning rates may."""

HARMLESS = (("source_folder",), ("run", "name"), ("run", "folder"), ("model", "compile"), ("model", "weights"))
"""Keys whose changes are not reported: names, how layers are called, and where the first weights came from."""

_NAMES = (("use",), ("factory",))
"""Keys of a table that name the record or factory to which its other keys belong."""

_ABSENT = "nothing"
_SAMPLES = ("data", "samples_per_epoch")


class Change(NamedTuple):
    """Describes one changed value of the plan. before, now: as TOML; "nothing" if the plan does not have the key."""

    path: KeyPath
    before: str
    now: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.before} -> {self.now}"

    @property
    def is_refused(self) -> bool:
        """Whether a run cannot be resumed with it."""
        return _is_below(self.path, NEEDED)


def changes(before: str, now: str) -> list[Change]:
    """Returns the differences between two resolved plans, given as TOML, in the order of their keys."""
    return list(_changes(tomli.loads(before), tomli.loads(now)))


def refuse_changes(found: list[Change]) -> None:
    """Raises PlanError "resume-differs" that names each change with which a run cannot be resumed, with both values."""
    refused = [one for one in found if one.is_refused]
    # Another record has other keys: if a table's record changed, only that is reported.
    others = {one.path[0] for one in refused if one.path[1:] in _NAMES}
    if told := [one for one in refused if one.path[0] not in others or one.path[1:] in _NAMES]:
        raise PlanError.many(map(_refused, told))


def _refused(change: Change) -> Diagnostic:
    path, before, now = change
    hint = "put it back, or begin a run of another name; `run.load_weights` takes weights alone"
    if path == _SAMPLES and _ABSENT not in (before, now):  # the run writes this key, not its user
        message = f"the data have changed: they give {now} samples per epoch, and gave the checkpoint's run {before}"
        return Diagnostic("data-changed", message, path=path[:1], hint=hint.replace("it", "them", 1))
    had = f"no `{dotted(path)}`" if before == _ABSENT else f"`{dotted(path)} = {before}`"
    message = f"the checkpoint's run had {had}, the plan has {now}"
    return Diagnostic("resume-differs", message, path=path, hint=hint)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the differing values of two plans' tables, apart from harmless ones."""
    values = [{path: inline(value) for path, value in leaves(tables)} for tables in (before, now)]
    for path in dict.fromkeys([*values[0], *values[1]]):
        old, new = (every.get(path, _ABSENT) for every in values)
        if old != new and not _is_below(path, HARMLESS):
            yield Change(path, old, new)


def _is_below(path: KeyPath, places: tuple[KeyPath, ...]) -> bool:
    return any(path[: len(place)] == place for place in places)

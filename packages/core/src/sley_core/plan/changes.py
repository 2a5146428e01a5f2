"""What differs between the plan of a checkpoint and the plan that goes on from it; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tomli

from sley_core.errors import Diagnostic, KeyPath, PlanError, dotted
from sley_core.plan.write import inline, leaves

NEEDED = (("model",), ("data",), ("loss",), ("run", "seed"), ("optimizer", "use"), ("optimizer", "factory"))
"""Where another value makes other numbers than those of the run that is to go on; the layout and the rates may change."""

HARMLESS = (("source_folder",), ("run", "name"), ("run", "folder"), ("model", "compile"), ("model", "weights"))
"""What may differ without a word: names, how layers are called, and where the first weights came from."""

_NAMES = (("use",), ("factory",))
"""Keys of a table that say which record, or whose code, its other keys are for."""

_ABSENT = "nothing"


class Change(NamedTuple):
    """One value of the plan. before, now: as TOML; "nothing" where the plan does not have the key."""

    path: KeyPath
    before: str
    now: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.before} -> {self.now}"

    @property
    def is_refused(self) -> bool:
        """Whether a run cannot go on with it."""
        return _is_below(self.path, NEEDED)


def changes(before: str, now: str) -> list[Change]:
    """Returns what differs between two resolved plans, given as TOML, in the order of their keys."""
    return list(_changes(tomli.loads(before), tomli.loads(now)))


def refuse_changes(found: list[Change]) -> None:
    """Raises PlanError "resume-differs" that names each change with which a run cannot go on, with both values."""
    refused = [one for one in found if one.is_refused]
    # Another model has other keys: that it is another one says it all.
    others = {one.path[0] for one in refused if one.path[1:] in _NAMES}
    if told := [one for one in refused if one.path[0] not in others or one.path[1:] in _NAMES]:
        raise PlanError.many(
            Diagnostic(
                "resume-differs",
                f"the checkpoint's run had {_had(path, before)}, the plan has {now}",
                path=path,
                hint="put it back, or begin a run of another name; `run.load_weights` takes weights alone",
            )
            for path, before, now in told
        )


def _had(path: KeyPath, before: str) -> str:
    return f"no `{dotted(path)}`" if before == _ABSENT else f"`{dotted(path)} = {before}`"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    values = [{path: inline(value) for path, value in leaves(tables)} for tables in (before, now)]
    for path in dict.fromkeys([*values[0], *values[1]]):
        old, new = (every.get(path, _ABSENT) for every in values)
        if old != new and not _is_below(path, HARMLESS):
            yield Change(path, old, new)


def _is_below(path: KeyPath, places: tuple[KeyPath, ...]) -> bool:
    return any(path[: len(place)] == place for place in places)

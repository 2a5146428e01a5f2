"""The records that a plan uses if it names none: those that the layout needs, and those that the schedule's record names.

A table whose default depends on the schedule (`ComponentTable.known`) takes what the schedule's record names, else the only
record of its kind among the plan's plugins. Plugins that the plan does not name are not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from sley_core.discovery import CORE, to_install
from sley_core.errors import KeyPath, Place
from sley_core.plan.document import Origin
from sley_core.plan.kinds import ComponentTable, a_word, words
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import ModelConfig
from sley_core.plan.write import leaves
from sley_core.records import ScheduleRecord
from sley_core.table import RecordKind, Table


def default_of(spec: ComponentTable, schedule: Component | None, plugins: Iterable[Plugin]) -> str | None:
    """Returns the name of the record for a table that is left out or has no `use`; None if the plan must name one.

    schedule: the plan's, if it has one. plugins: those that the plan names.
    """
    if spec.known is None or schedule is None:
        return spec.default
    named: str | None = getattr(schedule.record, spec.key)
    found = _offered(spec, plugins)
    return named or (found[0] if len(found) == 1 else None)


def default_list(key: str, tables: Mapping[str, Table | None], schedule: Component | None) -> tuple[str, ...]:
    """Returns the names of the records of a list that is left out: a reducer if ranks may hold the same weight, and a handler
    of ties.
    """
    if key == "metrics":
        return ("core.jsonl",)
    parallel: Any = tables["parallel"]
    if key != "gradient_handlers" or not parallel:
        return ()
    reducer = ("core.each",) if parallel.dp == "auto" or parallel.dp * parallel.sp > 1 else ()
    record = schedule.record if schedule else None
    ties = record.ties if isinstance(record, ScheduleRecord) and parallel.pp > 1 else None
    return (*reducer, ties) if ties else reducer


def is_named_by(schedule: Component, name: str) -> bool:
    """Returns whether the schedule's record names the record `name` for a table that is left out."""
    record = schedule.record
    return isinstance(record, ScheduleRecord) and name in (record.link, record.partition, record.ties)


def without_default(spec: ComponentTable, schedule: Component, plugins: Iterable[Plugin], loader: Loader) -> tuple[str, str]:
    """Returns message and hint for a missing table that neither the schedule nor the plan's plugins determine."""
    found = _offered(spec, plugins)
    message = f"the plan needs a table {spec.header} with `use`: `{schedule.name}` names no {words(spec.kind)}"
    if found:
        return f"{message}, and the plan's plugins have {', '.join(f'`{name}`' for name in found)}", "name one of them"
    assert spec.known is not None, spec
    home = spec.known.partition(".")[0]
    hint = f'add {spec.header} with `use = "{spec.known}"` of sley-{home}, or with {a_word(spec.kind)} of another plugin'
    if home not in loader.names():
        hint += f"; {to_install(home)}"
    return f"{message}, and the plan's plugins have none", hint


def no_factory(spec: ComponentTable, path: KeyPath, known: str | None) -> tuple[str, KeyPath, str]:
    """Returns message, path and hint for a `factory` in a table at `path` that takes none. known: a text that lists core's
    records.
    """
    message = f"{spec.header} takes no `factory`: {a_word(spec.kind)} comes from a plugin, by its name"
    hint = f"`use` one, or install a plugin of your own that offers {a_word(spec.kind)} (docs/write-a-plugin.md)"
    return message, (*path, "factory"), f"{hint}; {known}" if known else hint


OF_SLEY: dict[RecordKind, str] = {"datasets": "data.text", "models": "models.llama"}
"""By kind, the record of another package of Sley's that a plan may begin with, where core has none."""


def of_core(spec: ComponentTable, core: Plugin | None) -> str | None:
    """Returns a text that lists core's records for a table, or one of another package of Sley's; None if there is none."""
    known = [f'"{CORE}.{name}"' for name in core.records[spec.kind]] if core else []
    if known or spec.kind not in OF_SLEY:
        return f"core has {', '.join(known)}" if known else None
    plugin, _, _ = OF_SLEY[spec.kind].partition(".")
    return f'sley-{plugin} has "{OF_SLEY[spec.kind]}"'


def _offered(spec: ComponentTable, plugins: Iterable[Plugin]) -> list[str]:
    return [f"{plugin.name}.{name}" for plugin in plugins for name in plugin.records[spec.kind]]


def origins(plan: Plan, written_in: Set[KeyPath]) -> Mapping[KeyPath, Origin]:
    """Returns the origin of every value of the resolved plan. written_in: the paths of those that core wrote in."""

    def origin(path: KeyPath, value: Any) -> Origin:
        if path not in written_in:
            return plan.document.origin(path) or _beside(plan, path) or Origin("default")
        if plan.pipeline and path[-1] == "use" and is_named_by(plan.pipeline, value):
            return Origin("record", named_by=plan.pipeline.name)
        return Origin("core")

    return {path: origin(path, value) for path, value in leaves(plan.tables)}


def _beside(plan: Plan, path: KeyPath) -> Origin | None:
    """Returns the file, beside the plan, that decides the model's key `path`; None if there is none."""
    config = plan.model.config
    file = config.decided_by(str(path[1])) if path[0] == "model" and isinstance(config, ModelConfig) else None
    return None if file is None else Origin("file", Place(file))

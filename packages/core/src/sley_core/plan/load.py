"""Loads a plan from a file, a text, or a program's tables: loads the plugins that it names, checks every table, adds defaults.

All problems are collected, except those in tables of a missing plugin, which are not known. A table whose default depends on
the schedule (`ComponentTable.known`) takes the record that the schedule names, else the only one of its kind among the plan's
plugins. Plugins that the plan does not name are not imported.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from sley_core.discovery import CORE, to_install
from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError, dotted
from sley_core.plan.check import check_data, check_tables
from sley_core.plan.document import Document, by_place, plain
from sley_core.plan.faults import faults, unknown_key
from sley_core.plan.kinds import COMPONENTS, ComponentTable, a_word, words
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.plan import Component, Plan
from sley_core.plan.read import read_file, read_tables, read_text
from sley_core.plan.tables import DRAWN_STEP, FORMAT, OPTIONAL, TABLES, RunTable, TimelineTable
from sley_core.records import ScheduleRecord
from sley_core.table import NAMED_TABLES, BasePath, RecordKind, RecordReference, Table, expanded, written
from sley_core.words import shown, suggestion


def load_plan(path: str | Path, overrides: Sequence[str] = (), *, loader: Loader | None = None) -> Plan:
    """Loads the plan in the file `path`, with each `key.path=VALUE` of `overrides` applied in order.

    Raises PlanError with all problems, sorted by place, or PluginError if a plugin is among them. Imports no torch.
    """
    return resolve(read_file(path, overrides), loader or Loader())


def plan_from_text(
    text: str,
    file: str = "plan.toml",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    loader: Loader | None = None,
) -> Plan:
    """Loads the plan in `text`; messages call it `file`, relative paths start at `folder`. Raises as `load_plan`."""
    return resolve(read_text(text, file, folder, overrides), loader or Loader())


def plan_from_dict(
    tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = (), *, loader: Loader | None = None
) -> Plan:
    """Loads the plan in plain data, as TOML would give it; None leaves a key out. Raises as `load_plan`."""
    return resolve(read_tables(tables, folder, overrides), loader or Loader())


def with_values(plan: Plan, values: Mapping[KeyPath, Any]) -> Plan:
    """Returns a plan with some values changed to what a run found out, such as the number of its samples.

    Checked like any other, with the plugins that are loaded already.
    """
    tables = deepcopy(plan.document.tables)
    for path, value in values.items():
        here: Any = tables
        for part in path[:-1]:
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
        here[path[-1]] = plain(value)
    return resolve(replace(plan.document, tables=tables), plan.loader)


def with_tables(plan: Plan, tables: Mapping[str, Any]) -> Plan:
    """Returns a plan with whole tables changed; None removes one. Checked like any other, with the plugins that are loaded
    already. The changed tables have no place in a file.
    """
    kept = {key: value for key, value in plan.document.tables.items() if key not in tables}
    given = {key: plain(value) for key, value in tables.items() if value is not None}
    return resolve(replace(plan.document, tables={**kept, **given}), plan.loader)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""A name without a dot, which tells it from a record's."""


class NameFault(NamedTuple):
    """Describes what is wrong with the value at `path`, or with its key."""

    code: str
    message: str
    path: KeyPath
    hint: str | None = None
    at_key: bool = False


class OwnNames:
    """Holds the names that the plan's `tables` define. used: those that a field has referred to, with the key of their
    table.
    """

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self.tables = tables
        self.used: set[tuple[str, str]] = set()

    def of(self, key: str) -> list[str]:
        """Returns the names of the tables `[key.NAME]`."""
        given = self.tables.get(key)
        return list(given) if isinstance(given, dict) else []

    def faults(self, spec: ComponentTable) -> Iterator[NameFault]:
        """Yields what is wrong with the names of a table."""
        given = self.tables.get(spec.key, {})
        if not isinstance(given, dict):
            yield NameFault("wrong-type", f"`{spec.key}` must be tables {spec.header}, not {shown(given)}", (spec.key,))
        for name in self.of(spec.key):
            if not _NAME.fullmatch(name):
                message = f"`{name}` is no name of a table {spec.header}: it takes letters, digits, `_` and `-`"
                yield NameFault("wrong-name", message, (spec.key, name), "begin with a letter", at_key=True)

    def is_own(self, reference: Reference) -> bool:
        """Returns whether the field at `reference` refers to a name that the plan defines, not to a record."""
        return reference.kind in NAMED_TABLES and "." not in reference.name

    def take(self, reference: Reference, at: KeyPath) -> Iterator[NameFault]:
        """Records that the field at `at` uses the name in `reference`; yields a fault if no table has it."""
        key = NAMED_TABLES[reference.kind]
        self.used.add((key, reference.name))
        if reference.name not in self.of(key):
            hint = f'add it with `use`, or name {a_word(reference.kind)} as "plugin.record"'
            message = f"the plan has no table [{key}.{reference.name}]"
            yield NameFault("unknown-name", message, at, suggestion(reference.name, self.of(key), hint))

    def unused(self) -> Iterator[NameFault]:
        """Yields a fault for each table to which no field refers."""
        for key in NAMED_TABLES.values():
            for name in self.of(key):
                if (key, name) not in self.used:
                    message = f"no table of the plan names `{name}`, so [{key}.{name}] means nothing"
                    hint = f'give it to a key, as in `pool = "{name}"`, or remove it'
                    yield NameFault("table-without-effect", message, (key, name), hint, at_key=True)


class Reference(NamedTuple):
    """Describes a field at `path` within its table that names a record."""

    path: KeyPath
    kind: RecordKind
    name: str


def references(table: Table) -> Iterator[Reference]:
    """Yields every record reference in `table`, in the order of its model's fields."""
    for name, info in type(table).model_fields.items():
        yield from _within(info.annotation, info.metadata, getattr(table, name), (name,))


def _within(annotation: Any, metadata: Sequence[Any], value: Any, path: KeyPath) -> Iterator[Reference]:
    """Yields the references inside `value`, whose type is `annotation`, at any depth."""
    marks = [item for item in metadata if isinstance(item, RecordReference)]
    if marks and isinstance(value, str):
        yield Reference(path, marks[-1].kind, value)
    elif isinstance(value, Table):
        for inner in references(value):
            yield inner._replace(path=(*path, *inner.path))
    elif get_origin(annotation) is Annotated:
        inner_type, *more = get_args(annotation)
        yield from _within(inner_type, more, value, path)
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _within(arm, (), value, path)
    elif isinstance(value, tuple | list) and get_args(annotation):
        for number, item in enumerate(value):
            yield from _within(get_args(annotation)[0], (), item, (*path, number))
    elif isinstance(value, dict) and get_args(annotation):
        for key, item in value.items():
            yield from _within(get_args(annotation)[1], (), item, (*path, key))


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


AnyTable = TypeVar("AnyTable", bound=Table)


def resolve(document: Document, loader: Loader) -> Plan:
    """Returns the plan that `document` describes.

    Raises PlanError with all problems, sorted by place; PluginError if a plugin is among them.
    """
    resolver = _Resolver(document, loader)
    tables = {name: resolver.table(name, model) for name, model in TABLES.items()}
    optional = {name: resolver.optional(name, model) for name, model in OPTIONAL.items()}
    optional["timeline"] = optional["timeline"] or resolver.timeline(tables["run"])
    parts: dict[str, Any] = {**tables, **optional}
    # Tables whose default may be the only record of its kind come last, when all plugins that the plan names are known.
    for spec in sorted(COMPONENTS, key=lambda spec: spec.known is not None and not resolver.is_named(spec)):
        if spec.named:
            parts[spec.key] = resolver.named(spec)
        else:
            parts[spec.key] = resolver.components(spec, tables) if spec.many else resolver.component(spec)
    resolver.problems += top_level_faults(resolver.document)
    resolver.raise_problems(parts)
    return Plan(**parts, document=resolver.document, loader=loader, plugins=resolver.plugins)


@dataclass
class _Resolver:
    """Resolves the tables of one document; collects the problems, the plugins, and the paths that core writes in."""

    document: Document
    loader: Loader
    problems: list[Diagnostic] = field(default_factory=list)
    plugins: dict[str, Plugin] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    schedule: Component | None = None

    def __post_init__(self) -> None:
        self.tables = self.document.tables
        self._source_folder()
        self.own_names = OwnNames(self.tables)
        self._plugin(CORE, ())

    def table(self, name: str, model: type[AnyTable]) -> AnyTable | None:
        """Returns core's table `name`; one without a required key may be left out. None if it has a problem."""
        required = [key for key, info in model.model_fields.items() if info.is_required()]
        if name not in self.tables and required:
            keys = ", ".join(f"`{key}`" for key in required)
            self._problem("missing-table", f"the plan needs a table [{name}] with {keys}", (name,))
            return None
        return self._validated(model, self.tables.get(name, {}), (name,), f"[{name}]")

    def optional(self, name: str, model: type[AnyTable]) -> AnyTable | None:
        """Returns core's table `name`, or None if the plan has none."""
        return self.table(name, model) if name in self.tables else None

    def timeline(self, run: Table | None) -> Table | None:
        """Returns a default `timeline` table for a pipeline whose plan has none."""
        if not isinstance(run, RunTable) or "pipeline" not in self.tables or "timeline" in self.tables:
            return None
        return TimelineTable(step=min(DRAWN_STEP, run.steps))

    def component(self, spec: ComponentTable) -> Component | None:
        """Returns the component of a single table; None if an optional one is left out or it has a problem."""
        if spec.only_with is not None and spec.only_with not in self.tables:
            if spec.key in self.tables:
                message = f"{spec.header} means nothing without [{spec.only_with}]"
                self._problem("table-without-effect", message, (spec.key,), f"add [{spec.only_with}], or remove it")
            return None
        default = default_of(spec, self.schedule, self.plugins.values())
        if spec.key not in self.tables and default is None:
            self._no_table(spec)
            return None
        found = self._component(spec, self.tables.get(spec.key, {}), (spec.key,), default)
        if spec.kind == "schedules":
            self.schedule = found
        return found

    def is_named(self, spec: ComponentTable) -> bool:
        """Returns whether the plan itself names the record of a table."""
        given = self.tables.get(spec.key)
        return isinstance(given, dict) and "use" in given

    def components(self, spec: ComponentTable, tables: Mapping[str, Table | None]) -> tuple[Component, ...]:
        """Returns the components of a list of tables; if it is left out, those that the layout needs."""
        if spec.key not in self.tables:
            default = default_list(spec.key, tables, self.schedule)
            given: Any = [{"use": name} for name in default]
        else:
            given = self.tables[spec.key]
        if not isinstance(given, list):
            message = f"`{spec.key}` must be an array of tables, not {shown(given)}"
            self._problem("wrong-type", message, (spec.key,), f"write [[{spec.key}]] above each of them")
            return ()
        found = (self._component(spec, item, (spec.key, number)) for number, item in enumerate(given))
        return tuple(component for component in found if component)

    def named(self, spec: ComponentTable) -> dict[str, Component]:
        """Returns the components of the tables `[key.NAME]`, by name."""
        if wrong := list(self.own_names.faults(spec)):
            self._faults(wrong)
            return {}
        given = self.tables.get(spec.key, {})
        found = {name: self._component(spec, one, (spec.key, name)) for name, one in given.items()}
        return {name: component for name, component in found.items() if component}

    def raise_problems(self, parts: Mapping[str, Any]) -> None:
        """Raises PlanError or PluginError if any problem was recorded, or if a table that the plan names is not used.

        parts: the tables; those without a mistake are also checked against each other, and the data's files, for one report.
        """
        if not self.problems:
            self._faults(self.own_names.unused())
        if self.problems:
            found = list(check_tables(parts))
            if parts["data"] is not None:
                found += check_data(parts["data"], parts["model"], evaluates=parts["evaluation"] is not None)
            self.problems += [self.document.diagnostic(one.code, one.message, one.path, one.hint) for one in found]
            kind = PluginError if any(found.code.startswith("plugin-") for found in self.problems) else PlanError
            raise kind.many(by_place(self.problems))

    def _component(self, spec: ComponentTable, given: Any, path: KeyPath, default: str | None = None) -> Component | None:
        """Returns the component of one table, by its `use`, its `factory` or `default`; None if it has a problem."""
        if not isinstance(given, dict):
            self._problem("wrong-type", f"`{spec.key}` must be a table, not {shown(given)}", path)
            return None
        if "use" in given and "factory" in given and spec.factory:
            message = f"{spec.header} has both `use` and `factory`"
            self._problem("use-and-factory", message, (*path, "factory"), "keep one of them", at_key=True)
            return None
        if "factory" in given and spec.factory:
            config = self._validated(spec.factory, given, path, spec.header)
            name = str(given["factory"])
            return Component(spec, name, None, config, path, self.document) if config else None
        if "factory" in given and "use" not in given:
            self._problem("no-factory", *no_factory(spec, path, of_core(spec, self.plugins.get(CORE))), at_key=True)
            return None
        if "use" not in given:
            if default is None:
                what = f"{spec.header} needs `use`, the name of {a_word(spec.kind)}"
                self._problem("missing-key", what, (*path, "use"), of_core(spec, self.plugins.get(CORE)))
                return None
            given = {"use": default, **given}
        return self._record_component(spec, given, path)

    def _record_component(self, spec: ComponentTable, given: dict[str, Any], path: KeyPath) -> Component | None:
        """Returns the component that `use` names, its config validated and its references loaded; None if it has a problem."""
        name = given["use"]
        at, by = self._origin(name, (*path, "use"))
        plugin = self._named(name, at, by)
        if plugin is None:
            return None
        try:
            record = self.loader.record(spec.kind, name)
        except SleyError as error:
            self._add(error, at, by)
            return None
        rest = {key: value for key, value in given.items() if key != "use"}
        config = self._validated(record.config, rest, path, f"`{name}`")
        if config is None:
            return None
        for reference in references(config):
            self._refer(reference, (*path, *reference.path))
        return Component(spec, name, record, config, path, self.document, plugin)

    def _refer(self, reference: Reference, at: KeyPath) -> None:
        """Loads the record that a field names, or finds the plan's table of that name; records a problem if there is none."""
        if self.own_names.is_own(reference):
            self._faults(self.own_names.take(reference, at))
        elif self._named(reference.name, at):
            try:
                self.loader.record(reference.kind, reference.name)
            except SleyError as error:
                self._add(error, at)

    def _no_table(self, spec: ComponentTable) -> None:
        """Records that a table is missing, unless it is not needed, or [pipeline] itself has a problem."""
        if spec.known is None:
            choices = "`use` or `factory`" if spec.factory else "`use`"
            has = self.plugins[CORE].records.get(spec.kind, {})
            hint = f"core has {', '.join(f'`{CORE}.{name}`' for name in has)}" if has else of_core(spec, None)
            self._problem("missing-table", f"the plan needs a table [{spec.key}] with {choices}", (spec.key,), hint)
        elif self.schedule is not None and (spec.kind != "stage_links" or self._has_stages):
            message, hint = without_default(spec, self.schedule, self.plugins.values(), self.loader)
            self._problem("missing-table", message, ("pipeline", "use"), hint)

    @property
    def _has_stages(self) -> bool:
        """Whether anything is sent from one stage to another."""
        parallel = self.tables.get("parallel")
        return isinstance(parallel, dict) and parallel.get("pp", 1) != 1

    def _origin(self, name: Any, path: KeyPath) -> tuple[KeyPath, str]:
        """Returns the path that caused the record `name` at `path`, and a text that names the schedule if that is the cause,
        else "".
        """
        if self.schedule is None or self.document.origin(path) or not is_named_by(self.schedule, name):
            return path, ""
        return (*self.schedule.path, "use"), f"`{self.schedule.name}` names `{name}`: "

    def _named(self, name: Any, path: KeyPath, by: str = "") -> Plugin | None:
        """Returns the loaded plugin of a record's name; None, with a problem recorded, if there is no such name or plugin."""
        plugin, dot, record = name.partition(".") if isinstance(name, str) else ("", "", "")
        if dot and plugin and record:
            return self._plugin(plugin, path, by)
        message = f'`{dotted(path)}` must be the name of a record, "plugin.record", not {shown(name)}'
        self._problem("wrong-value" if isinstance(name, str) else "wrong-type", message, path)
        return None

    def _plugin(self, name: str, path: KeyPath, by: str = "") -> Plugin | None:
        """Returns the plugin `name`, loaded at most once; None, with a problem recorded, if that fails."""
        if name not in self.plugins and name not in self.broken:
            try:
                self.plugins[name] = self.loader.load(name)
            except PluginError as error:
                self.broken.add(name)
                self._add(error, path, by)
        return self.plugins.get(name)

    def _validated(self, model: type[AnyTable], given: Any, path: KeyPath, owner: str) -> AnyTable | None:
        """Returns `given` as a `model`; None, with the problems recorded, if it does not validate."""
        if not isinstance(given, dict):
            self._problem("wrong-type", f"`{path[0]}` must be a table, not {shown(given)}", path)
            return None
        try:
            return validated(model, given, path, self.document)
        except ValidationError as error:
            self.problems += faults(error, model, given, path, self.document, owner)
            return None

    def _source_folder(self) -> None:
        """Makes relative paths start in the plan's `source_folder`, if it has one, instead of the file's folder."""
        given = self.tables.get("source_folder")
        if isinstance(given, str):
            try:
                folder = Path(self.document.folder or Path(), expanded(given))
            except ValueError as error:
                self._problem("wrong-value", f"`source_folder`: {error}", ("source_folder",))
                return
            self.tables = {**self.tables, "source_folder": written(str(folder))}
            self.document = replace(self.document, folder=folder, tables=self.tables)
        elif given is not None:
            self._problem("wrong-type", f"`source_folder` must be a string, not {shown(given)}", ("source_folder",))

    def _add(self, error: SleyError, path: KeyPath, by: str = "") -> None:
        for found in error.diagnostics:
            self.problems.append(self.document.diagnostic(found.code, by + found.message, path, found.hint))

    def _faults(self, faults: Iterable[NameFault]) -> None:
        for fault in faults:
            self._problem(fault.code, fault.message, fault.path, fault.hint, at_key=fault.at_key)

    def _problem(self, code: str, message: str, path: KeyPath, hint: str | None = None, *, at_key: bool = False) -> None:
        at: Literal["key", "value"] = "key" if at_key else "value"
        self.problems.append(self.document.diagnostic(code, message, path, hint, at))


TOP_LEVEL = ("plan", "source_folder", *TABLES, *OPTIONAL, *(table.key for table in COMPONENTS))


def top_level_faults(document: Document) -> list[Diagnostic]:
    """Returns problems for an unsupported format, and for tables and keys that no plan has."""
    found = []
    version = document.tables.get("plan", FORMAT)
    if version != FORMAT or isinstance(version, bool):
        message = f"`plan` is the format of the plan, {FORMAT}, not {shown(version)}"
        found.append(document.diagnostic("plan-format", message, ("plan",)))
    unknown = [key for key in document.tables if key not in TOP_LEVEL]
    return found + [_unknown(document, key) for key in unknown]


def _unknown(document: Document, key: str) -> Diagnostic:
    """Returns the diagnostic of an unknown top-level key or table, with a suggestion."""
    if not isinstance(document.tables[key], dict | list):
        return unknown_key(key, TOP_LEVEL, (key,), document, "a plan", _elsewhere(key, document.tables))
    tables = [name for name in TOP_LEVEL if name not in ("plan", "source_folder")]
    hint = suggestion(key, tables, f"its tables are {', '.join(tables)}")
    return document.diagnostic("unknown-table", f"`{key}` is not a table of a plan", (key,), hint, "key")


def _elsewhere(key: str, tables: Mapping[str, Any]) -> str | None:
    """Returns a hint which table has `key`: the only one of this plan that contains it, or the only one whose model has it;
    else None.
    """
    here = [name for name, table in tables.items() if isinstance(table, dict) and key in table]
    known = [name for name, model in {**TABLES, **OPTIONAL}.items() if key in model.model_fields]
    found = here if len(here) == 1 else known
    return f"did you mean `{found[0]}.{key}`?" if len(found) == 1 else None


def validated(model: type[AnyTable], given: Mapping[str, Any], path: KeyPath, document: Document) -> AnyTable:
    """Returns `given`, the table at `path`, as a `model`. Raises pydantic's ValidationError."""
    keys = _with_paths(model, given, path, document) if document.bases else given
    return model.model_validate(keys, context={"folder": document.folder})


def _with_paths(model: type[Table], given: Mapping[str, Any], path: KeyPath, document: Document) -> dict[str, Any]:
    """Returns the keys of a table; each path that a file of another folder contains has that folder with it."""
    found = dict(given)
    for key, value in given.items():
        info = model.model_fields.get(key)
        if info is not None and _takes_path(info.annotation):
            found[key] = _with_folder(value, (*path, key), document)
    return found


def _with_folder(value: Any, path: KeyPath, document: Document) -> Any:
    """Returns a path, or a list of paths, with its folder if it comes from another folder than the plan's."""
    if isinstance(value, list):
        return [_with_folder(item, (*path, number), document) for number, item in enumerate(value)]
    folder = document.folder_of(path)
    is_elsewhere = isinstance(value, str) and folder is not None and folder != document.folder
    return BasePath(folder, value) if is_elsewhere and folder else value


def _takes_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_path, get_args(annotation)))

"""Resolves a document into a `Plan`: loads the plugins that it names, checks its top level and every table, and adds the
defaults.

All problems are collected, except those in tables of a missing plugin, which are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError

from sley_core.discovery import CORE
from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError, dotted
from sley_core.plan.check import check_data, check_tables
from sley_core.plan.defaults import default_list, default_of, is_named_by, no_factory, of_core, origins, without_default
from sley_core.plan.document import MOST_PROBLEMS, Document, by_place, first_of
from sley_core.plan.faults import faults, unknown_key
from sley_core.plan.kinds import COMPONENTS, ComponentTable, a_word
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.names import NameFault, OwnNames, Reference, references
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import DRAWN_STEP, FORMAT, OPTIONAL, TABLES, RunTable, TimelineTable
from sley_core.table import BasePath, Table, expanded, written
from sley_core.words import shown, suggestion

AnyTable = TypeVar("AnyTable", bound=Table)


def resolve(document: Document, loader: Loader, found_by_core: Iterable[KeyPath] = ()) -> Plan:
    """Returns the plan that `document` describes. found_by_core: the paths of values that a run, not the user, wrote.

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
    plan = Plan(**parts, document=resolver.document, loader=loader, plugins=resolver.plugins, origins={})
    return replace(plan, origins=origins(plan, {*resolver.written_in, *found_by_core}))


@dataclass
class _Resolver:
    """Resolves the tables of one document; collects the problems, the plugins, and the paths that core writes in."""

    document: Document
    loader: Loader
    problems: list[Diagnostic] = field(default_factory=list)
    plugins: dict[str, Plugin] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    written_in: set[KeyPath] = field(default_factory=set)
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
        self.written_in.add(("timeline", "step"))
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
            self.written_in.update((spec.key, number, "use") for number in range(len(default)))
            self.written_in.add((spec.key,))
            given: Any = [{"use": name} for name in default]
        else:
            given = self.tables[spec.key]
        if not isinstance(given, list):
            message = f"`{spec.key}` must be an array of tables, not {shown(given)}"
            self._problem("wrong-type", message, (spec.key,), f"write [[{spec.key}]] above each of them")
            return ()
        found, before = list[Component | None](), len(self.problems)
        for number, item in enumerate(given):
            if len(self.problems) - before >= MOST_PROBLEMS:
                message = f"{len(given) - number:,} more of `{spec.key}` were not looked at"
                self._problem("more-problems", message, (spec.key, number))
                break
            found.append(self._component(spec, item, (spec.key, number)))
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
            self.written_in.add((*path, "use"))
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
        if self.schedule is None or path not in self.written_in or not is_named_by(self.schedule, name):
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
    return found + first_of(unknown, partial(_unknown, document), "the plan")


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

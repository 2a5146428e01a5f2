"""Loads a plan from a file, a text, or a program's tables: loads the plugins that it names, checks every table, adds defaults.

All problems are collected, except those in tables of a missing plugin, which are not known. A table whose default depends on
the schedule (`ComponentTable.known`) takes the record that the schedule names, else the only one of its kind among the plan's
plugins. Plugins that the plan does not name are not imported.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from sley_core.discovery import CORE, install_hint
from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError, format_path
from sley_core.plan.check import check_all_data, check_tables
from sley_core.plan.document import Document, sort_by_place, to_plain_data
from sley_core.plan.faults import unknown_key_diagnostic, validation_diagnostics
from sley_core.plan.kinds import COMPONENTS, ComponentTable, kind_name, kind_with_article
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.plan import Component, EvaluationSet, Plan
from sley_core.plan.read import read_file, read_tables, read_text
from sley_core.plan.tables import FORMAT, OPTIONAL, TABLES, EvaluationTable, ParallelTable, SetTable
from sley_core.records import ScheduleRecord
from sley_core.table import NAMED_TABLES, BasePath, PartTable, RecordKind, RecordReference, Table, escape_path, expand_path
from sley_core.words import describe_value, suggestion


def load_plan(path: str | Path, overrides: Sequence[str] = (), *, loader: Loader | None = None) -> Plan:
    """Loads the plan in the file `path`, with `overrides`. Raises PlanError, or PluginError, with all problems. No torch."""
    return resolve_plan(read_file(path, overrides), loader or Loader())


def plan_from_text(
    text: str,
    file: str = "plan.toml",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    loader: Loader | None = None,
) -> Plan:
    """Loads the plan in `text`; messages call it `file`, relative paths start at `folder`. Raises as `load_plan` does."""
    return resolve_plan(read_text(text, file, folder, overrides), loader or Loader())


def plan_from_dict(
    tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = (), *, loader: Loader | None = None
) -> Plan:
    """Loads the plan in plain data, as TOML would give it; None leaves a key out. Raises as `load_plan`."""
    return resolve_plan(read_tables(tables, folder, overrides), loader or Loader())


def replace_values(plan: Plan, values: Mapping[KeyPath, Any]) -> Plan:
    """Returns a copy of the plan with `values`, which a run has determined. The loaded plugins check it again."""
    tables = deepcopy(plan.document.tables)
    for path, value in values.items():
        here: Any = tables
        for part in path[:-1]:
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
        here[path[-1]] = to_plain_data(value)
    return resolve_plan(replace(plan.document, tables=tables), plan.loader)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""A name without a dot, which tells it from a record's."""

SLEY_RECORDS: dict[RecordKind, str] = {"datasets": "data.text", "models": "models.llama"}
"""The record of another package of Sley's that a plan may begin with, by kinds of which core has none."""

DATA = next(table for table in COMPONENTS if table.key == "data")

TOP_LEVEL = ("plan", "source_folder", *TABLES, *OPTIONAL, *(table.key for table in COMPONENTS))

AnyTable = TypeVar("AnyTable", bound=Table)


class Reference(NamedTuple):
    """Describes a field at `path` within its table that names a record."""

    path: KeyPath
    kind: RecordKind
    name: str


def find_references(table: Table) -> Iterator[Reference]:
    """Yields every record reference in `table`, in the order of its model's fields."""
    for name, info in type(table).model_fields.items():
        yield from _find_nested_references(info.annotation, info.metadata, getattr(table, name), (name,))


def _find_nested_references(annotation: Any, metadata: Sequence[Any], value: Any, path: KeyPath) -> Iterator[Reference]:
    """Yields the references inside `value`, whose type is `annotation`, at any depth."""
    marks = [item for item in metadata if isinstance(item, RecordReference)]
    if marks and isinstance(value, str):
        yield Reference(path, marks[-1].kind, value)
    elif isinstance(value, Table):
        for inner in find_references(value):
            yield inner._replace(path=(*path, *inner.path))
    elif get_origin(annotation) is Annotated:
        inner_type, *more = get_args(annotation)
        yield from _find_nested_references(inner_type, more, value, path)
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _find_nested_references(arm, (), value, path)
    elif isinstance(value, tuple | list) and get_args(annotation):
        for number, item in enumerate(value):
            yield from _find_nested_references(get_args(annotation)[0], (), item, (*path, number))
    elif isinstance(value, dict) and get_args(annotation):
        for key, item in value.items():
            yield from _find_nested_references(get_args(annotation)[1], (), item, (*path, key))


def resolve_plan(document: Document, loader: Loader) -> Plan:
    """Returns the plan that `document` describes. Raises PlanError, or PluginError, with all problems, sorted by place."""
    resolver = _Resolver(document, loader)
    parts: dict[str, Any] = {name: resolver.table(name, model) for name, model in TABLES.items()}
    for name, model in OPTIONAL.items():
        parts[name] = resolver.table(name, model) if name in resolver.tables else None
    parts["evaluation_sets"] = resolver.sets(parts["evaluation"])
    # Tables whose default may be the only record of its kind come last, when all plugins that the plan names are known.
    for spec in sorted(COMPONENTS, key=lambda spec: spec.known is not None and not resolver.names_record(spec)):
        if spec.named:
            parts[spec.key] = resolver.named(spec)
        else:
            parts[spec.key] = resolver.components(spec, parts["parallel"]) if spec.many else resolver.component(spec)
    resolver.check_top_level()
    resolver.raise_problems(parts)
    return Plan(**parts, document=resolver.document, loader=loader, plugins=resolver.plugins)


class _Resolver:
    """Resolves the tables of one document; collects the problems, the plugins, and the names of tables that a field uses."""

    def __init__(self, document: Document, loader: Loader) -> None:
        self.document = document
        self.loader = loader
        self.tables = document.tables
        self.problems: list[Diagnostic] = []
        self.plugins: dict[str, Plugin] = {}
        self.schedule: Component | None = None
        self._broken_plugins: set[str] = set()
        self._used_names: set[tuple[str, str]] = set()  # of tables `[key.NAME]`
        self._apply_source_folder()
        self._load_plugin(CORE, ())

    def table(self, name: str, model: type[AnyTable]) -> AnyTable | None:
        """Returns core's table `name`; one without a required key may be left out. None if it has a problem."""
        required = [key for key, info in model.model_fields.items() if info.is_required()]
        if name not in self.tables and required:
            keys = ", ".join(f"`{key}`" for key in required)
            self._add_problem("missing-table", f"the plan needs a table [{name}] with {keys}", (name,))
            return None
        return self._validate(model, self.tables.get(name, {}), (name,), f"[{name}]")

    def component(self, spec: ComponentTable) -> Component | None:
        """Returns the component of a single table; None if an optional one is left out or it has a problem."""
        if spec.only_with is not None and spec.only_with not in self.tables:
            if spec.key in self.tables:
                message = f"{spec.header} means nothing without [{spec.only_with}]"
                self._add_problem("table-without-effect", message, (spec.key,), f"add [{spec.only_with}], or remove it")
            return None
        default = spec.default
        if spec.known is not None and self.schedule is not None:
            offered = self._available_records(spec)
            default = getattr(self.schedule.record, spec.key) or (offered[0] if len(offered) == 1 else None)
        if spec.key not in self.tables and default is None:
            self._report_missing_table(spec)
            return None
        component = self._resolve_component(spec, self.tables.get(spec.key, {}), (spec.key,), default)
        if spec.kind == "schedules":
            self.schedule = component
        return component

    def names_record(self, spec: ComponentTable) -> bool:
        """Returns whether the plan names the record of a table."""
        value = self.tables.get(spec.key)
        return isinstance(value, dict) and "use" in value

    def components(self, spec: ComponentTable, parallel: ParallelTable | None) -> tuple[Component, ...]:
        """Returns the components of a list of tables; if it is left out, those that the layout needs: a reducer if ranks may
        hold the same weight, and a handler of ties.
        """
        tables: Any = self.tables.get(spec.key, [])
        if spec.key not in self.tables and spec.key == "metrics":
            tables = [{"use": "core.jsonl"}]
        elif spec.key not in self.tables and spec.key == "gradient_handlers" and parallel:
            if parallel.dp == "auto" or parallel.dp * parallel.sp > 1:
                tables.append({"use": "core.each"})
            record = self.schedule.record if self.schedule and parallel.pp > 1 else None
            if isinstance(record, ScheduleRecord) and record.ties:
                tables.append({"use": record.ties})
        if not isinstance(tables, list):
            message = f"`{spec.key}` must be an array of tables, not {describe_value(tables)}"
            self._add_problem("wrong-type", message, (spec.key,), f"write [[{spec.key}]] above each of them")
            return ()
        components = [self._resolve_component(spec, item, (spec.key, number)) for number, item in enumerate(tables)]
        return tuple(component for component in components if component)

    def named(self, spec: ComponentTable) -> dict[str, Component]:
        """Returns the components of the tables `[key.NAME]`, by name."""
        tables = self.tables.get(spec.key, {})
        if not isinstance(tables, dict):
            self._add_problem(
                "wrong-type", f"`{spec.key}` must be tables {spec.header}, not {describe_value(tables)}", (spec.key,)
            )
            return {}
        if wrong := [name for name in tables if not _NAME.fullmatch(name)]:
            for name in wrong:
                message = f"`{name}` is no name of a table {spec.header}: it takes letters, digits, `_` and `-`"
                self._add_problem("wrong-name", message, (spec.key, name), "begin with a letter", at="key")
            return {}
        components = {name: self._resolve_component(spec, table, (spec.key, name)) for name, table in tables.items()}
        return {name: component for name, component in components.items() if component}

    def sets(self, evaluation: EvaluationTable | None) -> dict[str, EvaluationSet]:
        """Returns the sets of [evaluation] by name. A set that is evaluated whole gets a table that holds nothing out."""
        sets: dict[str, EvaluationSet] = {}
        for name, table in {} if evaluation is None else evaluation.sets.items():
            path = ("evaluation", "sets", name)
            spec = replace(DATA, key=format_path(path))
            if not _NAME.fullmatch(name):
                message = f"`{name}` is no name of a set: it takes letters, digits, `_` and `-`"
                self._add_problem("wrong-name", message, path, "begin with a letter", at="key")
                continue
            own = {key: value for key, value in table.items() if key in SetTable.model_fields}
            keys = self._validate(SetTable, own, path, spec.header)
            data = self._resolve_component(spec, {key: value for key, value in table.items() if key not in own}, path)
            if keys is None or data is None:
                continue
            if keys.split == "all":
                data = self._evaluate_whole(name, data)
            sets[name] = EvaluationSet(data, keys)
        return sets

    def _evaluate_whole(self, name: str, data: Component) -> Component:
        """Returns the data of the set `name` with nothing held out; records a problem if the table says otherwise."""
        config, hint = data.config, 'write split = "held_out" to evaluate on what it holds out, or leave it out'
        try:
            whole = config.whole()
        except ValueError as error:
            self._add_problem("set-held-out", f"the set `{name}` cannot be evaluated whole: {error}", data.path, hint)
            return data
        for key in sorted(config.model_fields_set):
            if getattr(config, key) != getattr(whole, key):
                message = f"`{key}` holds samples out, and the set `{name}` has all of them"
                self._add_problem("set-held-out", message, (*data.path, key), hint, at="key")
        return replace(data, config=whole)

    def check_top_level(self) -> None:
        """Records an unsupported format, and tables and keys that no plan has."""
        version = self.tables.get("plan", FORMAT)
        if version != FORMAT or isinstance(version, bool):
            self._add_problem(
                "plan-format", f"`plan` is the format of the plan, {FORMAT}, not {describe_value(version)}", ("plan",)
            )
        for key, value in self.tables.items():
            if key in TOP_LEVEL:
                continue
            if isinstance(value, dict | list):
                names = [name for name in TOP_LEVEL if name not in ("plan", "source_folder")]
                hint = suggestion(key, names, f"its tables are {', '.join(names)}")
                self._add_problem("unknown-table", f"`{key}` is not a table of a plan", (key,), hint, at="key")
                continue
            # Better than a similar spelling: the only table of this plan that contains the key, or whose model has it.
            here = [name for name, table in self.tables.items() if isinstance(table, dict) and key in table]
            known = [name for name, model in {**TABLES, **OPTIONAL}.items() if key in model.model_fields]
            homes = here if len(here) == 1 else known
            elsewhere = f"did you mean `{homes[0]}.{key}`?" if len(homes) == 1 else None
            self.problems.append(unknown_key_diagnostic(key, TOP_LEVEL, (key,), self.document, "a plan", elsewhere))

    def raise_problems(self, parts: Mapping[str, Any]) -> None:
        """Raises PlanError or PluginError if any problem was recorded, or if a table that the plan names is not used.

        parts: the tables; those without a mistake are also checked against each other, and the data's files, for one report.
        """
        if not self.problems:
            for key in NAMED_TABLES.values():
                for name in parts[key]:
                    if (key, name) not in self._used_names:
                        message = f"no table of the plan names `{name}`, so [{key}.{name}] means nothing"
                        hint = f'give it to a key, as in `pool = "{name}"`, or remove it'
                        self._add_problem("table-without-effect", message, (key, name), hint, at="key")
        if self.problems:
            more = list(check_tables(parts))
            if parts["data"] is not None:
                more += check_all_data(parts["data"], parts["model"], parts["evaluation"], parts["evaluation_sets"])
            self.problems += [self.document.diagnostic(one.code, one.message, one.path, one.hint) for one in more]
            kind = PluginError if any(problem.code.startswith("plugin-") for problem in self.problems) else PlanError
            raise kind.many(sort_by_place(self.problems))

    def _resolve_component(
        self,
        spec: ComponentTable,
        table: Any,
        path: KeyPath,
        default: str | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> Component | None:
        """Returns the component of one table, by its `use`, its `factory` or `default`; None if it has a problem. shared: keys
        that it gets if its record takes them.
        """
        if not isinstance(table, dict):
            self._add_problem("wrong-type", f"`{spec.key}` must be a table, not {describe_value(table)}", path)
            return None
        if "use" in table and "factory" in table and spec.factory:
            message = f"{spec.header} has both `use` and `factory`"
            self._add_problem("use-and-factory", message, (*path, "factory"), "keep one of them", at="key")
            return None
        if "factory" in table and spec.factory:
            config = self._validate(spec.factory, {**_select_shared(shared, spec.factory), **table}, path, spec.header)
            name = str(table["factory"])
            return Component(spec, name, None, config, path, self.document) if config else None
        if "factory" in table and "use" not in table:
            message = f"{spec.header} takes no `factory`: {kind_with_article(spec.kind)} comes from a plugin, by its name"
            component_type = kind_with_article(spec.kind)
            hint = f"`use` one, or install a plugin of your own that offers {component_type} (docs/write-a-plugin.md)"
            known = f"; {core}" if (core := self._suggest_record(spec)) else ""
            self._add_problem("no-factory", message, (*path, "factory"), f"{hint}{known}", at="key")
            return None
        if "use" not in table:
            if default is None:
                message = f"{spec.header} needs `use`, the name of {kind_with_article(spec.kind)}"
                self._add_problem("missing-key", message, (*path, "use"), self._suggest_record(spec))
                return None
            table = {"use": default, **table}
        return self._resolve_record(spec, table, path, shared)

    def _resolve_record(
        self, spec: ComponentTable, table: dict[str, Any], path: KeyPath, shared: Mapping[str, Any] | None
    ) -> Component | None:
        """Returns the component that `use` names, its config validated and its references loaded; None if it has a problem."""
        name = table["use"]
        at, by = (*path, "use"), ""
        schedule = self.schedule.record if self.schedule and not self.document.origin(at) else None
        if (
            self.schedule
            and isinstance(schedule, ScheduleRecord)
            and name in (schedule.link, schedule.partition, schedule.ties)
        ):
            at, by = (*self.schedule.path, "use"), f"`{self.schedule.name}` names `{name}`: "
        plugin = self._load_record_plugin(name, at, by)
        if plugin is None:
            return None
        try:
            record = self.loader.record(spec.kind, name)
        except SleyError as error:
            self._add_error(error, at, by)
            return None
        rest = _select_shared(shared, record.config) | {key: value for key, value in table.items() if key != "use"}
        parts = {}
        for key, model in _part_table_fields(record.config):
            rest[key], parts[key] = self._resolve_parts(spec, model, rest, (*path, key))
        config = self._validate(record.config, rest, path, f"`{name}`")
        if config is None or not all(map(all, parts.values())):
            return None
        for key, components in parts.items():
            for part, component in zip(getattr(config, key), components, strict=True):
                part.set_component(component)
        for reference in find_references(config):
            self._load_reference(reference, (*path, *reference.path))
        return Component(spec, name, record, config, path, self.document, plugin)

    def _resolve_parts(
        self, spec: ComponentTable, model: type[PartTable], around: Mapping[str, Any], path: KeyPath
    ) -> tuple[Any, list[Component | None]]:
        """Returns the array of tables at `path` without the keys of their records, and the components of these. around: the
        table that has the array.
        """
        tables = around.get(str(path[-1]))
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            return tables, []  # reported by the model of the table around it
        own = [{key: value for key, value in table.items() if key in model.model_fields} for table in tables]
        shared = {key: around[key] for key in model.shared if key in around}
        inner = replace(spec, key=format_path(path), kind=model.kind, many=True)
        components = []
        for number, table in enumerate(tables):
            rest = {key: value for key, value in table.items() if key == "use" or key not in model.model_fields}
            components.append(self._resolve_component(inner, rest, (*path, number), shared=shared))
        return own, components

    def _load_reference(self, reference: Reference, at: KeyPath) -> None:
        """Loads the record that a field names, or finds the plan's table of that name; records a problem if there is none."""
        key = NAMED_TABLES.get(reference.kind)
        if key and "." not in reference.name:
            tables = self.tables.get(key)
            names = list(tables) if isinstance(tables, dict) else []
            self._used_names.add((key, reference.name))
            if reference.name not in names:
                hint = f'add it with `use`, or name {kind_with_article(reference.kind)} as "plugin.record"'
                message = f"the plan has no table [{key}.{reference.name}]"
                self._add_problem("unknown-name", message, at, suggestion(reference.name, names, hint))
        elif self._load_record_plugin(reference.name, at):
            try:
                self.loader.record(reference.kind, reference.name)
            except SleyError as error:
                self._add_error(error, at)

    def _report_missing_table(self, spec: ComponentTable) -> None:
        """Records that a table is missing, unless it is not needed, or [pipeline] itself has a problem."""
        parallel = self.tables.get("parallel")
        has_stages = isinstance(parallel, dict) and parallel.get("pp", 1) != 1
        if spec.known is None:
            choices = "`use` or `factory`" if spec.factory else "`use`"
            has = self.plugins[CORE].records.get(spec.kind, {})
            hint = f"core has {', '.join(f'`{CORE}.{name}`' for name in has)}" if has else self._suggest_record(spec)
            self._add_problem("missing-table", f"the plan needs a table [{spec.key}] with {choices}", (spec.key,), hint)
        elif self.schedule is not None and (spec.kind != "stage_links" or has_stages):
            message = f"the plan needs a table {spec.header} with `use`: `{self.schedule.name}` names no {kind_name(spec.kind)}"
            home = spec.known.partition(".")[0]
            more = "" if home in self.loader.names() else f"; {install_hint(home)}"
            component_type = kind_with_article(spec.kind)
            hint = f'add {spec.header} with `use = "{spec.known}"` of sley-{home}, or {component_type} of another plugin{more}'
            have = "none"
            if offered := self._available_records(spec):
                have, hint = ", ".join(f"`{name}`" for name in offered), "name one of them"
            self._add_problem("missing-table", f"{message}, and the plan's plugins have {have}", ("pipeline", "use"), hint)

    def _available_records(self, spec: ComponentTable) -> list[str]:
        return [f"{plugin.name}.{name}" for plugin in self.plugins.values() for name in plugin.records[spec.kind]]

    def _suggest_record(self, spec: ComponentTable) -> str | None:
        """Returns a text that lists core's records for a table, or one of another package of Sley's; None if there is none."""
        core = self.plugins.get(CORE)
        if core and core.records[spec.kind]:
            return "core has " + ", ".join(f'"{CORE}.{name}"' for name in core.records[spec.kind])
        other = SLEY_RECORDS.get(spec.kind)
        return f'sley-{other.partition(".")[0]} has "{other}"' if other else None

    def _load_record_plugin(self, name: Any, path: KeyPath, by: str = "") -> Plugin | None:
        """Returns the loaded plugin of a record's name; None, with a problem recorded, if there is no such name or plugin."""
        plugin, dot, record = name.partition(".") if isinstance(name, str) else ("", "", "")
        if dot and plugin and record:
            return self._load_plugin(plugin, path, by)
        message = f'`{format_path(path)}` must be the name of a record, "plugin.record", not {describe_value(name)}'
        self._add_problem("wrong-value" if isinstance(name, str) else "wrong-type", message, path)
        return None

    def _load_plugin(self, name: str, path: KeyPath, by: str = "") -> Plugin | None:
        """Returns the plugin `name`, which is loaded at most once. Records a problem and returns None if that fails."""
        if name not in self.plugins and name not in self._broken_plugins:
            try:
                self.plugins[name] = self.loader.load(name)
            except PluginError as error:
                self._broken_plugins.add(name)
                self._add_error(error, path, by)
        return self.plugins.get(name)

    def _validate(self, model: type[AnyTable], table: Any, path: KeyPath, owner: str) -> AnyTable | None:
        """Returns `table` as a `model`. Records the problems and returns None if it is invalid."""
        if not isinstance(table, dict):
            self._add_problem("wrong-type", f"`{path[0]}` must be a table, not {describe_value(table)}", path)
            return None
        keys = dict(table)
        for key, value in table.items():
            info = model.model_fields.get(key)
            if self.document.bases and info is not None and _is_path_type(info.annotation):
                keys[key] = _attach_folder(value, (*path, key), self.document)
        try:
            return model.model_validate(keys, context={"folder": self.document.folder})
        except ValidationError as error:
            self.problems += validation_diagnostics(error, model, table, path, self.document, owner)
            return None

    def _apply_source_folder(self) -> None:
        """Makes relative paths start in the plan's `source_folder`, if it has one, instead of the file's folder."""
        value = self.tables.get("source_folder")
        if isinstance(value, str):
            try:
                folder = Path(self.document.folder or Path(), expand_path(value))
            except ValueError as error:
                self._add_problem("wrong-value", f"`source_folder`: {error}", ("source_folder",))
                return
            self.tables = {**self.tables, "source_folder": escape_path(str(folder))}
            self.document = replace(self.document, folder=folder, tables=self.tables)
        elif value is not None:
            self._add_problem(
                "wrong-type", f"`source_folder` must be a string, not {describe_value(value)}", ("source_folder",)
            )

    def _add_error(self, error: SleyError, path: KeyPath, by: str = "") -> None:
        for problem in error.diagnostics:
            self._add_problem(problem.code, by + problem.message, path, problem.hint)

    def _add_problem(
        self, code: str, message: str, path: KeyPath, hint: str | None = None, *, at: Literal["key", "value"] = "value"
    ) -> None:
        self.problems.append(self.document.diagnostic(code, message, path, hint, at))


def _select_shared(shared: Mapping[str, Any] | None, model: type[Table]) -> dict[str, Any]:
    return {key: value for key, value in (shared or {}).items() if key in model.model_fields}


def _part_table_fields(model: type[Table]) -> Iterator[tuple[str, type[PartTable]]]:
    """Yields the keys whose values are arrays of tables with records of their own, with the models of these."""
    for key, info in model.model_fields.items():
        for item in get_args(info.annotation):
            if isinstance(item, type) and issubclass(item, PartTable):
                yield key, item


def _attach_folder(value: Any, path: KeyPath, document: Document) -> Any:
    """Returns a path, or a list of paths, with its folder if it comes from another folder than the plan's."""
    if isinstance(value, list):
        return [_attach_folder(item, (*path, number), document) for number, item in enumerate(value)]
    folder = document.folder_of(path)
    is_elsewhere = isinstance(value, str) and folder is not None and folder != document.folder
    return BasePath(folder, value) if is_elsewhere and folder else value


def _is_path_type(annotation: Any) -> bool:
    return annotation is Path or any(map(_is_path_type, get_args(annotation)))

"""Loads a plan from a file, a text or tables that a program built: imports the plugins that the plan names, checks every table,
and adds defaults.

One error reports all problems. For some tables, the record of the schedule names the default (`ScheduleRecord`). Plugins that
the plan does not name are not imported.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError, format_path, suggestion
from sley_core.plan.document import Document, read_file, read_tables, read_text, sort_by_place, to_plain_data
from sley_core.plan.kinds import COMPONENTS, ComponentTable
from sley_core.plan.loader import CORE, Plugin, PluginLoader
from sley_core.plan.plan import Component, EvaluationSet, Plan
from sley_core.plan.tables import FORMAT, OPTIONAL_TABLES, TABLES, EvaluationSetTable, EvaluationTable, ParallelTable
from sley_core.records import DatasetRecord, ModelRecord, Record, ScheduleRecord
from sley_core.table import PartTable, Table, describe_type, describe_value, escape_path, expand_path


def load_plan(path: str | Path, overrides: Sequence[str] = (), *, loader: PluginLoader | None = None) -> Plan:
    """Returns the plan in the file `path`. overrides: texts `key.path=VALUE`. loader: by default, loads the installed plugins.
    Raises PlanError or PluginError with all problems. Does not import torch.
    """
    return resolve_plan(read_file(path, overrides), loader or PluginLoader())


def plan_from_text(
    text: str,
    file: str = "plan.toml",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    loader: PluginLoader | None = None,
) -> Plan:
    """Returns the plan in `text`, with the checks of `load_plan`. file: the plan's name in messages. folder: the folder in
    which relative paths start; by default the current directory.
    """
    return resolve_plan(read_text(text, file, folder, overrides), loader or PluginLoader())


def plan_from_dict(
    tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = (), *, loader: PluginLoader | None = None
) -> Plan:
    """Returns the plan in `tables`, with the checks of `load_plan`. `tables` has the types of parsed TOML; a key with the value
    None is ignored. folder: the folder in which relative paths start; by default the current directory.
    """
    return resolve_plan(read_tables(tables, folder, overrides), loader or PluginLoader())


def replace_values(plan: Plan, values: Mapping[KeyPath, Any]) -> Plan:
    """Returns a copy of the plan with `values` at their paths. Raises the errors of `load_plan`."""
    tables = deepcopy(plan.document.tables)
    for path, value in values.items():
        table: Any = tables
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else table[part]
        table[path[-1]] = to_plain_data(value)
    return resolve_plan(replace(plan.document, tables=tables), plan.loader)


_SET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""The pattern of the NAME in `[evaluation.sets.NAME]`."""

SUGGESTED_RECORDS: dict[type[Record], str] = {DatasetRecord: "data.text", ModelRecord: "models.llama"}
"""Maps each record class for which core has no record to the record of another Sley package that errors suggest."""

NO_KEYS: Mapping[str, Any] = {}  # the keys of an enclosing table that shares none

TOP_LEVEL_KEYS = ("plan", "source_folder", *TABLES, *OPTIONAL_TABLES, *(table.key for table in COMPONENTS))
"""The keys that a plan may have at its top level."""

AnyTable = TypeVar("AnyTable", bound=Table)


def resolve_plan(document: Document, loader: PluginLoader) -> Plan:
    """Returns the plan of `document`. Raises PlanError or PluginError with all problems, sorted by place."""
    resolver = _Resolver(document, loader)
    parts: dict[str, Any] = {name: resolver.core_table(name, model) for name, model in TABLES.items()}
    for name, model in OPTIONAL_TABLES.items():
        parts[name] = resolver.core_table(name, model) if name in resolver.tables else None
    parts["evaluation_sets"] = resolver.evaluation_sets(parts["evaluation"])
    for spec in COMPONENTS:
        parts[spec.key] = resolver.components(spec, parts["parallel"]) if spec.is_list else resolver.component(spec)
    resolver.check_top_level()
    if resolver.problems:
        error_type = PluginError if any(problem.code.startswith("plugin-") for problem in resolver.problems) else PlanError
        raise error_type.from_diagnostics(sort_by_place(resolver.problems))
    return Plan(**parts, document=resolver.document, loader=loader, plugins=resolver.plugins)


class _Resolver:
    """Resolves the tables of a document for `resolve_plan`, and collects the problems that it finds in `problems`."""

    def __init__(self, document: Document, loader: PluginLoader) -> None:
        self.document = document
        self.loader = loader
        self.tables = document.tables
        self.problems: list[Diagnostic] = []
        self.plugins: dict[str, Plugin] = {}
        self.schedule: Component | None = None
        self._broken_plugins: set[str] = set()
        self._apply_source_folder()
        self._load_plugin(CORE, ())

    def core_table(self, name: str, model: type[AnyTable]) -> AnyTable | None:
        """Returns core's table `name`; records the problems and returns None if it is invalid, or required but missing."""
        required = [key for key, info in model.model_fields.items() if info.is_required()]
        if name not in self.tables and required:
            keys = ", ".join(f"`{key}`" for key in required)
            self._add_problem("missing-table", f"the plan needs a [{name}] table with {keys}", (name,))
            return None
        return self._validate(model, self.tables.get(name, {}), (name,), f"[{name}]")

    def component(self, spec: ComponentTable) -> Component | None:
        """Returns the component of a single table; None if the table has a recorded problem, or is optional and missing."""
        if spec.required_table is not None and spec.required_table not in self.tables:
            if spec.key in self.tables:
                message = f"{spec.header} has no effect without [{spec.required_table}]"
                self._add_problem(
                    "table-without-effect", message, (spec.key,), f"add [{spec.required_table}], or remove {spec.header}"
                )
            return None
        default = getattr(self.schedule.record, spec.key, spec.default) if self.schedule else spec.default
        if spec.key not in self.tables and default is None:
            if spec.required_table in (None, spec.key):  # otherwise [pipeline] itself has a problem
                choices = "`use` or `factory`" if spec.factory else "`use`"
                message = f"the plan needs a [{spec.key}] table with {choices}"
                self._add_problem("missing-table", message, (spec.key,), self._suggest_record(spec))
            return None
        component = self._resolve_component(spec, self.tables.get(spec.key, {}), (spec.key,), default)
        if spec.key == "pipeline":
            self.schedule = component
        return component

    def components(self, spec: ComponentTable, parallel: ParallelTable | None) -> tuple[Component, ...]:
        """Returns the components of an array of tables, except invalid tables. By default, the gradient handlers are a reducer,
        if several ranks may hold the same weight, and the schedule's handler for weights that stages share.
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
            self._add_problem("wrong-type", message, (spec.key,), f"write [[{spec.key}]] above each table")
            return ()
        components = [self._resolve_component(spec, item, (spec.key, number)) for number, item in enumerate(tables)]
        return tuple(component for component in components if component)

    def evaluation_sets(self, evaluation: EvaluationTable | None) -> dict[str, EvaluationSet]:
        """Returns the sets of [evaluation] by name. A set with `split = "all"` gets data without a held-out split."""
        sets: dict[str, EvaluationSet] = {}
        data_table = next(table for table in COMPONENTS if table.key == "data")
        for name, table in {} if evaluation is None else evaluation.sets.items():
            path = ("evaluation", "sets", name)
            spec = replace(data_table, key=format_path(path))
            if not _SET_NAME.fullmatch(name):
                message = f"the name of a set must contain only letters, digits, `_` and `-`, but is `{name}`"
                self._add_problem("wrong-name", message, path, "use a name that begins with a letter", at="key")
                continue
            set_keys = _select_keys(table, EvaluationSetTable)
            keys = self._validate(EvaluationSetTable, set_keys, path, spec.header)
            data = self._resolve_component(spec, {key: value for key, value in table.items() if key not in set_keys}, path)
            if keys is None or data is None:
                continue
            if keys.split == "all":
                hint = 'set split = "held_out" to evaluate on the held-out samples'
                try:
                    whole = data.config.include_held_out()
                except ValueError as error:
                    self._add_problem(
                        "set-held-out", f"the set `{name}` cannot be evaluated on all samples: {error}", path, hint
                    )
                    continue
                for key in sorted(data.config.model_fields_set):
                    if getattr(data.config, key) != getattr(whole, key):
                        message = f"`{key}` holds out samples, but the set `{name}` is evaluated on all samples"
                        self._add_problem("set-held-out", message, (*path, key), hint, at="key")
                data = replace(data, config=whole)
            sets[name] = EvaluationSet(data, keys)
        return sets

    def check_top_level(self) -> None:
        """Records a problem for a wrong format number `plan`, and for each unknown key at the top level."""
        version = self.tables.get("plan", FORMAT)
        if version != FORMAT or isinstance(version, bool):
            message = f"`plan`, the version of the plan format, must be {FORMAT}, not {describe_value(version)}"
            self._add_problem("plan-format", message, ("plan",))
        for key in [key for key in self.tables if key not in TOP_LEVEL_KEYS]:
            owners = [name for name, model in TABLES.items() if key in model.model_fields]
            hint = f"did you mean `{owners[0]}.{key}`?" if len(owners) == 1 else None
            self.problems.append(unknown_key_diagnostic(key, TOP_LEVEL_KEYS, (key,), self.document, "a plan", hint))

    def _resolve_component(
        self, spec: ComponentTable, table: Any, path: KeyPath, default: str | None = None, shared: Mapping[str, Any] = NO_KEYS
    ) -> Component | None:
        """Returns the component that `use` or `factory` of the table, or else `default`, names. If the table has a problem,
        records it and returns None. shared: keys of the enclosing table, which are passed to the record if its config has them.
        """
        if not isinstance(table, dict):
            self._add_problem("wrong-type", f"`{spec.key}` must be a table, not {describe_value(table)}", path)
            return None
        if "factory" in table:
            if "use" in table:
                message, hint = f"{spec.header} has both `use` and `factory`", "remove one of them"
                self._add_problem("use-and-factory", message, (*path, "factory"), hint, at="key")
                return None
            if spec.factory is None:
                message = f"{spec.header} does not support `factory`"
                hint = "set `use`, or write a plugin with a record of your own (docs/write-a-plugin.md)"
                self._add_problem("no-factory", message, (*path, "factory"), hint, at="key")
                return None
            config = self._validate(spec.factory, {**_select_keys(shared, spec.factory), **table}, path, spec.header)
            return Component(spec, str(table["factory"]), None, config, path, self.document) if config else None
        if "use" not in table:
            if default is None:
                message = f"{spec.header} needs `use`, the name of a record"
                self._add_problem("missing-key", message, (*path, "use"), self._suggest_record(spec))
                return None
            table = {"use": default, **table}
        return self._resolve_record(spec, table, path, shared)

    def _resolve_record(
        self, spec: ComponentTable, table: dict[str, Any], path: KeyPath, shared: Mapping[str, Any]
    ) -> Component | None:
        """Returns the component for `table`, whose `use` names a record. If the table has a problem, adds it to the problems
        and returns None. shared: the keys that the table inherits.
        """
        name = table["use"]
        use_path, prefix = (*path, "use"), ""
        record = self.schedule.record if self.schedule and not self.document.origin(use_path) else None
        if self.schedule and isinstance(record, ScheduleRecord) and name in (record.link, record.partition, record.ties):
            use_path, prefix = (*self.schedule.path, "use"), f"`{self.schedule.name}` needs `{name}`: "
        plugin_name, _, record_name = name.partition(".") if isinstance(name, str) else ("", "", "")
        if not plugin_name or not record_name:
            message = f'`{format_path(use_path)}` must be the name of a record, "plugin.record", not {describe_value(name)}'
            self._add_problem("wrong-value" if isinstance(name, str) else "wrong-type", message, use_path)
            return None
        plugin = self._load_plugin(plugin_name, use_path, prefix)
        if plugin is None:
            return None
        try:
            record = self.loader.record(spec.record_type, name)
        except SleyError as error:
            self._add_error(error, use_path, prefix)
            return None
        keys = _select_keys(shared, record.config) | {key: value for key, value in table.items() if key != "use"}
        parts = {}
        for key, field in record.config.model_fields.items():
            for model in _table_types(field.annotation):
                if issubclass(model, PartTable):
                    keys[key], parts[key] = self._resolve_parts(spec, model, keys, (*path, key))
                    for shared_key in model.shared:
                        first, *others = [getattr(part.config, shared_key, None) for part in parts[key] if part] or [None]
                        if first is not None and all(value == first for value in others):
                            keys[shared_key] = first
        config = self._validate(record.config, keys, path, f"`{name}`")
        if config is None or not all(map(all, parts.values())):
            return None
        for key, components in parts.items():
            for part, component in zip(getattr(config, key), components, strict=True):
                part.set_component(component, config)
        return Component(spec, name, record, config, path, self.document, plugin)

    def _resolve_parts(
        self, spec: ComponentTable, model: type[PartTable], enclosing: Mapping[str, Any], path: KeyPath
    ) -> tuple[Any, list[Component | None]]:
        """Splits each table of an array, which is at `path` in the plan, and in `enclosing` under the last part of `path`.
        Returns the tables with only the keys of `model`, and the components that the other keys specify.
        """
        tables = enclosing.get(str(path[-1]))
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            return tables, []  # the validation of the enclosing table reports this
        model_tables = [_select_keys(table, model) for table in tables]
        shared = {key: enclosing[key] for key in model.shared if key in enclosing}
        inner = replace(spec, key=format_path(path), record_type=model.record_type, is_list=True)
        components = []
        for number, table in enumerate(tables):
            record_table = {key: value for key, value in table.items() if key == "use" or key not in model.model_fields}
            components.append(self._resolve_component(inner, record_table, (*path, number), shared=shared))
        return model_tables, components

    def _suggest_record(self, spec: ComponentTable) -> str | None:
        """Returns a hint that names core's records for a table, or else a record of another Sley package; or None."""
        core = self.plugins.get(CORE)
        if core and (names := core.records_of(spec.record_type)):
            return "core has " + ", ".join(f'"{name}"' for name in names)
        record = SUGGESTED_RECORDS.get(spec.record_type)
        return f'sley-{record.partition(".")[0]} has "{record}"' if record else None

    def _load_plugin(self, name: str, path: KeyPath, prefix: str = "") -> Plugin | None:
        """Returns the plugin `name`, or None if it cannot be loaded. Records this problem once. prefix: begins the message."""
        if name not in self.plugins and name not in self._broken_plugins:
            try:
                self.plugins[name] = self.loader.load(name)
            except PluginError as error:
                self._broken_plugins.add(name)
                self._add_error(error, path, prefix)
        return self.plugins.get(name)

    def _validate(self, model: type[AnyTable], table: Any, path: KeyPath, owner: str) -> AnyTable | None:
        """Returns `table` as an instance of `model`; if it is invalid, records the problems and returns None."""
        if not isinstance(table, dict):
            self._add_problem("wrong-type", f"`{path[0]}` must be a table, not {describe_value(table)}", path)
            return None
        try:
            return model.model_validate(table, context={"folder": self.document.folder})
        except ValidationError as error:
            self.problems += validation_diagnostics(error, model, table, path, self.document, owner)
            return None

    def _apply_source_folder(self) -> None:
        """Makes the plan's `source_folder`, if it has one, the folder of the document. Records a problem if it is invalid."""
        value, path = self.tables.get("source_folder"), ("source_folder",)
        if value is None:
            return
        if not isinstance(value, str):
            self._add_problem("wrong-type", f"`source_folder` must be a string, not {describe_value(value)}", path)
            return
        try:
            folder = Path(self.document.folder or Path(), expand_path(value))
        except ValueError as error:
            self._add_problem("wrong-value", f"`source_folder`: {error}", path)
            return
        self.tables = {**self.tables, "source_folder": escape_path(str(folder))}
        self.document = replace(self.document, folder=folder, tables=self.tables)

    def _add_error(self, error: SleyError, path: KeyPath, prefix: str = "") -> None:
        for problem in error.diagnostics:
            self._add_problem(problem.code, prefix + problem.message, path, problem.hint)

    def _add_problem(
        self, code: str, message: str, path: KeyPath, hint: str | None = None, *, at: Literal["key", "value"] = "value"
    ) -> None:
        self.problems.append(self.document.diagnostic(code, message, path, hint, at))


def _select_keys(table: Mapping[str, Any], model: type[Table]) -> dict[str, Any]:
    """Returns the keys of `table` that `model` has."""
    return {key: value for key, value in table.items() if key in model.model_fields}


RANGE_ERRORS = ("greater_than", "less_than", "multiple_of", "finite_number", "too_", "string_too_")
"""The prefixes of pydantic's error types for a range or a length."""


def validation_diagnostics(
    error: ValidationError, model: type[Table], table: Mapping[str, Any], path: KeyPath, document: Document, owner: str
) -> list[Diagnostic]:
    """Returns a diagnostic for each invalid key of `table`, which is at `path` and has the type `model`. Merges the errors that
    pydantic reports for each member of a union. owner: the table's name in messages, such as "[batch]".
    """
    errors_by_key: dict[KeyPath, list[Any]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        if fault["type"] != "default_factory_not_called":
            errors_by_key.setdefault(_key_path(fault["loc"], fault["type"], table), []).append(fault)
    # An error within a table that is one member of a union says more than the errors of the other members.
    containers = {key[:length] for key in errors_by_key for length in range(len(key))}
    return [
        _key_diagnostic(errors, key, model, table, path, document, owner)
        for key, errors in errors_by_key.items()
        if key not in containers or not all(fault["type"].endswith("_type") for fault in errors)
    ]


def unknown_key_diagnostic(
    key: str, keys: Iterable[str], path: KeyPath, document: Document, owner: str, hint: str | None = None
) -> Diagnostic:
    """Returns the diagnostic for a key that `owner` does not have. hint: by default, suggests the most similar of `keys`."""
    choices = sorted(keys)
    key_list = f"its keys are {', '.join(f'`{name}`' for name in choices)}" if choices else "it has no keys"
    message = f"`{key}` is not a key of {owner}"
    return document.diagnostic("unknown-key", message, path, hint or suggestion(key, choices, key_list), at="key")


def _key_diagnostic(
    errors: list[Any], key_path: KeyPath, model: type[Table], table: Any, table_path: KeyPath, document: Document, owner: str
) -> Diagnostic:
    """Returns one diagnostic for `errors`, which pydantic reports for the key `key_path` of `table`."""
    types = {fault["type"] for fault in errors}
    path = (*table_path, *key_path)
    if "extra_forbidden" in types:
        enclosing = owner if len(key_path) == 1 else f"`{format_path(path[:-1])}`"
        return unknown_key_diagnostic(str(key_path[-1]), _sibling_fields(model, key_path), path, document, enclosing)
    field = _sibling_fields(model, key_path).get(str(key_path[-1])) if key_path else None
    expected = describe_type(field.annotation, field.metadata) if field else errors[0]["msg"].removeprefix("Input should be ")
    if "missing" in types:
        hint = field.description if field else None
        return document.diagnostic("missing-key", f"{owner} needs `{format_path(key_path)}`, {expected}", path, hint, at="key")
    if custom_errors := [fault for fault in errors if fault["type"] in ("value_error", "assertion_error")]:
        text = str(custom_errors[0].get("ctx", {}).get("error") or custom_errors[0]["msg"])
        label = f"`{format_path(path)}`" if key_path else owner
        return document.diagnostic("wrong-value", f"{label}: {text.rstrip('.')}", path)
    value: Any = table
    for part in key_path:
        value = value[part]
    code, hint = "wrong-type", None
    if any(error_type.startswith(RANGE_ERRORS) for error_type in types):
        code = "out-of-range"
    elif types & {"literal_error", "enum", "string_pattern_mismatch"} and isinstance(value, str):
        code, hint = "wrong-value", suggestion(value, expected.split('"')[1::2])
    elif isinstance(value, str) and expected.startswith(("an integer", "a number", "true or false")):
        text = value.strip().lower()
        if text in ("true", "false") or text.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdecimal():
            hint = f"write {text} without quotes"
    return document.diagnostic(code, f"`{format_path(path)}` must be {expected}, not {describe_value(value)}", path, hint)


def _sibling_fields(model: type[Table], path: KeyPath) -> dict[str, FieldInfo]:
    """Returns the fields, by name, of the table in `model` that contains the key at `path`."""
    models = [model]
    for part in path[:-1]:
        fields = [outer.model_fields[str(part)] for outer in models if part in outer.model_fields]
        models = [inner for field in fields for inner in _table_types(field.annotation)] or models
    return {key: field for table in models for key, field in table.model_fields.items()}


def _table_types(annotation: Any) -> Iterator[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for argument in get_args(annotation):
        yield from _table_types(argument)


def _key_path(location: tuple[str | int, ...], error_type: str, table: Any) -> KeyPath:
    """Returns the path in `table` for the location of a pydantic error, in which members of unions may have entries."""
    path: KeyPath = ()
    value: Any = table
    for position, part in enumerate(location):
        is_index = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, Mapping) and part in value):
            value = value[part]
        elif error_type != "missing" or position != len(location) - 1:
            continue
        path = (*path, part)
    return path

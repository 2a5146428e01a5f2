"""`train-cli check`, `needs`, `schema` and `env`: work on plans before a run, without torch unless `--model` is set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.json_schema import models_json_schema

from sley_core.discovery import CORE, EXAMPLES, package_folder
from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError
from sley_core.plan.check import check_plan, has_tie_handler, timer_package
from sley_core.plan.document import Document
from sley_core.plan.kinds import COMPONENTS, ComponentTable
from sley_core.plan.load import load_plan, resolve_plan
from sley_core.plan.loader import FIRST_PARTY, Loader
from sley_core.plan.read import read_file
from sley_core.plan.tables import EXTENDS, FORMAT, OPTIONAL_TABLES, SOURCE_FOLDER, TABLES, SetTable
from sley_core.records import Record
from sley_core.table import Table
from train_cli.console import say
from train_cli.options import (
    FormatOption,
    NodesOption,
    OutputFormat,
    PerNodeOption,
    PlanArgument,
    SetOption,
    WorldOption,
    world_size,
)


def check(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plans, TOML files.")],
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    model: Annotated[
        bool,
        typer.Option(
            "--model",
            help="Also build the model and the optimizer, and call the layers, on meta. Imports torch and runs code that "
            "the plan names.",
        ),
    ] = False,
) -> None:
    """Check the tables, files, sizes and layout of plans. Starts and writes nothing."""
    world = world_size(world, nodes, per_node)
    errors: list[SleyError] = []
    for path in plans:
        try:
            _check(path, overrides or [], world, model)
        except SleyError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        raise type(worst).from_diagnostics(diagnostic for error in errors for diagnostic in error.diagnostics)
    result = "1 plan is fine" if len(plans) == 1 else f"{len(plans)} plans are fine"
    say(result if model else f"{result}; no model was built (use --model)")


def _check(path: Path, overrides: list[str], world: int | None, model: bool) -> None:
    """Raises SleyError with the problems of one plan; prints notes. model: whether to build and call the model."""
    plan = load_plan(path, overrides)
    size = plan.world(world) if world is None else world
    if problems := check_plan(plan, size):
        raise PlanError.from_diagnostics(problems)
    if model:
        from train_cli.meta_model import check_model

        for note in check_model(plan, size, calls_layers=True):
            say(f"{path}: {note}")
    elif plan.parallel.pp > 1 and not has_tie_handler(plan):
        say(f"{path}: no gradient handler sums weights that stages share; use --model to check whether there are such weights")


def env(form: FormatOption = OutputFormat.text) -> None:
    """Print versions and devices for a bug report."""
    from train_cli.environment import machine_info

    info = machine_info()
    width = max(map(len, info))
    lines = [f"{name:{width}}  {value}" for name, value in info.items()]
    typer.echo(json.dumps(info, indent=2) if form is OutputFormat.json else "\n".join(lines))


_RECORD = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*")


def needs(plan: PlanArgument, overrides: SetOption = None) -> None:
    """Print a pip requirement for each package that the plan needs: pip install $(train-cli needs plan.toml)

    Sley's own packages are folders of a clone, since no index has them. Other plugins are pinned to the installed version.
    """
    document = read_file(plan, overrides or [])
    loader = Loader()
    extras = _extras(document)
    lines = {CORE: f"-e {package_folder(CORE)}", "train-cli": "-e apps/train-cli"}
    paths = dict(reversed([*_named_plugins(document, loader)]))  # the first path of each plugin
    timer = ""
    try:
        resolved = resolve_plan(document, loader)
    except SleyError:
        names = [*reversed(paths)]
        note = "the plan cannot be resolved yet; install these packages and run this command again, since they may need others"
    else:  # also has the plugins that a default or a record names
        names, timer, note = [*resolved.plugins], timer_package(resolved), ""
    unknown: list[Diagnostic] = []
    for name in names:
        if name in lines:
            continue
        try:
            lines[name] = _requirement(name, loader, extras)
        except PluginError as error:
            lines[name] = ""
            unknown += [
                document.diagnostic(problem.code, problem.message, paths[name], problem.hint) for problem in error.diagnostics
            ]
    if unknown:
        raise PluginError.from_diagnostics(unknown)
    if timer:
        is_sley_package = timer.startswith("sley_")
        lines[timer] = f"-e {package_folder(timer.removeprefix('sley_'))}" if is_sley_package else timer
    for line in lines.values():
        typer.echo(line)
    say("Sley's packages are on no index: pass these lines to pip in a clone of its repository")
    if note:
        say(note)


def _extras(document: Document) -> dict[str, str]:
    """Returns the extras that the plan needs, separated by commas, by plugin."""
    strings = {value for _, value in _iterate_strings(document.tables.get("metrics"))}
    writers = (writer for writer in ("tensorboard", "wandb") if f"metrics.{writer}" in strings)
    data = _table(document, "data")
    extra = "chat" if data.get("use") == "data.chat" else "tokenizers" if "tokenizer" in data else ""
    return {"metrics": ",".join(writers), "data": extra}


def _requirement(name: str, loader: Loader, extras: Mapping[str, str]) -> str:
    """Returns the pip requirement of plugin `name`. Raises PluginError if it is neither Sley's own nor installed."""
    if name in FIRST_PARTY or name in EXAMPLES:
        return f"-e {package_folder(name, extras.get(name, ''))}"
    match loader.sources(name):
        case [dist]:
            return f"{dist.dist}=={dist.version}" if dist.version != "0" else dist.dist
    loader.load(name)
    raise AssertionError(f"plugin {name} was neither found nor missing")


def _named_plugins(document: Document, loader: Loader) -> Iterator[tuple[str, KeyPath]]:
    """Yields the plugins of the records in the plan, and of the default of each table without `use`, with their paths.

    Only a plugin knows which of its fields besides `use` name records, and it may not be installed. So every string counts
    that looks like a record of a known plugin.
    """
    plugin_names = {*FIRST_PARTY, *EXAMPLES, *loader.names()}
    plugin_names -= {"data", "metrics"}  # only `use` names their records; `data.json` is a file
    for path, value in _iterate_strings(document.tables):
        match = _RECORD.fullmatch(value)
        if match and (path[-1] == "use" or match[1] in plugin_names):
            yield match[1], path
    for spec in COMPONENTS:
        is_open = not {"use", "factory"} & _table(document, spec.key).keys()
        if spec.default and is_open and (spec.required_table is None or spec.required_table in document.tables):
            yield spec.default.partition(".")[0], (spec.key,)


def _iterate_strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields the path and value of every string in the plan, except those in arrays (files) and in `options`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "options":
                yield from _iterate_strings(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict):
                yield from _iterate_strings(inner, (*path, number))
    elif isinstance(value, str):
        yield path, value


def _table(document: Document, name: str) -> dict[str, Any]:
    table = document.tables.get(name)
    return table if isinstance(table, dict) else {}


DIALECT = "https://json-schema.org/draft/2020-12/schema"
ITEM_LIMITS = {"minLength": "minItems", "maxLength": "maxItems"}
"""pydantic writes an array's limits as a string's if a validator precedes them; this maps them back."""


def schema() -> None:
    """Print the JSON Schema of a plan with the records of the installed plugins."""
    typer.echo(json.dumps(json_schema(), indent=2))


def json_schema(loader: Loader | None = None) -> dict[str, Any]:
    """Returns the JSON Schema of a plan for editors, with one alternative per record of the plugins that `loader` can load.

    The schema checks types, ranges and keys. It does not check what only core can check, such as divisibility and files.
    """
    loader = loader or Loader()
    records: dict[str, dict[str, Record]] = {spec.key: {} for spec in COMPONENTS}
    for name in loader.names():
        try:
            plugin = loader.load(name)
        except PluginError:
            continue
        for spec in COMPONENTS:
            records[spec.key] |= {f"{name}.{record.name}": record for record in plugin.records[spec.kind].values()}
    models: list[type[Table]] = [
        *TABLES.values(),
        *OPTIONAL_TABLES.values(),
        SetTable,
        *(spec.factory for spec in COMPONENTS if spec.factory),
    ]
    models += [record.config for named in records.values() for record in named.values()]
    references, definitions = models_json_schema([(model, "validation") for model in dict.fromkeys(models)])
    shared: dict[str, Any] = _adapt_to_toml(definitions.get("$defs", {}))

    copied: set[str] = set()

    def schema_of(model: type[Table]) -> dict[str, Any]:
        """Returns a copy of a model's schema, to which pydantic refers."""
        name = references[model, "validation"]["$ref"].rpartition("/")[2]
        copied.add(name)
        return deepcopy(shared[name])

    properties: dict[str, Any] = {
        "plan": {"const": FORMAT, "description": "The format of the plan."},
        "extends": {"type": "string", "description": EXTENDS},
        "source_folder": {"type": "string", "description": SOURCE_FOLDER},
    }
    properties |= {name: schema_of(model) for name, model in {**TABLES, **OPTIONAL_TABLES}.items()}
    for spec in COMPONENTS:
        choices = []
        for name, record in records[spec.key].items():
            choice = schema_of(record.config)
            choice["properties"] = {"use": {"const": name}, **choice.get("properties", {})}
            if name != spec.default and not spec.suggested_record:
                choice["required"] = ["use", *choice.get("required", [])]
            choices.append(choice)
        properties[spec.key] = _component(spec, choices + ([schema_of(spec.factory)] if spec.factory else []))
    set_schema = _set_schema(properties["data"], schema_of(SetTable))
    properties["evaluation"]["properties"]["sets"]["additionalProperties"] = set_schema
    required = [name for name, model in TABLES.items() if any(key.is_required() for key in model.model_fields.values())]
    required += [spec.key for spec in COMPONENTS if not (spec.is_list or spec.has_names or spec.default or spec.required_table)]
    return {
        "$schema": DIALECT,
        "title": "A plan of Sley",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": {name: schema for name, schema in shared.items() if name not in copied},
    }


def _component(spec: ComponentTable, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of a component table with the alternatives `choices`: a table, an array, or tables by name."""
    # If the schedule determines the default, a table without `use` may belong to any record.
    alternatives = "anyOf" if spec.suggested_record else "oneOf"
    table: dict[str, Any] = {"type": "object", alternatives: choices} if choices else {"type": "object"}
    if spec.has_names:
        return {"description": spec.summary, "type": "object", "additionalProperties": table}
    if not spec.is_list:
        return {"description": spec.summary, **table}
    return {"description": spec.summary, "type": "array", "items": table}


def _set_schema(data: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of `[evaluation.sets.NAME]`: the schema of [data] with the `keys` of a set in each alternative."""
    choices = [{**choice, "properties": {**choice["properties"], **keys["properties"]}} for choice in data["oneOf"]]
    return {"type": "object", "oneOf": choices}


def _adapt_to_toml(schema: Any) -> Any:
    """Returns a schema adapted to TOML: without null and titles, and with the array limits of JSON Schema."""
    if isinstance(schema, list):
        return [_adapt_to_toml(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    entries = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    if "default" in entries and entries["default"] is None:
        del entries["default"]
    arms = [arm for arm in entries.pop("anyOf", []) if arm != {"type": "null"}]
    entries |= arms[0] if len(arms) == 1 else {"anyOf": arms} if arms else {}
    if entries.get("type") == "array":
        entries = {ITEM_LIMITS.get(key, key): value for key, value in entries.items()}
    return {key: _adapt_to_toml(inner) for key, inner in entries.items()}

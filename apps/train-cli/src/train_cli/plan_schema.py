"""Generates the JSON Schema of a plan, for editors: core's tables, and for each component table one alternative per record."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic.json_schema import models_json_schema

from sley_core.errors import PluginError
from sley_core.plan.kinds import COMPONENTS, ComponentTable
from sley_core.plan.loader import Loader
from sley_core.plan.tables import EXTENDS, FORMAT, OPTIONAL, SOURCE_FOLDER, TABLES
from sley_core.records import Record
from sley_core.table import Table

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ITEM_LIMITS = {"minLength": "minItems", "maxLength": "maxItems"}
"""pydantic writes an array's limits as a string's if a validator precedes them; this maps them back."""


def json_schema(loader: Loader | None = None) -> dict[str, Any]:
    """Returns the schema, with the records of every plugin that `loader` can load; a broken plugin has no alternatives.

    It checks types, ranges and keys. It accepts what only core can check (sizes that divide, files that exist).
    """
    records = _records(loader or Loader())
    models = [*TABLES.values(), *OPTIONAL.values(), *(spec.factory for spec in COMPONENTS if spec.factory)]
    models += [record.config for named in records.values() for record in named.values()]
    found, definitions = models_json_schema([(model, "validation") for model in dict.fromkeys(models)])
    shared: dict[str, Any] = _for_toml(definitions.get("$defs", {}))

    def schema_of(model: type[Table]) -> dict[str, Any]:
        """Returns a copy of a model's full schema, for which pydantic gives a reference."""
        return deepcopy(shared[found[model, "validation"]["$ref"].rpartition("/")[2]])

    properties: dict[str, Any] = {
        "plan": {"const": FORMAT, "description": "The format of the plan."},
        "extends": {"type": "string", "description": EXTENDS},
        "source_folder": {"type": "string", "description": SOURCE_FOLDER},
    }
    properties |= {name: schema_of(model) for name, model in {**TABLES, **OPTIONAL}.items()}
    for spec in COMPONENTS:
        choices = [_of_record(spec, name, schema_of(record.config)) for name, record in records[spec.key].items()]
        choices += [schema_of(spec.factory)] if spec.factory else []
        properties[spec.key] = _component(spec, choices)
    required = [name for name, model in TABLES.items() if any(key.is_required() for key in model.model_fields.values())]
    required += [spec.key for spec in COMPONENTS if not (spec.many or spec.named or spec.default or spec.only_with)]
    return {
        "$schema": DIALECT,
        "title": "A plan of Sley",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": _used(shared, properties),
    }


def _records(loader: Loader) -> Mapping[str, Mapping[str, Record]]:
    """Returns the records of all plugins that load, by table and by the name in a plan."""
    records: dict[str, dict[str, Record]] = {spec.key: {} for spec in COMPONENTS}
    for name in loader.names():
        try:
            plugin = loader.load(name)
        except PluginError:
            continue
        for spec in COMPONENTS:
            records[spec.key] |= {f"{name}.{record.name}": record for record in plugin.records[spec.kind].values()}
    return records


def _of_record(spec: ComponentTable, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Adds `use` to a record's schema, required unless the record is the default; returns the schema."""
    schema["properties"] = {"use": {"const": name}, **schema.get("properties", {})}
    if name != spec.default and not spec.known:
        schema["required"] = ["use", *schema.get("required", [])]
    return schema


def _component(spec: ComponentTable, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of a component table from its alternatives `choices`: one table, a list of them, or tables by name."""
    # If the schedule gives the default, a table without `use` may be of any record.
    of = "anyOf" if spec.known else "oneOf"
    one: dict[str, Any] = {"type": "object", of: choices} if choices else {"type": "object"}
    if spec.named:
        return {"description": spec.summary, "type": "object", "additionalProperties": one}
    if not spec.many:
        return {"description": spec.summary, **one}
    return {"description": spec.summary, "type": "array", "items": one}


def _for_toml(schema: Any) -> Any:
    """Returns a schema adapted to TOML: without null and titles, and with limits of arrays named as such."""
    if isinstance(schema, list):
        return [_for_toml(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    if "default" in kept and kept["default"] is None:
        del kept["default"]
    arms = [arm for arm in kept.pop("anyOf", []) if arm != {"type": "null"}]
    kept |= arms[0] if len(arms) == 1 else {"anyOf": arms} if arms else {}
    if kept.get("type") == "array":
        kept = {ITEM_LIMITS.get(key, key): value for key, value in kept.items()}
    return {key: _for_toml(inner) for key, inner in kept.items()}


def _used(shared: Mapping[str, Any], properties: Any) -> dict[str, Any]:
    """Returns the shared definitions that `properties` refer to, directly or through another."""
    used: dict[str, Any] = {}
    waiting = [properties]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            name = str(schema.get("$ref", "")).rpartition("/")[2]
            if name in shared and name not in used:
                used[name] = shared[name]
                waiting.append(shared[name])
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return dict(sorted(used.items()))

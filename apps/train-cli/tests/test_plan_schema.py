"""The JSON Schema says of a plan's text what core says, as far as a schema can; the reference lists every key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import PositiveInt
from reference_pages import plan_page, rows

from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import Loader
from sley_core.plan.tables import OPTIONAL_TABLES, TABLES
from sley_core.records import MemoryPoolRecord, MetricsWriterRecord, Record
from sley_core.table import Table
from sley_testing.plans import loader_of, small_plan
from train_cli.commands.check import json_schema

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
MEANT = {
    *("$ref", "$defs", "$schema", "title", "description", "default", "format", "type", "const", "enum", "anyOf", "oneOf"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minLength", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""The words of JSON Schema that `accepts` understands; another in the schema fails the test."""


@pytest.fixture
def tables() -> dict[str, Any]:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 8}
    return {"plan": 1, **small_plan(data=data, parallel={"dp": 2})}


class Sized(Table):
    """A table with a key."""

    size: PositiveInt = 8
    """A key."""


class Plugin:
    """A plugin with a pool and a writer."""

    @hookimpl
    def sley_records(self) -> list[Record]:
        return [
            MemoryPoolRecord(name="sized", config=Sized, build="nowhere:Sized"),
            MetricsWriterRecord(name="csv", config=Table, build="collections:OrderedDict"),
        ]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(loader_of({}))


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a JSON Schema, of the words in `MEANT`, accepts a value."""
    assert schema.keys() <= MEANT, schema.keys() - MEANT
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        return False
    if "anyOf" in schema and not any(accepts(arm, value, root) for arm in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(accepts(arm, value, root) for arm in schema["oneOf"]) != 1:
        return False
    match value:
        case dict():
            more = schema.get("additionalProperties", True)
            keys = {key: schema.get("properties", {}).get(key, more) for key in value}
            are_known = all(part is not False for part in keys.values()) and value.keys() >= set(schema.get("required", []))
            return are_known and all(part is True or accepts(part, value[key], root) for key, part in keys.items())
        case list():
            is_long = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
            return is_long and all(accepts(schema.get("items", {}), item, root) for item in value)
        case str():
            return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value))
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    is_between = (low is None or value > low) and (high is None or value < high)
    return is_between and bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


def test_it_accepts_plans(schema: dict[str, Any], tables: dict[str, Any]) -> None:
    assert accepts(schema, tables, schema)
    changes: dict[str, Any] = {
        "evaluation": {"every": 2},
        "profile": {"steps": [1, 2]},
        "loss": {"label_smoothing": 0.1},
        "model": {"factory": "my.code:layers", "options": {"anything": [1, {"x": "y"}]}},
        "data": {"factory": "my.code:data", "fields": {"x": {"dtype": "int64"}}},
    }
    plan = plan_from_dict({**tables, **changes}, loader=loader_of({}))
    assert accepts(schema, plan.tables, schema)
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("run", {"steps": True}),
        ("run", {"steps": 0}),
        ("run", {"stepz": 1}),
        ("run", {"name": "a/b"}),
        ("parallel", {"dp": "atuo"}),
        ("optimizer", {"use": "core.adam"}),
        ("optimizer", {"momentum": 0.5}),
        ("optimizer", {"lr": "high"}),
        ("optimizer", {"betas": [0.9]}),
        ("optimizer", {"groups": [{"match": "a", "typo": 1}]}),
        ("model", {"hidden": 1.5}),
        ("model", {"factory": "a:b"}),
    ],
)
def test_it_refuses_what_core_refuses(
    schema: dict[str, Any], tables: dict[str, Any], table: str, change: dict[str, Any]
) -> None:
    tables[table].update(change)
    assert not accepts(schema, tables, schema)


@pytest.mark.parametrize("table", ["run", "model", "data", "batch", "optimizer"])
def test_it_demands_what_core_demands(schema: dict[str, Any], tables: dict[str, Any], table: str) -> None:
    del tables[table]
    assert not accepts(schema, tables, schema)
    assert not accepts(schema, {**tables, table: {}, "model": {}}, schema)


def test_sizes_may_be_left_out_beside_weights_alone(schema: dict[str, Any], tables: dict[str, Any]) -> None:
    tables["model"] = {"use": "models.llama", "weights": "there"}
    assert accepts(schema, tables, schema)
    tables["model"] = {"use": "models.llama", "num_layers": 2, "hidden": 16}
    assert not accepts(schema, tables, schema)


def metrics_of(schema: dict[str, Any]) -> list[str]:
    choices = [choice["properties"] for choice in schema["properties"]["metrics"]["items"]["oneOf"]]
    return [choice["use"]["const"] for choice in choices if "use" in choice]


def test_plugins_add_their_records_and_broken_ones_none(schema: dict[str, Any]) -> None:
    class Broken:
        @hookimpl
        def sley_records(self) -> Any:
            raise RuntimeError("broken")

    assert metrics_of(json_schema(loader_of({"own": Plugin()}))) == [*metrics_of(schema), "own.csv"]
    assert json_schema(loader_of({"broken": Broken()})) == schema


def test_a_table_per_name_has_a_schema() -> None:
    pools = json_schema(loader_of({"own": Plugin()}))["properties"]["pools"]
    (one,) = pools["additionalProperties"]["oneOf"]
    assert one["properties"]["use"] == {"const": "own.sized"}
    assert one["required"] == ["use"]
    assert [row.key for row in rows(Sized)] == ["size"]


def test_the_page_in_the_documentation_is_up_to_date() -> None:
    page = next((folder / "docs" for folder in Path(__file__).parents if (folder / "docs").is_dir()), None)
    if page is None:
        pytest.skip("the documentation is not beside the package")
    written = (page / "plan.md").read_text("utf-8")
    assert written == plan_page(), "run: python .ci/reference_pages.py plan > docs/plan.md"


def test_every_key_has_a_type_and_a_meaning() -> None:
    core = Loader(plugins={}).load("core")
    records = [record.config for named in core.records.values() for record in named.values()]
    for model in (*TABLES.values(), *OPTIONAL_TABLES.values(), *records):
        assert model.__doc__
        for row in rows(model):
            assert row.meaning.endswith("."), (model, row)
            assert row.takes not in ("a value", ""), (model, row)

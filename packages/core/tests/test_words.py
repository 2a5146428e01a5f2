"""Types and values are said in words that a person would use."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from sley_core.table import Array, FactoryPath, Fraction, PlanPath, Positive, RecordReference, Table
from sley_core.words import field_at, inner_table, suggestion, takes


class Inner(Table):
    size: Positive


class Outer(Table):
    one: Inner | None = None
    many: Array[Inner] = ()
    named: dict[str, Inner] = Field(default_factory=dict)
    pair: tuple[int, str] = (1, "")
    free: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "an integer"),
        (Positive, "an integer of at least 1"),
        (Annotated[int, Field(gt=1, le=9)], "an integer above 1 and at most 9"),
        (Fraction, "a number of at least 0 and at most 1"),
        (Fraction | None, "a number of at least 0 and at most 1"),
        (bool, "true or false"),
        (str | int | Literal["x", True], 'a string, an integer or "x" or true'),
        (Array[Positive], "an array, each an integer of at least 1"),
        (Annotated[Array[int], Field(min_length=2)], "an array of at least 2, each an integer"),
        (Annotated[Array[int], Field(max_length=2)], "an array of at most 2, each an integer"),
        (tuple[int, str], "an array of 2, each an integer"),
        (PlanPath, "a path"),
        (FactoryPath, 'a path to code, "package.module:name"'),
        (Annotated[str, RecordReference("schedules")], 'the name of a record, "plugin.record"'),
        (Inner, "a table"),
        (dict[str, int], "a table"),
        (Any, "any value"),
        (date, "a value"),
    ],
)
def test_types(annotation: Any, text: str) -> None:
    assert takes(annotation) == text


def test_fields_are_found_inside_tables_arrays_and_unions() -> None:
    for path in (("one", "size"), ("many", 3, "size"), ("named", "x", "size")):
        found = field_at(Outer, path)
        assert found
        assert takes(*found) == "an integer of at least 1"
    assert field_at(Outer, ("pair", 1)) == (str, ())
    assert field_at(Outer, ("pair", 7)) == (str, ())
    assert field_at(Outer, ("free", "x")) == (Any, ())
    for nowhere in (("none",), ("one", "x"), ("many", "x"), ("one", 1)):
        assert field_at(Outer, nowhere) is None


def test_tables_inside_fields() -> None:
    fields = Outer.model_fields
    assert {name: inner_table(info.annotation) for name, info in fields.items()} == {
        "one": (Inner, ""),
        "many": (Inner, ".N"),
        "named": (Inner, ".NAME"),
        "pair": None,
        "free": None,
    }


def test_suggestions() -> None:
    assert suggestion("stesp", ["steps", "seed"]) == "did you mean `steps`?"
    assert suggestion("x", ["steps"], "its keys are `steps`") == "its keys are `steps`"
    assert suggestion("x", []) is None


def test_a_path_without_a_folder_stays_as_it_is() -> None:
    class Where(Table):
        path: PlanPath

    assert Where(path=Path("a/b")).model_dump() == {"path": "a/b"}

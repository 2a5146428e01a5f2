"""What a key means is what stands below its field, in whatever class that is."""

from __future__ import annotations

from pydantic import Field

from sley_core.plan.descriptions import describe_all, description
from sley_core.table import Table


class Inner(Table):
    """A table in a table."""

    depth: int = 1
    """How deep."""


class Base(Table):
    """What several have."""

    shared: int = 0
    """Of all
    of them."""

    undescribed: int = 0


class Derived(Base):
    """One of them."""

    own: int = Field(1, description="Said in the field.")
    """Not read."""

    inner: Inner = Inner()
    """A table."""

    def method(self) -> None:
        """Not a field's."""


def test_the_docstring_below_a_field() -> None:
    assert description(Inner, "depth") == "How deep."
    assert description(Derived, "inner") == "A table."


def test_of_a_base_class() -> None:
    assert description(Derived, "shared") == "Of all\nof them."


def test_the_fields_own_words_come_first() -> None:
    assert description(Derived, "own") == "Said in the field."


def test_nothing_where_there_is_none() -> None:
    assert description(Derived, "undescribed") is None
    assert description(Derived, "no_key") is None
    sourceless = type("Sourceless", (Table,), {"__annotations__": {"key": int}, "key": 3})
    assert description(sourceless, "key") is None


def test_a_schema_has_them_also_of_a_table_within_a_table() -> None:
    Derived()
    describe_all()
    schema = Derived.model_json_schema()
    assert schema["properties"]["shared"]["description"] == "Of all\nof them."
    assert schema["$defs"]["Inner"]["properties"]["depth"]["description"] == "How deep."

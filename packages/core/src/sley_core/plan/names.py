"""Tables to which a plan gives its own names, `[pools.NAME]`, and the fields of other tables that refer to these names."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from sley_core.errors import KeyPath
from sley_core.plan.kinds import ComponentTable, a_word
from sley_core.table import NAMED_TABLES, RecordKind, RecordReference, Table
from sley_core.words import shown, suggestion

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

"""The records to which fields of a table refer, apart from its `use`: the pool of a communicator, the partition of a
pipeline.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from sley_core.errors import KeyPath
from sley_core.table import RecordKind, RecordReference, Table


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

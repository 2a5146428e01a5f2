"""Descriptions of a table's keys: the docstrings below its fields, read from its source when they are needed.

pydantic can do this (`use_attribute_docstrings`), but does so for every table whenever its module is imported, which
was an eighth of the time of `train-cli check`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent

from sley_core.table import Table


def description(model: type[Table], key: str) -> str | None:
    """Returns what `key` of `model` means: the field's own `description`, else the docstring below it or below a base's."""
    info = model.model_fields.get(key)
    if info is None or info.description:
        return info and info.description
    return next((text for base in model.__mro__ if (text := _docstrings(base).get(key))), None)


def describe_all() -> None:
    """Sets the descriptions of the fields of every imported table, for a JSON Schema that is made next."""
    # In the order in which they were defined: a table within another comes before it, and is built into it.
    for model in _tables(Table):
        missing = [key for key, info in model.model_fields.items() if not info.description]
        for key in missing:
            model.model_fields[key].description = description(model, key)
        if missing:
            model.model_rebuild(force=True, raise_errors=False)


def _tables(model: type[Table]) -> Iterator[type[Table]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _tables(inner)


@cache
def _docstrings(model: type) -> Mapping[str, str]:
    """Returns the docstrings of the fields that this class itself defines; none if there is no source."""
    if not issubclass(model, Table):
        return {}
    try:
        tree = ast.parse(dedent(inspect.getsource(model)))
    except (OSError, TypeError, SyntaxError):
        return {}
    statements = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, below in pairwise(statements):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found

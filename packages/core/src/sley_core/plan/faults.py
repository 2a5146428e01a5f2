"""Converts pydantic's errors about a table into diagnostics, one per key.

pydantic reports an error for each member of a union and adds the member's name to the location. This module removes these names
by following the location through the table, and merges the errors of one key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from sley_core.errors import Diagnostic, KeyPath, format_path
from sley_core.plan.document import Document
from sley_core.table import Table
from sley_core.words import describe_type, describe_value, find_field, suggestion

RANGE_ERRORS = {
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "finite_number",
    "too_short",
    "too_long",
    "string_too_short",
    "string_too_long",
}
VALUE_ERRORS = {"literal_error", "enum", "string_pattern_mismatch"}
CUSTOM_ERRORS = {"value_error", "assertion_error"}
IGNORED_ERROR = "default_factory_not_called"


def validation_diagnostics(
    error: ValidationError, model: type[Table], table: Mapping[str, Any], path: KeyPath, document: Document, owner: str
) -> list[Diagnostic]:
    """Returns a diagnostic for each invalid key of `table`, which is at `path` and has the type `model`.

    owner: the table's name in messages, such as "[batch]".
    """
    errors_by_key: dict[KeyPath, list[Any]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        if fault["type"] != IGNORED_ERROR:
            errors_by_key.setdefault(_key_path(fault["loc"], fault["type"], table), []).append(fault)
    # An error within a table that is one member of a union says more than the errors of the other members.
    containers = {key[:length] for key in errors_by_key for length in range(len(key))}
    return [
        _diagnostic(errors, key, model, table, path, document, owner)
        for key, errors in errors_by_key.items()
        if key not in containers or not all(fault["type"].endswith("_type") for fault in errors)
    ]


def unknown_key_diagnostic(
    key: str, keys: Iterable[str], path: KeyPath, document: Document, owner: str, hint: str | None = None
) -> Diagnostic:
    """Returns the diagnostic of the unknown key `key` of `owner`. hint: by default suggests the closest of `keys`."""
    choices = sorted(keys)
    key_list = f"its keys are {', '.join(f'`{name}`' for name in choices)}" if choices else "it has no keys"
    message = f"`{key}` is not a key of {owner}"
    return document.diagnostic("unknown-key", message, path, hint or suggestion(key, choices, key_list), at="key")


def _diagnostic(
    errors: list[Any],
    key_path: KeyPath,
    model: type[Table],
    table: Mapping[str, Any],
    table_path: KeyPath,
    document: Document,
    owner: str,
) -> Diagnostic:
    """Returns one diagnostic for all pydantic errors at `key_path` within the table at `table_path`."""
    types = {fault["type"] for fault in errors}
    path = (*table_path, *key_path)
    enclosing = find_field(model, key_path[:-1])
    members = (enclosing[0], *get_args(enclosing[0])) if enclosing else ()  # of a union, the table
    fields: Mapping[str, Any] = next((member.model_fields for member in members if hasattr(member, "model_fields")), {})
    if "extra_forbidden" in types:
        return unknown_key_diagnostic(
            str(key_path[-1]), fields, path, document, owner if len(key_path) == 1 else f"`{format_path(path[:-1])}`"
        )
    is_missing = "missing" in types
    if is_missing and not isinstance(key_path[-1], int):
        message = f"{owner} needs `{format_path(key_path)}`, {_describe_field(model, key_path)}"
        hint = fields[key_path[-1]].description if key_path[-1] in fields else None
        return document.diagnostic("missing-key", message, path, hint, at="key")
    if is_missing:  # an item of an array
        path, key_path = path[:-1], key_path[:-1]
    elif custom_errors := [fault for fault in errors if fault["type"] in CUSTOM_ERRORS]:
        text = str(custom_errors[0].get("ctx", {}).get("error") or custom_errors[0]["msg"])
        label = f"`{format_path(path)}`" if key_path else owner
        return document.diagnostic("wrong-value", f"{label}: {text.rstrip('.')}", path)
    value: Any = table
    for part in key_path:
        value = value[part]
    expected = _describe_field(model, key_path)
    code, hint = "wrong-type", None
    if is_missing or types & RANGE_ERRORS:
        code = "out-of-range"
    elif types & VALUE_ERRORS and isinstance(value, str):
        code, hint = "wrong-value", suggestion(value, expected.split('"')[1::2])
    elif isinstance(value, str) and expected.startswith(("an integer", "a number", "true or false")):
        text = value.strip().lower()
        if text in ("true", "false") or text.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdecimal():
            hint = f"write {text} without quotes"
    return document.diagnostic(code, f"`{format_path(path)}` must be {expected}, not {describe_value(value)}", path, hint)


def _describe_field(model: type[Table], path: KeyPath) -> str:
    field = find_field(model, path)
    return describe_type(*field) if field else "something else"


def _key_path(location: tuple[str | int, ...], error_type: str, table: Any) -> KeyPath:
    """Returns pydantic's `location` without the names of union members."""
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

"""Turns pydantic's errors about a table into Sley's diagnostics, one per key.

pydantic reports one error per arm of a union and puts names of arms into the location. Here the location is followed along the
table that was given, which gives the key path, and the arms' errors are merged into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    """Returns one diagnostic per key of the table `table`, at `path`, which should be a `model`. owner: its name, "[batch]"."""
    by_key: dict[KeyPath, list[Any]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        if fault["type"] != IGNORED_ERROR:
            by_key.setdefault(_key_path(fault["loc"], fault["type"], table), []).append(fault)
    return [_diagnostic(errors, inner, model, table, path, document, owner) for inner, errors in by_key.items()]


def unknown_key_diagnostic(
    key: str, known: Iterable[str], path: KeyPath, document: Document, owner: str, elsewhere: str | None = None
) -> Diagnostic:
    """Returns the diagnostic of a key that `owner` does not have, with the closest known key. elsewhere: a better hint."""
    choices = sorted(known)
    listed = f"its keys are {', '.join(f'`{name}`' for name in choices)}" if choices else "it has no keys"
    message = f"`{key}` is not a key of {owner}"
    return document.diagnostic("unknown-key", message, path, elsewhere or suggestion(key, choices, listed), at="key")


def _diagnostic(
    errors: list[Any],
    inner: KeyPath,
    model: type[Table],
    table: Mapping[str, Any],
    path: KeyPath,
    document: Document,
    owner: str,
) -> Diagnostic:
    """Returns one diagnostic for all pydantic errors `errors` at the key path `inner` of a table."""
    kinds = {fault["type"] for fault in errors}
    whole = (*path, *inner)
    of_key = find_field(model, inner[:-1])
    fields = getattr(of_key[0], "model_fields", {}) if of_key else {}
    if "extra_forbidden" in kinds:
        return unknown_key_diagnostic(
            str(inner[-1]), fields, whole, document, owner if len(inner) == 1 else f"`{format_path(whole[:-1])}`"
        )
    is_missing = "missing" in kinds
    if is_missing and not isinstance(inner[-1], int):
        message = f"{owner} needs `{format_path(inner)}`, {_describe_field(model, inner)}"
        hint = fields[inner[-1]].description if inner[-1] in fields else None
        return document.diagnostic("missing-key", message, whole, hint, at="key")
    if is_missing:  # an item of an array
        whole, inner = whole[:-1], inner[:-1]
    elif own := [fault for fault in errors if fault["type"] in CUSTOM_ERRORS]:
        text = str(own[0].get("ctx", {}).get("error") or own[0]["msg"])
        return document.diagnostic("wrong-value", f"{f'`{format_path(whole)}`' if inner else owner}: {text.rstrip('.')}", whole)
    value: Any = table
    for part in inner:
        value = value[part]
    expected = _describe_field(model, inner)
    code, hint = "wrong-type", None
    if is_missing or kinds & RANGE_ERRORS:
        code = "out-of-range"
    elif kinds & VALUE_ERRORS and isinstance(value, str):
        code, hint = "wrong-value", suggestion(value, expected.split('"')[1::2])
    elif isinstance(value, str) and expected.startswith(("an integer", "a number", "true or false")):
        bare = value.strip().lower()
        if bare in ("true", "false") or bare.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdecimal():
            hint = f"write {bare} without quotes"
    return document.diagnostic(code, f"`{format_path(whole)}` must be {expected}, not {describe_value(value)}", whole, hint)


def _describe_field(model: type[Table], path: KeyPath) -> str:
    field = find_field(model, path)
    return describe_type(*field) if field else "something else"


def _key_path(location: tuple[str | int, ...], kind: str, table: Any) -> KeyPath:
    """Returns the parts of `location` that are keys and indices of `table`, without names of union arms."""
    path: KeyPath = ()
    here: Any = table
    for position, part in enumerate(location):
        is_index = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if is_index or (isinstance(here, Mapping) and part in here):
            here = here[part]
        elif kind != "missing" or position != len(location) - 1:
            continue
        path = (*path, part)
    return path

"""Descriptions of a plan's types and values, for messages and the plan reference.

`describe_type(int, [Ge(1)])` is "an integer of at least 1"; `describe_value(True)` is "the boolean true".
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as limits

from sley_core.table import Table, ValueDescription

TYPE_DESCRIPTIONS = {bool: "true or false", str: "a string", Path: "a path", Any: "any value"}
MAX_SHOWN_LENGTH = 40

SYNONYMS = {
    "gpu": "cuda",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "learning_rate": "lr",
    "batch_size": "global_size",
    "max_steps": "steps",
    "host_memory": "cross_memory_attach",
}
"""Names from other frameworks or earlier plans, with Sley's names, for pairs that differ too much in spelling."""


_RESUME_HINT = "use `[checkpoint]` to save a run, and `train-cli run PLAN --resume auto` to continue it"
FOREIGN_KEY_HINTS = (
    dict.fromkeys(
        (
            "resume",
            "resume_from",
            "checkpoint",
            "checkpoints",
            "checkpointing",
            "from_checkpoint",
            "load",
            "save",
            "save_every",
        ),
        _RESUME_HINT,
    )
    | dict.fromkeys(
        ("epochs", "num_epochs", "max_epochs", "num_train_epochs"),
        "set `run.steps`; the run prints the corresponding number of epochs",
    )
    | {"extends": "a plan is one file; change its values by `--set`"}
)
"""Hints for keys of other frameworks that have no counterpart in a plan."""


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describes the values that a field with this type and this pydantic metadata accepts."""
    for item in reversed(metadata):
        if isinstance(item, ValueDescription):
            return item.text
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        # pydantic keeps `Field(ge=1)` inside Annotated as a FieldInfo with nested metadata.
        return describe_type(inner, [part for item in (*extra, *metadata) for part in getattr(item, "metadata", [item])])
    if origin in (Union, types.UnionType):
        # A plan cannot contain None; it omits the key instead.
        return _join_choices([describe_type(arm, metadata) for arm in get_args(annotation) if arm is not type(None)])
    if origin is Literal:
        return _join_choices([f'"{value}"' if isinstance(value, str) else str(value).lower() for value in get_args(annotation)])
    if origin is tuple:
        return _describe_array(get_args(annotation), metadata)
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Table)):
        return "a table"
    if annotation in (int, float):
        # Of integers, above 0 is at least 1.
        if annotation is int:
            metadata = [limits.Ge(item.gt + 1) if isinstance(item, limits.Gt) else item for item in metadata]  # type: ignore[operator]
        return ("an integer" if annotation is int else "a number") + _describe_range(metadata)
    if annotation is str and any(isinstance(item, limits.MinLen) for item in metadata):
        return "a string that is not empty"
    return TYPE_DESCRIPTIONS.get(annotation, "a value")


def describe_value(value: Any) -> str:
    """Describes a plan's value for messages; shortens long strings."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, str):
        line = make_printable(value)
        return f'the string "{line if len(line) <= MAX_SHOWN_LENGTH else line[: MAX_SHOWN_LENGTH - 3] + "..."}"'
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}" if value else "an empty array"
    return "a date or time"


def suggestion(wrong: str, choices: Iterable[str], otherwise: str | None = None) -> str | None:
    """Returns a hint for the unknown name `wrong`: an explanation for a key of another framework, "did you mean ...?" if a
    choice is close, or `otherwise`.
    """
    choices = list(choices)
    if (explanation := FOREIGN_KEY_HINTS.get(wrong.lower().replace("-", "_"))) and wrong not in choices:
        return explanation
    synonym = SYNONYMS.get(wrong.lower())
    matches = [synonym] if synonym in choices else get_close_matches(wrong, choices, n=1)
    return f"did you mean `{matches[0]}`?" if matches else otherwise


def find_field(model: type[Table], path: Iterable[str | int]) -> tuple[Any, Sequence[Any]] | None:
    """Returns the type and metadata of the field at `path` in the table type `model`, or None."""
    field: tuple[Any, Sequence[Any]] = (model, ())
    for part in path:
        inner = _find_inner_field(field[0], part)
        if inner is None:
            return None
        field = inner
    return field


def _find_inner_field(annotation: Any, part: str | int) -> tuple[Any, Sequence[Any]] | None:
    """Returns the type and metadata of the key or index `part` of a value with type `annotation`, or None."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Table):
        info = annotation.model_fields.get(str(part))
        return (info.annotation, info.metadata) if info else None
    if origin is Annotated:
        return _find_inner_field(args[0], part)
    if origin in (Union, types.UnionType):
        return next((field for arm in args if (field := _find_inner_field(arm, part))), None)
    if origin is tuple and isinstance(part, int):
        return (args[0] if args[-1] is Ellipsis else args[min(part, len(args) - 1)], ())
    return (args[1], ()) if origin is dict else None


def _describe_range(metadata: Iterable[Any]) -> str:
    low = high = None
    for item in metadata:
        match item:
            case limits.Ge(ge=bound):
                low = f"at least {bound}"
            case limits.Gt(gt=bound):
                low = f"above {bound}"
            case limits.Le(le=bound):
                high = f"at most {bound}"
            case limits.Lt(lt=bound):
                high = f"below {bound}"
    bounds = " and ".join(text for text in (low, high) if text)
    return (" " if bounds.startswith(("above", "below")) else " of ") + bounds if bounds else ""


def _describe_array(args: tuple[Any, ...], metadata: Sequence[Any]) -> str:
    low = max((item.min_length for item in metadata if isinstance(item, limits.MinLen)), default=0)
    high = min((item.max_length for item in metadata if isinstance(item, limits.MaxLen)), default=None)
    if args[-1] is not Ellipsis:
        low = high = len(args)
    if low and low == high:
        size = f" of {low}"
    else:
        size = f" of at least {low}" if low else f" of at most {high}" if high is not None else ""
    return f"an array{size}, each {describe_type(args[0])}"


def _join_choices(choices: Sequence[str]) -> str:
    unique = list(dict.fromkeys(choices))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def make_printable(text: str) -> str:
    """Replaces each character that is not printable by `?`; the length does not change."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def is_utf8(text: str) -> bool:
    """Returns whether the text can be encoded. Python represents undecodable bytes of the system as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def shorten_names(names: Sequence[str], max_names: int = 4) -> str:
    """Returns the first `max_names` names and the number of remaining names as text."""
    suffix = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{suffix}"

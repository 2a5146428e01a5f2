"""The types of the plan's tables and fields, and functions that describe these types in messages and in the plan reference.

Every table is strict (a bool is not an integer, and "5" is not a number) and frozen, and rejects unknown keys.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import annotated_types as limits
import pydantic

from sley_core.errors import make_printable

if TYPE_CHECKING:
    from sley_core.plan.plan import Component
    from sley_core.records import Record

T = TypeVar("T")


class Table(pydantic.BaseModel):
    """The base class of the plan's tables. pydantic builds the validators of a table when a plan first uses the table."""

    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )


_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")  # $$, $NAME or ${NAME}


def expand_path(text: str, quote: Callable[[str], str] = str) -> str:
    """Returns the path `text` of a plan with `~`, `$NAME` and `${NAME}` expanded; `$$` becomes a dollar sign. Applies `quote`
    to each expanded value. Raises ValueError for a variable that is unset or empty, and for a user without a home folder.
    """

    def expand_variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name and not os.environ.get(name):
            raise ValueError(f"the environment variable `{name}` is not set; set it, or write `$$` for a dollar sign in a name")
        return quote(os.environ[name]) if name else "$"

    user, slash, remainder = text.partition("/")
    if user.startswith("~"):
        try:
            home = str(Path(user).expanduser())
        except RuntimeError:
            message = f"`{user}` has no home folder; write `./{user}` for a folder of that name"
            raise ValueError(message) from None
        return quote(home) + slash + _VARIABLE.sub(expand_variable, remainder)
    return _VARIABLE.sub(expand_variable, text)


def escape_path(text: str) -> str:
    """Returns the plan text that `expand_path` expands to the path `text`."""
    return ("./" if text.startswith("~") else "") + text.replace("$", "$$")


_URL = re.compile("[a-z][a-z0-9]+:/")  # the beginning of a URL


def _parse_path(value: Any, info: pydantic.ValidationInfo, *, quote: Callable[[str], str] = str) -> Any:
    """Returns a Path for a string; a relative path starts in the plan's folder, a URL does not. Keeps other values."""
    folder = (info.context or {}).get("folder")
    if not isinstance(value, str):
        return value
    text = expand_path(value, quote)
    return Path(quote(str(folder)), text) if folder and not _URL.match(text) else Path(text)


def _serialize_path(value: Path, info: pydantic.SerializationInfo, *, quote: Callable[[str], str] = str) -> str:
    """Returns the plan text of a path, relative to the plan's folder if the path is inside this folder."""
    folder = (info.context or {}).get("folder")
    is_inside = folder and value.is_relative_to(quote(str(folder)))
    return escape_path(value.relative_to(quote(str(folder))).as_posix() if is_inside else str(value))


@dataclass(frozen=True)
class ValueDescription:
    """Replaces the automatic description of a field's values by `text`: `Annotated[str, ValueDescription("a name")]`."""

    text: str


Array = Annotated[tuple[T, ...], pydantic.BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""The type of a TOML array, which is stored as a tuple: `Array[int]`."""

PlanPath = Annotated[Path, pydantic.BeforeValidator(_parse_path), pydantic.PlainSerializer(_serialize_path)]
"""A path in which `~` and `$NAME` are expanded. A relative path starts in the plan's folder."""

PlanPattern = Annotated[
    Path,
    pydantic.BeforeValidator(partial(_parse_path, quote=escape)),
    pydantic.PlainSerializer(partial(_serialize_path, quote=escape)),
]
"""A `PlanPath` with the wildcards `*`, `?`, `[...]` and `**`. In the plan's folder and in expanded values, these characters are
escaped by `glob.escape`.
"""

PlanFolder = Annotated[
    str,
    pydantic.Field(min_length=1),
    pydantic.BeforeValidator(lambda value: expand_path(value) if isinstance(value, str) else value),
    pydantic.PlainSerializer(escape_path),
]
"""The path or URL of a folder, in which `~` and `$NAME` are expanded. A relative path starts in the current folder."""

Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
FactoryPath = Annotated[
    str, pydantic.Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), ValueDescription('a path to code, "package.module:name"')
]
"""`"package.module:attribute"`, the only form in which a plan can name the user's code."""


class PartTable(Table):
    """A table of an array such as `[[data.sources]]`. It names a record by `use`, or code by `factory`, and has the keys of
    this model and of the record or factory.

    record_type: the class of the records. shared: keys of the enclosing table, which each record gets if its config has them.
    If all records have the same value for such a key, it is also the value of the enclosing table.
    """

    model_config = pydantic.ConfigDict(json_schema_extra={"additionalProperties": True})

    record_type: ClassVar[type[Record]]
    shared: ClassVar[tuple[str, ...]] = ()

    use: Annotated[str, ValueDescription('the name of a record, "plugin.record"')] | None = None
    """The record, whose keys the table then has; for your own code, write `factory` instead."""

    _component: Any = pydantic.PrivateAttr(None)
    _inherited: set[str] = pydantic.PrivateAttr(set())

    @property
    def component(self) -> Component:
        """The component that `use` or `factory` names; its `config` has the remaining keys."""
        component: Component = self._component
        return component

    def set_component(self, component: Component, enclosing: Table) -> None:
        """Sets the component. The resolver of the plan calls this once. enclosing: the table that contains the array."""
        self._component = component
        config: Table = component.config
        self._inherited = {key for key in self.shared if getattr(config, key, None) == getattr(enclosing, key, None)}

    @pydantic.model_serializer(mode="wrap")
    def _serialize_component(
        self, write: pydantic.SerializerFunctionWrapHandler, info: pydantic.SerializationInfo
    ) -> dict[str, Any]:
        config: Table = self.component.config
        record_keys = config.model_dump(exclude_none=True, exclude=self._inherited, context=info.context)
        return {**write(self), **record_keys}


TYPE_DESCRIPTIONS = {bool: "true or false", str: "a string", Path: "a path", Any: "any value"}  # for `describe_type`


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Returns a phrase for the values that a field accepts. annotation: the field's type. metadata: its pydantic metadata."""
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
        # For an integer, "above 0" means "at least 1".
        if annotation is int:
            metadata = [limits.Ge(item.gt + 1) if isinstance(item, limits.Gt) else item for item in metadata]  # type: ignore[operator]
        return ("an integer" if annotation is int else "a number") + _describe_range(metadata)
    if annotation is str and any(isinstance(item, limits.MinLen) for item in metadata):
        return "a string that is not empty"
    return TYPE_DESCRIPTIONS.get(annotation, "a value")


def describe_value(value: Any) -> str:
    """Returns a phrase for a value of a plan, for messages; shortens strings to 40 characters."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, str):
        line = make_printable(value)
        return f'the string "{line if len(line) <= 40 else line[:37] + "..."}"'
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}" if value else "an empty array"
    return "a date or time"


def _describe_range(metadata: Iterable[Any]) -> str:
    words = {limits.Ge: "at least", limits.Gt: "above", limits.Le: "at most", limits.Lt: "below"}
    bounds = [item for item in metadata if type(item) in words]
    text = " and ".join(f"{words[type(bound)]} {getattr(bound, type(bound).__name__.lower())}" for bound in bounds)
    return (" " if text.startswith(("above", "below")) else " of ") + text if text else ""


def _describe_array(args: tuple[Any, ...], metadata: Sequence[Any]) -> str:
    low = max((item.min_length for item in metadata if isinstance(item, limits.MinLen)), default=0)
    high = min((item.max_length for item in metadata if isinstance(item, limits.MaxLen)), default=None)
    if low and low == high:
        size = f" of {low}"
    else:
        size = f" of at least {low}" if low else f" of at most {high}" if high is not None else ""
    return f"an array{size}, each {describe_type(args[0])}"


def _join_choices(choices: Sequence[str]) -> str:
    unique = list(dict.fromkeys(choices))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"

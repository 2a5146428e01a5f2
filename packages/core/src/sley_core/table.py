"""The types of the plan's tables and fields.

Every table is strict (a bool is not an integer, and "5" is not a number), frozen, and rejects unknown keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)

if TYPE_CHECKING:
    from sley_core.plan.plan import Component

T = TypeVar("T")

RecordKind = Literal[
    "models",
    "adapters",
    "datasets",
    "losses",
    "optimizers",
    "lr_schedules",
    "averaging_rules",
    "partitioners",
    "schedules",
    "stage_links",
    "gradient_handlers",
    "scheduler_hooks",
    "weight_communicators",
    "sequence_attentions",
    "activation_policies",
    "offload_managers",
    "checkpointers",
    "metrics_writers",
]


class Table(BaseModel):
    """The base class of the plan's tables. pydantic builds a model's validators when a plan first uses it."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )


_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")


def expand_path(text: str, quote: Callable[[str], str] = str) -> str:
    """Returns a plan's path with `~`, `$NAME` and `${NAME}` expanded; `$$` is a dollar sign.

    quote: a function that is applied to each expansion. Raises ValueError for a variable that is unset or empty, and for a user
    without a home folder.
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


_URL = re.compile("[a-z][a-z0-9]+:/")


def _parse_path(value: Any, info: ValidationInfo, *, quote: Callable[[str], str] = str) -> Any:
    """Returns a string as a path, which starts in the plan's folder if it is relative and not a URL. Does not change values of
    other types.
    """
    folder = (info.context or {}).get("folder")
    if not isinstance(value, str):
        return value
    text = expand_path(value, quote)
    return Path(quote(str(folder)), text) if folder and not _URL.match(text) else Path(text)


def _serialize_path(value: Path, info: SerializationInfo, *, quote: Callable[[str], str] = str) -> str:
    """Returns the plan text of a path, relative to the plan's folder if the path is inside this folder."""
    folder = (info.context or {}).get("folder")
    is_inside = folder and value.is_relative_to(quote(str(folder)))
    return escape_path(value.relative_to(quote(str(folder))).as_posix() if is_inside else str(value))


@dataclass(frozen=True)
class ValueDescription:
    """A text that replaces the automatic description of a field's values: `Annotated[str, ValueDescription("a name")]`."""

    text: str


Array = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A TOML array, stored as a tuple: `Array[int]`."""

PlanPath = Annotated[Path, BeforeValidator(_parse_path), PlainSerializer(_serialize_path)]
"""A path in which `~` and `$NAME` are expanded. A relative path starts in the plan's folder."""

PlanPattern = Annotated[
    Path, BeforeValidator(partial(_parse_path, quote=escape)), PlainSerializer(partial(_serialize_path, quote=escape))
]
"""A `PlanPath` with the wildcards `*`, `?`, `[...]` and `**`. `glob.escape` escapes these characters in the plan's folder and
in expansions.
"""

PlanFolder = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(lambda value: expand_path(value) if isinstance(value, str) else value),
    PlainSerializer(escape_path),
]
"""A folder path or URL in which `~` and `$NAME` are expanded. A relative path starts in the current folder."""

Fraction = Annotated[float, Field(ge=0, le=1)]
FactoryPath = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), ValueDescription('a path to code, "package.module:name"')
]
"""`"package.module:attribute"`, the only way in which a plan can name the user's code."""


class PartTable(Table):
    """One table of an array such as `[[data.sources]]`, which names a record by `use` or code by `factory`. The table has the
    keys of this model and those of the record or factory.

    kind: the type of the records. shared: the keys of the enclosing table that are passed to each record with these keys.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    kind: ClassVar[RecordKind]
    shared: ClassVar[tuple[str, ...]] = ()

    use: Annotated[str, ValueDescription('the name of a record, "plugin.record"')] | None = None
    """The record, whose keys follow; or use `factory` for your own code."""

    _component: Any = PrivateAttr(None)

    @property
    def component(self) -> Component:
        """The component that `use` or `factory` names; its `config` has the remaining keys."""
        component: Component = self._component
        return component

    def set_component(self, component: Component) -> None:
        """Sets the component; the loader calls this once."""
        self._component = component

    @model_serializer(mode="wrap")
    def _serialize_component(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        config: Table = self.component.config
        record_keys = config.model_dump(exclude_none=True, exclude=set(self.shared), context=info.context)
        return {**write(self), **record_keys}

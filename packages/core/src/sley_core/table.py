"""Types of the plan's tables, beside those of pydantic.

Every table is strict (a bool is no integer, "5" is no number), frozen, and refuses unknown keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

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
    "partitioners",
    "schedules",
    "stage_links",
    "gradient_handlers",
    "scheduler_hooks",
    "weight_communicators",
    "sequence_attentions",
    "memory_pools",
    "activation_policies",
    "offload_managers",
    "checkpointers",
    "metrics_writers",
]

NAMED_TABLES: dict[RecordKind, str] = {"memory_pools": "pools"}
"""Kinds to which a plan may give its own names, in tables `[pools.NAME]`; a reference takes such a NAME, or a record."""


class Table(BaseModel):
    """A table of the plan: strict, frozen, no unknown keys. pydantic builds it when a plan first has it."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )


_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")


def expand_path(text: str, quote: Callable[[str], str] = str) -> str:
    """Returns a path of a plan with a leading `~`, `$NAME` and `${NAME}` replaced, and `$$` by a dollar sign.

    quote: applied to the replacement. Raises ValueError for a name that the environment does not have, or has empty, and for a
    user without a home folder.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name and not os.environ.get(name):
            raise ValueError(f"the environment has no `{name}`; set it, or write `$$` for a dollar sign in a name")
        return quote(os.environ[name]) if name else "$"

    user, slash, rest = text.partition("/")
    if user.startswith("~"):
        try:
            home = str(Path(user).expanduser())
        except RuntimeError:
            message = f"`{user}` has no home folder; write `./{user}` for a folder of that name"
            raise ValueError(message) from None
        return quote(home) + slash + _VARIABLE.sub(value, rest)
    return _VARIABLE.sub(value, text)


def escape_path(text: str) -> str:
    """Returns the plan text that `expand_path` turns into the path `text`."""
    return ("./" if text.startswith("~") else "") + text.replace("$", "$$")


class BasePath(NamedTuple):
    """A path in a plan that another one extends: `text`, as it is written there, starts in the folder of that plan."""

    folder: Path
    text: str


_URL = re.compile("[a-z][a-z0-9]+:/")


def _parse_path(value: Any, info: ValidationInfo, *, quote: Callable[[str], str] = str) -> Any:
    """Returns a text as a path, in the folder of its plan if it is relative and no URL; other values as they are."""
    folder = (info.context or {}).get("folder")
    if isinstance(value, BasePath):
        folder, value = value
    if not isinstance(value, str):
        return value
    text = expand_path(value, quote)
    return Path(quote(str(folder)), text) if folder and not _URL.match(text) else Path(text)


def _serialize_path(value: Path, info: SerializationInfo, *, quote: Callable[[str], str] = str) -> str:
    """Returns the text of a path for a plan, relative to the plan's folder if the path is inside it."""
    folder = (info.context or {}).get("folder")
    inside = folder and value.is_relative_to(quote(str(folder)))
    return escape_path(value.relative_to(quote(str(folder))).as_posix() if inside else str(value))


@dataclass(frozen=True)
class Words:
    """Describes the values of a field, if its type and limits do not: `Annotated[str, Field(...), Words("a name")]`."""

    text: str


Array = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A TOML array, kept as a tuple: `Array[int]`."""

PlanPath = Annotated[Path, BeforeValidator(_parse_path), PlainSerializer(_serialize_path)]
"""A path, in which `~` and `$NAME` are expanded; a relative one is relative to the plan's folder, also when written back."""

PlanPattern = Annotated[
    Path, BeforeValidator(partial(_parse_path, quote=escape)), PlainSerializer(partial(_serialize_path, quote=escape))
]
"""As `PlanPath`, but `*`, `?`, `[...]` and `**` of the plan's own text match; in the folder and in what is expanded they stand
for themselves, written as `glob.escape` writes them.
"""

PlanFolder = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(lambda value: expand_path(value) if isinstance(value, str) else value),
    PlainSerializer(escape_path),
]
"""A folder, or its URL, in which `~` and `$NAME` are expanded; a relative one is relative to the current folder."""

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FactoryPath = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), Words('a path to code, "package.module:name"')
]
"""`"package.module:attribute"`: code that the user's plan names, and the only code that a plan can name."""


@dataclass(frozen=True)
class RecordReference:
    """Marks a string field as the name of a record, `plugin.record`: `Annotated[str, RecordReference("schedules")]`.

    The loader imports the plugin that is its first segment. For a kind of `NAMED_TABLES` it may also be the name of such a
    table of the plan, which has no dot.
    """

    kind: RecordKind


class PartTable(Table):
    """A table of an array within a record's table that names a record of its own, as `[[data.sources]]` do: it has the keys of
    this model, `use` or `factory`, and the keys that these take.

    kind: of the records. shared: keys of the table around it that are given to each record that takes them.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    kind: ClassVar[RecordKind]
    shared: ClassVar[tuple[str, ...]] = ()

    use: Annotated[str, Words('the name of a record, "plugin.record"')] | None = None
    """The record, whose keys follow; or `factory`, for code of your own."""

    _component: Any = PrivateAttr(None)

    @property
    def component(self) -> Component:
        """The component that `use` or `factory` names. Its `config` has the other keys."""
        component: Component = self._component
        return component

    def set_component(self, component: Component) -> None:
        """Sets the component; the loader calls this once."""
        self._component = component

    @model_serializer(mode="wrap")
    def _serialize_component(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Returns the plain table with the keys of its record."""
        config: Table = self.component.config
        rest = config.model_dump(exclude_none=True, exclude=set(self.shared), context=info.context)
        return {**write(self), **rest}

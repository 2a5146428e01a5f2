"""The types of which a plan's tables are made; the rest is pydantic's.

Every table is strict (a bool is no integer, "5" is no number), frozen, and refuses unknown keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SerializationInfo, ValidationInfo

T = TypeVar("T")

RecordKind = Literal[
    "models",
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
    "metrics_writers",
]

NAMED_TABLES: dict[RecordKind, str] = {"memory_pools": "pools"}
"""Kinds to which a plan may give its own names, in tables `[pools.NAME]`; a reference takes such a NAME, or a record."""


class Table(BaseModel):
    """A table of the plan: strict, frozen, no unknown keys. pydantic builds it when a plan first has it."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _path(value: Any, info: ValidationInfo) -> Any:
    """Returns a string as a path, in the plan's folder if it is relative; any other value unchanged, for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    folder = (info.context or {}).get("folder")
    return Path(folder, value) if folder else Path(value)


def _path_text(value: Path, info: SerializationInfo) -> str:
    folder = (info.context or {}).get("folder")
    return value.relative_to(folder).as_posix() if folder and value.is_relative_to(folder) else str(value)


@dataclass(frozen=True)
class Words:
    """Says in words what a field takes, if type and limits do not: `Annotated[str, Field(...), Words("a name")]`."""

    text: str


Array = Annotated[tuple[T, ...], BeforeValidator(_tuple)]
"""A TOML array, kept as a tuple: `Array[int]`."""

PlanPath = Annotated[Path, BeforeValidator(_path), PlainSerializer(_path_text)]
"""A path of the plan; a relative one is relative to the plan's folder, and is written back as it was given."""

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

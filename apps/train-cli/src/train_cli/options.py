"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """The form of what a command prints on stdout."""

    text = "text"
    json = "json"


def _complete_key(incomplete: str) -> Iterator[str]:
    from sley_core.plan.tables import OPTIONAL, TABLES

    for table, model in {**TABLES, **OPTIONAL}.items():
        for key in model.model_fields:
            if (whole := f"{table}.{key}=").startswith(incomplete):
                yield whole


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value of the plan, such as batch.micro_size=4; VALUE is TOML. May be given several times.",
        autocompletion=_complete_key,
    ),
]
WorldOption = Annotated[
    int | None, typer.Option("--world", metavar="N", min=1, help="The number of ranks, where the plan leaves it open.")
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The form of the output.")]

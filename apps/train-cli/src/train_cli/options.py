"""Defines the arguments and options that several commands share. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import UsageError


class OutputFormat(StrEnum):
    """The output format of a command on stdout."""

    text = "text"
    json = "json"


class MessageFormat(StrEnum):
    """The format of diagnostics (see `console.format_diagnostics`)."""

    full = "full"
    short = "short"
    json = "json"


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value of the plan, such as batch.micro_size=4; VALUE is TOML. Can be repeated.",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, help="1 samples the model's distribution; 0 is greedy.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample only from the K most likely tokens.")
]
SamplingSeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the sampling.")]
WorldOption = Annotated[
    int | None, typer.Option("--world", metavar="N", min=1, help="The number of ranks, if the plan does not set it.")
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts; with --per-node, instead of --world.")
]
PerNodeOption = Annotated[int | None, typer.Option("--per-node", metavar="N", min=1, help="The number of ranks on each host.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the best checkpoint by `[evaluation] keep_best` instead of the newest weights.")
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The output format.")]


def world_size(world: int | None, nodes: int | None, per_node: int | None) -> int | None:
    """Returns the number of ranks that the options set, or None if no option is set. Raises UsageError "world" if only one of
    `nodes` and `per_node` is set, or if `world` is set as well.
    """
    if nodes is None and per_node is None:
        return world
    if nodes is None or per_node is None:
        raise UsageError("world", "`--nodes` and `--per-node` must be used together", hint="pass both, or `--world`")
    if world is not None:
        raise UsageError("world", "`--world` cannot be used with `--nodes` and `--per-node`", hint="remove one of them")
    return nodes * per_node

"""Defines the arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import UsageError


class OutputFormat(StrEnum):
    """The form of what a command prints on stdout."""

    text = "text"
    json = "json"


class MessageFormat(StrEnum):
    """The form of diagnostics; `render` shows each."""

    full = "full"
    short = "short"
    json = "json"


def _complete_set(context: typer.Context, incomplete: str) -> Iterator[str]:
    from train_cli.completion import completions  # not needed to run a command

    return completions(context.args, incomplete)  # behind an option without its value click leaves the words as they are


def remedy(option: str, known: Iterable[str]) -> str:
    """Returns advice for the unknown `option`, such as a similar one in `known` or a key of the plan; may be empty."""
    from sley_core.words import ELSEWHERE, HABITS
    from train_cli.completion import table_keys

    if close := get_close_matches(option, known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    word = option.lstrip("-").replace("-", "_")
    if word in ELSEWHERE:
        return ELSEWHERE[word]
    key = HABITS.get(word, word)
    keys = (found.removesuffix("=") for found in (*table_keys(), "optimizer.lr="))
    found = next((name for name in keys if name.endswith(f".{key}")), None)
    return f"the plan says that: --set {found}=VALUE" if found else ""


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value of the plan, such as batch.micro_size=4; VALUE is TOML. May be given several times.",
        autocompletion=_complete_set,
    ),
]
WorldOption = Annotated[
    int | None, typer.Option("--world", metavar="N", min=1, help="The number of ranks, where the plan leaves it open.")
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts; with --per-node, in place of --world.")
]
PerNodeOption = Annotated[int | None, typer.Option("--per-node", metavar="N", min=1, help="The number of ranks on each host.")]


def given_world(world: int | None, nodes: int | None, per_node: int | None) -> int | None:
    """Returns the number of ranks that the options give, None if they give none. Raises UsageError "world" if only one of
    `nodes` and `per_node` is given, or both they and `world`.
    """
    if nodes is None and per_node is None:
        return world
    if nodes is None or per_node is None:
        raise UsageError("world", "`--nodes` and `--per-node` say the world together", hint="give both, or `--world`")
    if world is not None:
        raise UsageError("world", "`--nodes` and `--per-node` say what `--world` says", hint="leave one of them out")
    return nodes * per_node


FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The form of the output.")]

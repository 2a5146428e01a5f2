"""Defines the options that several commands share, and prints lines and diagnostics on stderr. stdout is for data (`show`,
`--format json`). Imports no torch.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer

from sley_core.errors import Diagnostic, UsageError, make_printable
from sley_core.plan.document import printable_line
from train_cli.faults import Fault


class OutputFormat(StrEnum):
    """The format of a command's output on stdout."""

    text = "text"
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


def format_count(count: int, noun: str, plural: str = "s") -> str:
    """Formats a count: `1 rank`, `2 ranks`. plural: the ending of the noun for counts other than 1."""
    return f"{count} {noun}{'' if count == 1 else plural}"


ERASE_LINE = "\r\x1b[2K"
"""The characters that erase the cursor's line on a terminal."""


@dataclass
class Settings:
    """The values of the options that every command has. traceback: whether to print the traceback of an error."""

    traceback: bool = False


def can_redraw(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal whose lines can be redrawn; False if NO_COLOR is set or TERM is `dumb`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_line(text: str) -> None:
    """Prints a line on stderr, over the progress line if there is one. Ignores a closed stderr."""
    with suppress(OSError, ValueError):
        print(f"{ERASE_LINE if can_redraw(sys.stderr) else ''}{text}", file=sys.stderr, flush=True)


def print_fault(fault: Fault, settings: Settings) -> None:
    """Prints the diagnostics of a fault on stderr, after its traceback if requested. Ignores a closed stderr."""
    if settings.traceback and fault.trace:
        print_line(fault.trace)
    with suppress(OSError, ValueError):
        if fault.diagnostics:
            print_line(format_diagnostics(fault.diagnostics, is_long=sys.stderr.isatty()).removesuffix("\n"))


def format_diagnostics(diagnostics: Sequence[Diagnostic], *, is_long: bool) -> str:
    """Returns the diagnostics as text that ends in a newline; if there are several, the last line has their number.

    is_long: whether to show the source line with a caret under the error, as on a terminal. If not, each diagnostic is one
    line: `plan.toml:24:1: error[unknown-key]: ...`.
    """
    texts = list(map(_format_long if is_long else _format_short, diagnostics))
    if len(texts) > 1:
        texts.append(f"found {len(texts)} errors")
    return "".join(f"{text}\n" for text in texts)


def _format_short(diagnostic: Diagnostic) -> str:
    location = f"{diagnostic.place}: " if diagnostic.place else ""
    hint = f" (hint: {diagnostic.hint})" if diagnostic.hint else ""
    return make_printable(f"{location}error[{diagnostic.code}]: {diagnostic.message}{hint}".replace("\n", " "))


def _format_long(diagnostic: Diagnostic) -> str:
    """Returns the text of one diagnostic in the style of rustc and ruff: the error, the source line with a caret, the hint."""
    lines = [f"error[{diagnostic.code}]: {diagnostic.message}"]
    location = diagnostic.place
    if location is not None:
        number = str(location.line) if location.line else ""
        margin = " " * len(number)
        lines.append(f"{margin}--> {location}")
        if diagnostic.source_line is not None and location.column:
            carets = " " * (location.column - 1) + "^" * max(1, location.length)
            source_line = printable_line(diagnostic.source_line.rstrip("\r\n"))
            lines += [f"{margin} |", f"{number} | {source_line}", f"{margin} | {carets}", f"{margin} |"]
    if diagnostic.hint:
        lines += ["", f"hint: {diagnostic.hint}"]
    return "\n".join(make_printable(line) for text in lines for line in text.split("\n")) + "\n"

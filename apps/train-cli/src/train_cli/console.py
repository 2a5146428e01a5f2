"""Defines the options that several commands share, and prints lines and diagnostics on stderr. stdout is for data (`show`,
`--format json`). Imports no torch.

full     the source line with a caret under the error; the default on a terminal
short    one clickable line per error, `plan.toml:24:1: error[unknown-key]: ...`; the default elsewhere
json     one object per line: code, file, line, column, path, message, hint
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.errors import Diagnostic, UsageError, format_path

if TYPE_CHECKING:
    from train_cli.faults import Fault


class OutputFormat(StrEnum):
    """The output format of a command on stdout."""

    text = "text"
    json = "json"


class MessageFormat(StrEnum):
    """The format of diagnostics (see `format_diagnostics`)."""

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


@dataclass
class Settings:
    """The values of the options that every command has; None if the user did not set one."""

    message_format: MessageFormat | None = None
    traceback: bool = False


def print_line(text: str) -> None:
    """Prints a line on stderr; ignores a closed stderr."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def print_fault(fault: Fault, settings: Settings) -> None:
    """Prints the diagnostics of a fault on stderr, and its traceback if requested; ignores a closed stderr."""
    stream = sys.stderr
    form = settings.message_format or (MessageFormat.full if stream.isatty() else MessageFormat.short)
    color = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    with suppress(OSError, ValueError):
        if settings.traceback and fault.trace:
            print(fault.trace, file=stream)
        stream.write(format_diagnostics(fault.diagnostics, form, color=color))
        stream.flush()


def format_diagnostics(diagnostics: Iterable[Diagnostic], form: MessageFormat, *, color: bool = False) -> str:
    """Returns the diagnostics as text that ends in a newline; if there are several, the last line has their number."""
    problems = list(diagnostics)
    if form is MessageFormat.json:
        return "".join(f"{json.dumps(_fields(problem), ensure_ascii=False)}\n" for problem in problems)
    if form is MessageFormat.short:
        texts = [_short_line(problem) for problem in problems]
    else:
        texts = ["\n".join(_full_lines(problem, color)) + "\n" for problem in problems]
    if len(texts) > 1:
        texts.append(f"found {len(texts)} errors")
    return "".join(f"{part}\n" for part in texts)


def _fields(diagnostic: Diagnostic) -> dict[str, object]:
    location = diagnostic.place
    return {
        "code": diagnostic.code,
        "file": location.file if location else None,
        "line": location.line or None if location else None,
        "column": location.column or None if location else None,
        "path": format_path(diagnostic.path) or None,
        "message": diagnostic.message,
        "hint": diagnostic.hint,
    }


def _short_line(diagnostic: Diagnostic) -> str:
    location = f"{diagnostic.place}: " if diagnostic.place else ""
    hint = f" (hint: {diagnostic.hint})" if diagnostic.hint else ""
    return _printable(" ".join(f"{location}error[{diagnostic.code}]: {diagnostic.message}{hint}".split("\n")))


def _full_lines(diagnostic: Diagnostic, color: bool) -> Iterator[str]:
    """Yields the lines of one diagnostic in the style of rustc and ruff: the error, the source line with a caret, the hint."""

    def paint(text: str, fg: str) -> str:
        return typer.style(text, fg=fg, bold=True) if color else text

    yield f"{paint(f'error[{diagnostic.code}]', 'red')}: {_printable(diagnostic.message)}"
    location = diagnostic.place
    if location is not None:
        number = str(location.line) if location.line else ""
        margin, bar = " " * len(number), paint("|", "blue")
        yield f"{margin}{paint('-->', 'blue')} {location}"
        if diagnostic.source_line is not None and location.column:
            line, start = _printable(diagnostic.source_line.rstrip("\r\n")), location.column - 1
            blank = "".join("\t" if char == "\t" else " " for char in line[:start])
            yield f"{margin} {bar}"
            yield f"{paint(number, 'blue')} {bar} {line}"
            yield f"{margin} {bar} {blank}{paint('^' * max(1, location.length), 'red')}"
            yield f"{margin} {bar}"
    if diagnostic.hint:
        yield ""
        yield f"{paint('hint', 'cyan')}: {_printable(diagnostic.hint)}"


def _printable(text: str) -> str:
    """Returns `text` without control characters: a plan's content must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}" for char in text)

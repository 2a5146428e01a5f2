"""What a command says and how: the settings that every command has, and the one way to stderr.

stdout is for data (`needs`, `schema`, `show`, `--format json`); everything else goes to stderr.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import typer

from train_cli.faults import Fault
from train_cli.render import MessageFormat, default_format, render, wants_color


@dataclass
class Settings:
    """The options that every command has; `None` where the user has not chosen."""

    message_format: MessageFormat | None = None
    traceback: bool = False


def say(text: str) -> None:
    """A line for the user, on stderr; colours are left out where stderr is no terminal or NO_COLOR is set."""
    typer.echo(text, err=True, color=wants_color(sys.stderr))


def show(fault: Fault, settings: Settings) -> None:
    """The diagnostics of a fault, on stderr, and its traceback where it was asked for."""
    if settings.traceback and fault.trace:
        print(fault.trace, file=sys.stderr)
    form = settings.message_format or default_format(sys.stderr)
    sys.stderr.write(render(fault.diagnostics, form, color=wants_color(sys.stderr)))
    sys.stderr.flush()

"""What a command says and how: the settings that every command has, and the one way to stderr.

stdout is for data (`needs`, `schema`, `show`, `--format json`); everything else goes to stderr.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from train_cli.options import MessageFormat

if TYPE_CHECKING:
    from train_cli.faults import Fault


@dataclass
class Settings:
    """The options that every command has; `None` where the user has not chosen."""

    message_format: MessageFormat | None = None
    traceback: bool = False


def say(text: str) -> None:
    """A line for the user, on stderr, if anybody can read it."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show(fault: Fault, settings: Settings) -> None:
    """The diagnostics of a fault, on stderr, and its traceback where it was asked for. The exit code tells if nobody reads."""
    from train_cli.render import render

    form = settings.message_format or default_format(sys.stderr)
    with suppress(OSError, ValueError):
        if settings.traceback and fault.trace:
            print(fault.trace, file=sys.stderr)
        sys.stderr.write(render(fault.diagnostics, form, color=wants_color(sys.stderr)))
        sys.stderr.flush()


def default_format(stream: TextIO) -> MessageFormat:
    """Full for a person at a terminal, short for everything that reads lines."""
    return MessageFormat.full if stream.isatty() else MessageFormat.short


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal whose user has not asked for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

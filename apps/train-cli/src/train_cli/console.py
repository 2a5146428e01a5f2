"""Output of the commands: the settings that all of them have, and all printing to stderr.

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
    """The options that every command has; `None` if the user has not chosen."""

    message_format: MessageFormat | None = None
    traceback: bool = False


def say(text: str) -> None:
    """Prints a line for the user on stderr; a closed stderr is no error."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show(fault: Fault, settings: Settings) -> None:
    """Prints a fault's diagnostics on stderr, and its traceback if asked for; a closed stderr is no error."""
    from train_cli.render import render

    form = settings.message_format or default_format(sys.stderr)
    with suppress(OSError, ValueError):
        if settings.traceback and fault.trace:
            print(fault.trace, file=sys.stderr)
        sys.stderr.write(render(fault.diagnostics, form, color=wants_color(sys.stderr)))
        sys.stderr.flush()


def default_format(stream: TextIO) -> MessageFormat:
    """Returns full for a terminal, else short."""
    return MessageFormat.full if stream.isatty() else MessageFormat.short


def wants_color(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal whose user has not asked for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

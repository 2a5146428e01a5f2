"""Parses the command line of `train-cli`, shows errors and returns the exit code; tracebacks only on request."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from sley_core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED
from sley_core.process import uncollected
from train_cli.stopping import Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (the table at the end of `--help`).

    argv: the arguments without the name of the program; those of this process if left out.
    """
    _open_standard_streams()
    try:
        with uncollected():  # imports allocate much and free nothing; training turns it on
            code = _main(list(sys.argv[1:] if argv is None else argv))
            if argv is None:
                gc.freeze()  # at its end Python would look through all modules for garbage, for most of a second
            return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Terminated as stop:
        return stop.code


def _main(arguments: list[str]) -> int:
    """Runs a command, shows its error if it has one, and returns the exit code."""
    from train_cli import console
    from train_cli.app import command

    settings = console.Settings()
    try:
        # Typer's own handling of SleyError would be exit code 1 and a traceback, so errors are handled here.
        command().main(arguments, prog_name="train-cli", obj=settings)
    except SystemExit as stop:
        return _code(stop)
    except Exception as error:
        from train_cli.faults import Fault  # what only an error needs is not imported without one

        fault = Fault.of(error)
        console.show(fault, settings)
        return fault.exit_code
    return EXIT_OK


def _open_standard_streams() -> None:
    """Opens missing standard streams (`2>&-`) on /dev/null, so that no file of the run gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _code(stop: SystemExit) -> int:
    if stop.code is None:
        return EXIT_OK
    return stop.code if isinstance(stop.code, int) else EXIT_RUN_FAILED

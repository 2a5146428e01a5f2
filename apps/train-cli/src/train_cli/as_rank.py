"""Runs the work of one rank that a launcher has started: shows each failure once, writes the report and returns the exit
code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from train_cli import console, failure_file, lifeline
from train_cli.console import Settings
from train_cli.faults import Fault
from train_cli.preflight import PREFLIGHT
from train_cli.preflight import tell as tell_others

_HEAD_START_S = 3.0
"""Seconds that another rank with the first one's error waits: a launcher ends all ranks when the first of them has ended."""


def as_rank(rank: int, settings: Settings, begin: Callable[[ExitStack], Callable[[], int]]) -> int:
    """Does this rank's work and returns its exit code.

    begin: makes the checks whose result is the same on all ranks, and returns the work. An error that it raises is shown by the
    first rank of each host alone, and sent to all ranks. What it enters on the stack is left when the work is done.
    """
    is_first = rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    with ExitStack() as stack:
        try:
            work = begin(stack)
        except Exception as error:
            fault = Fault.of(error)
            _note(fault, settings, tell=is_first)
            tell_others(fault)
            return _code(fault, is_first)
        try:
            return work()
        except Exception as error:
            fault = Fault.of(error)
            tells = is_first or all(found.code != PREFLIGHT for found in fault.diagnostics)
            _note(_of_rank(fault, rank), settings, tell=tells)
            return _code(fault, tells)


def _note(fault: Fault, settings: Settings, *, tell: bool) -> None:
    """Writes this rank's report of `fault`, and shows the fault if `tell` is set and no launcher of ours shows it."""
    failure_file.write(fault)
    if tell and not lifeline.is_held():
        console.show(fault, settings)


def _code(fault: Fault, has_told: bool) -> int:
    """Returns the fault's exit code; a rank that has not shown the fault returns after those that do."""
    if not has_told and not lifeline.is_held():
        time.sleep(_HEAD_START_S)
    return fault.exit_code


def _of_rank(fault: Fault, rank: int) -> Fault:
    """Returns the fault with the rank named in each message; rank 0's unchanged."""
    if rank == 0:
        return fault
    diagnostics = (replace(each, message=f"rank {rank}: {each.message}") for each in fault.diagnostics)
    return replace(fault, diagnostics=tuple(diagnostics))

"""What a process does that a launcher has started as one rank: it tells each failure once, and leaves its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from train_cli import console, failure_file, lifeline
from train_cli.console import Settings
from train_cli.faults import Fault

_HEAD_START_S = 3.0
"""Seconds that another rank with rank 0's error waits: a launcher ends all ranks when the first of them has ended."""


def as_rank(rank: int, settings: Settings, begin: Callable[[ExitStack], Callable[[], int]]) -> int:
    """Does this rank's work and returns its exit code.

    begin: checks what all ranks find alike, of which rank 0 alone tells, and returns the work; what it enters on the stack is
    left when the work is done.
    """
    with ExitStack() as stack:
        try:
            work = begin(stack)
        except Exception as error:
            return _failed(Fault.of(error), settings, tell=rank == 0)
        try:
            return work()
        except Exception as error:
            return _failed(_of_rank(Fault.of(error), rank), settings, tell=True)


def _failed(fault: Fault, settings: Settings, *, tell: bool) -> int:
    """Writes this rank's report and shows the fault, if `tell` and no launcher of ours does; returns the exit code."""
    failure_file.write(fault)
    if lifeline.is_held():
        return fault.exit_code  # the launcher, which is ours, tells
    if tell:
        console.show(fault, settings)
    else:
        time.sleep(_HEAD_START_S)
    return fault.exit_code


def _of_rank(fault: Fault, rank: int) -> Fault:
    if rank == 0:
        return fault
    diagnostics = (replace(each, message=f"rank {rank}: {each.message}") for each in fault.diagnostics)
    return replace(fault, diagnostics=tuple(diagnostics))

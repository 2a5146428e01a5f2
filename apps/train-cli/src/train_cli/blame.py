"""Which rank failed first, and what it said: one fault for a whole world of failures.

When a rank dies, its peers see their connections close and fail too, and the agent terminates whoever is left. Only the
first failure is worth showing.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sley_core.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, Diagnostic
from train_cli import report
from train_cli.faults import Fault

_QUIET = frozenset({EXIT_INTERRUPTED, EXIT_TERMINATED, -signal.SIGTERM, -signal.SIGINT})
_AFTERMATH = frozenset({-signal.SIGABRT})
"""What C++ does when an exception meets nobody: rarely the cause."""

_SLACK_S = 2.0
"""A death is noticed a little after it happened; peers may report its consequences before."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "nobody inside the run does this: perhaps the kernel was short of memory (see `dmesg`), or a person",
    signal.SIGSEGV: "native code crashed: PYTHONFAULTHANDLER=1 shows where each thread was",
    signal.SIGBUS: "often a full /dev/shm, or a memory-mapped file that became shorter",
}


class Failure(Protocol):
    """What elastic tells about a process that failed (its `ProcessFailure`); a negative exit code is a signal."""

    exitcode: int
    error_file_data: dict[str, Any]
    timestamp: int


@dataclass(frozen=True)
class _Rank:
    rank: int
    code: int
    report: report.Report | None
    noticed: int

    @property
    def when(self) -> float:
        if self.report:
            return self.report.time
        return self.noticed + (_SLACK_S if self.code in _AFTERMATH else -_SLACK_S)


def blame(failures: Mapping[int, Failure], size: int) -> Fault:
    """The fault of a run of `size` ranks of which those in `failures` failed; there is at least one.

    Ranks that only obeyed a signal are not to blame; where all did, the fault is empty and carries their exit code.
    """
    assert failures, "nobody failed"
    ranks = [
        _Rank(rank, each.exitcode, report.read(each.error_file_data), each.timestamp)
        for rank, each in sorted(failures.items())
    ]
    guilty = [rank for rank in ranks if rank.report or rank.code not in _QUIET]
    if not guilty:
        code = ranks[0].code
        return Fault((), code if code > 0 else 128 - code)
    first = min(guilty, key=lambda rank: rank.when)
    if first.report is None:
        return Fault((_died(first, size),), EXIT_RUN_FAILED)
    same = [rank for rank in guilty if rank.report and rank.report.fault.diagnostics == first.report.fault.diagnostics]
    if len(same) == size:
        return first.report.fault
    return _named(first.report.fault, first.rank, size)


def _died(rank: _Rank, size: int) -> Diagnostic:
    if rank.code > 0:
        message = f"rank {rank.rank} of {size} left with exit code {rank.code} and said nothing"
        return Diagnostic("rank-died", message, hint="whatever it wrote stands above")
    number = -rank.code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Diagnostic("rank-died", f"rank {rank.rank} of {size} was killed by {name}", hint=_HINTS.get(number))


def _named(fault: Fault, rank: int, size: int) -> Fault:
    """The same fault, saying whose it is."""
    prefix = f"rank {rank} of {size}: "
    diagnostics = tuple(replace(each, message=prefix + each.message) for each in fault.diagnostics)
    return replace(fault, diagnostics=diagnostics)

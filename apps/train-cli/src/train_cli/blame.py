"""Finds which rank failed first and makes one fault for the user from the failures of a whole world.

When a rank dies, its peers see their connections close and fail too, and the agent terminates those left. Only the
first failure is worth showing. The candidates, in the order in which they are tried:

    a rank died of a signal, left without a word, or reported what is no consequence of another's end      the first of them
    a rank was aborted by C++: the cause, if only its connections failed elsewhere
    a rank raised KeyboardInterrupt without a signal to the job
    a rank did not answer when it was asked to end, while others waited for it in vain
    a wait for others failed                                                                               the first of them
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from sley_core.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, Diagnostic
from train_cli import failure_file
from train_cli.faults import Fault
from train_cli.stopping import WARNINGS

_QUIET = frozenset({EXIT_INTERRUPTED, EXIT_TERMINATED, *(128 + number for number in WARNINGS), -signal.SIGTERM, -signal.SIGINT})

_SLACK_S = 2.0
"""A death is noticed a little after it happened; peers may report its consequences before."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "nobody inside the run does this: perhaps the kernel was short of memory (see `dmesg`), or a person",
    signal.SIGSEGV: "native code crashed: PYTHONFAULTHANDLER=1 shows where each thread was",
    signal.SIGILL: "native code used an instruction that this machine refuses, as torch's bf16 kernels do on some virtual "
    "machines: try with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment",
    signal.SIGABRT: "native code gave up, and says why above: a failed assertion, or an exchange in which ranks differ",
    signal.SIGBUS: "often a full /dev/shm, or a memory-mapped file that became shorter",
    signal.SIGSYS: "the surroundings forbid a call of the system: `[parallel] cross_memory_attach = false` needs fewer",
}


class Failure(Protocol):
    """Has the fields that are read of elastic's record of a process that failed (`ProcessFailure`); a negative exit code is a
    signal.
    """

    exitcode: int
    error_file_data: dict[str, Any]
    timestamp: int


@dataclass(frozen=True)
class _Rank:
    rank: int
    code: int
    report: failure_file.Report | None
    noticed: int

    @property
    def when(self) -> float:
        """Seconds since the epoch at which it failed, estimated if it left no report."""
        return self.report.time if self.report else self.noticed - _SLACK_S

    @property
    def is_aftermath(self) -> bool:
        """Whether its report only says that peers were gone."""
        return self.report is not None and failure_file.is_aftermath(self.report.fault)


def blame(failures: Mapping[int, Failure], size: int, silent: Mapping[int, str] = MappingProxyType({})) -> Fault:
    """Returns the fault of a run of `size` ranks from its `failures` by rank, of which there is at least one.

    silent: the ranks that had to be killed when asked to end, with their last known state. Ranks that only obeyed a
    signal are not to blame; if all did, the fault is empty and has their exit code.
    """
    assert failures, "nobody failed"
    ranks = [
        _Rank(rank, each.exitcode, failure_file.read(each.error_file_data), each.timestamp)
        for rank, each in sorted(failures.items())
    ]
    late = [rank for rank in ranks if rank.report and failure_file.is_late(rank.report.fault)]
    acted = [rank for rank in ranks if rank not in late and (rank.report or rank.rank not in silent)]
    guilty = [rank for rank in acted if rank.report or rank.code not in _QUIET]
    causes = [rank for rank in guilty if not rank.is_aftermath and rank.code != -signal.SIGABRT]
    aborted = [rank for rank in guilty if not rank.report and rank.code == -signal.SIGABRT]
    waited = [rank for rank in guilty if rank.is_aftermath]
    if causes or aborted:
        return _told(min(causes or aborted, key=lambda rank: rank.when), guilty, size)
    interrupted = [rank for rank in acted if waited and rank.code == EXIT_INTERRUPTED]
    if interrupted:
        message = f"rank {interrupted[0].rank} of {size} was interrupted alone"
        return Fault((Diagnostic("rank-died", message, hint="by SIGINT, or its code raised KeyboardInterrupt"),), 1)
    if waited:
        first = min(waited, key=lambda rank: rank.when)
        return _unanswered(first, late, silent, size) or _told(first, guilty, size)
    if silent:
        return Fault((_hung(silent, [], size, None),), EXIT_RUN_FAILED)
    code = ranks[0].code
    return Fault((), code if code > 0 else 128 - code)


def _told(first: _Rank, guilty: Sequence[_Rank], size: int) -> Fault:
    """Returns the fault of the rank that failed first."""
    if first.report is None:
        return Fault((_died(first, size),), EXIT_RUN_FAILED)
    same = [rank for rank in guilty if rank.report and rank.report.fault.diagnostics == first.report.fault.diagnostics]
    if len(same) == size:
        return first.report.fault
    return _named(first.report.fault, first.rank, size)


def _unanswered(first: _Rank, late: Sequence[_Rank], silent: Mapping[int, str], size: int) -> Fault | None:
    """Returns the fault of the ranks for which `first` waited in vain; None if all other ranks were waiting as well."""
    assert first.report is not None, first
    reports = {rank.rank: rank.report.fault for rank in late if rank.report}
    busy = {rank: fault for rank, fault in reports.items() if not failure_file.is_waiting(fault)}
    unheard = {rank: state for rank, state in silent.items() if rank not in reports}
    if not busy and not unheard:
        return None
    found = _hung(unheard, [(rank, fault.diagnostics[0]) for rank, fault in busy.items()], size, first)
    trace = "".join(fault.trace for fault in busy.values())
    return Fault((found,), EXIT_RUN_FAILED, trace)


def _hung(silent: Mapping[int, str], busy: Sequence[tuple[int, Diagnostic]], size: int, waiting: _Rank | None) -> Diagnostic:
    """Returns the diagnostic of ranks that did not answer, killed silently or with a report of where they were busy."""
    told = [f"rank {rank} of {size} did not answer{f': {state}' if state else ''}" for rank, state in silent.items()]
    told += [f"rank {rank} of {size} did not answer: {found.message}" for rank, found in busy]
    hint = None
    if waiting is not None and waiting.report is not None:
        hint = f"rank {waiting.rank} waited for it: {waiting.report.fault.diagnostics[0].message}"
    where = busy[0][1] if busy else Diagnostic("rank-hung", "")
    return Diagnostic("rank-hung", "; ".join(told), place=where.place, source_line=where.source_line, hint=hint)


def _died(rank: _Rank, size: int) -> Diagnostic:
    """Returns the diagnostic of a rank that left without a report."""
    if rank.code > 0:
        message = f"rank {rank.rank} of {size} left with exit code {rank.code} and said nothing"
        return Diagnostic("rank-died", message, hint="whatever it wrote stands above")
    number = -rank.code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Diagnostic("rank-died", f"rank {rank.rank} of {size} was killed by {name}", hint=_HINTS.get(number))


def _named(fault: Fault, rank: int, size: int) -> Fault:
    """Returns the fault with the rank's name in each message."""
    prefix = f"rank {rank} of {size}: "
    diagnostics = tuple(replace(each, message=prefix + each.message) for each in fault.diagnostics)
    return replace(fault, diagnostics=diagnostics)

"""Decides what went wrong in a run, from the reports of its ranks and of its launcher: cause, rank, layer, action, remedy.

In this order, since each may have those below it for a consequence:

    a rank raised what no other rank made it raise
    a rank was killed, or left without a word
    a rank was stopped, or was busy while others waited for it
    ranks exchanged different things, or waited for each other
    a rank left no report while others waited for it
    all that is left is what the first of them said
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sley_core.actions.action import in_words
from sley_core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from sley_core.metrics.jsonl import NAME as METRICS
from sley_core.metrics.jsonl import rows
from sley_doctor.reports.fault_report import FaultReport, FoundReports, LaunchReport, SeenExchange
from sley_doctor.reports.work_record import WorkRecord
from sley_doctor.verdict.divergence import Divergence, divergence, late_for
from train_cli.progress import SUMMARY
from train_cli.run_folder import TakenError, check_free
from train_cli.stopping import WARNINGS

RUNNING, KILLED, UNKNOWN = "running", "killed", "unknown"
"""Beside the outcomes of a summary: finished, interrupted, failed."""

RECENT_S = 60.0  # what has written so lately may be under way elsewhere: locks are of one host, or of none
SAME_TIME_S = 2.0  # clocks of hosts may be that far apart; between the end of a run and its next start lies more


@dataclass(frozen=True)
class RunState:
    """Holds how far a run has come.

    state: RUNNING; the outcome that the run has noted at its end; KILLED if it has ended and noted none; UNKNOWN if it may be
    running on another host. step: the last one that all ranks have taken, 0 if none is known. time: when its row was written,
    in seconds since the epoch, or None.

    A row of a step is written when all ranks have come to that step's end, since each gives its part of the loss there. So the
    last row says of every rank where it was, also where all were killed at once and nobody could report anything.
    """

    state: str
    step: int
    time: float | None


def state_of(run: Path, records: Sequence[WorkRecord], now: float) -> RunState:
    """Returns how far the run in folder `run` has come. now: seconds since the epoch. Raises OSError."""
    steps = [int(row["step"]) for row in rows(run)]
    step = max(steps, default=0)
    time = (run / METRICS).stat().st_mtime if step else None
    if not step and records:  # a run without the writer `core.jsonl`
        last = min((record.windows[-1] for record in records if record.windows), key=lambda one: one.last, default=None)
        step, time = (last.last, last.time) if last else (0, None)
    try:
        check_free(run)
    except TakenError:
        return RunState(RUNNING, step, time)
    outcome = _outcome(run, len(steps), max((record.start.time for record in records), default=0.0))
    # A run may be under way although this host has no lock on its folder, which rank 0's host would have.
    times = [record.windows[-1].time for record in records if record.windows]
    host = records[0].start.host if records else socket.gethostname()
    if outcome == KILLED and (host != socket.gethostname() or now - max([*times, time or 0.0]) < RECENT_S):
        outcome = UNKNOWN
    return RunState(outcome, step, time)


def _outcome(run: Path, num_rows: int, start: float) -> str:
    """Returns the outcome that the last start has noted, KILLED if it has noted none. The summary is that of an earlier start
    if it has fewer rows than there are, or ended before the newest `start` of a rank.
    """
    try:
        content = json.loads((run / SUMMARY).read_text("utf-8"))
        is_earlier = num_rows > content["steps"] or start > (run / SUMMARY).stat().st_mtime + SAME_TIME_S
        return KILLED if is_earlier else str(content["outcome"])
    except (OSError, ValueError, KeyError, TypeError):
        return KILLED


def state_in_words(found: RunState, now: float) -> str:
    """Returns one sentence. now: seconds since the epoch."""
    ago = ""
    if found.time is not None:
        seconds = max(0.0, now - found.time)
        ago = f", {seconds:.0f} s ago" if seconds < 120 else f", {seconds / 60:.0f} min ago"
        ago = f", {seconds / 3600:.0f} h ago" if seconds >= 7200 else ago
    came = f"all ranks finished step {found.step}{ago}" if found.step else "no step was taken"
    free = "the last attempt has written no summary, and no process on this host holds the run's lock"
    match found.state:
        case "running":
            return f"the run is still running; {came}"
        case "killed":
            beyond = f", and none finished step {found.step + 1}" if found.step else ""
            return f"{free}: it was killed; {came}{beyond}"
        case "unknown":
            ask = "ask again in a minute, or on the host of rank 0"
            return f"{free}: it may be running on another host, or was killed ({ask}); {came}"
    return f"the run has ended: {found.state}; {came}"


_LONGEST = 240  # of what a rank said, as much is shown: C++ says a great deal

_BETWEEN = frozenset(
    {"collective-failed", "ranks-differ", "stages-differ", "boundary-mismatch", "group-failed", "start-failed"}
)
"""Codes of errors in which at least two ranks have a part."""

_QUIET = frozenset({EXIT_INTERRUPTED, EXIT_TERMINATED, *(128 + number for number in WARNINGS), -signal.SIGTERM, -signal.SIGINT})
_ABORT = -signal.SIGABRT
_STUCK = "stuck"

_SLOW = "look at what it does there; if it is only slow, a longer `[limits] collective_timeout_s` lets the others wait"
_STOPPED = "something outside of the run did that: a person, a debugger, a batch system that suspends; start the run again"
_ORDER = (
    "all ranks of a group must start the same exchanges in the same order: look for code that depends on a rank's data or "
    "number, in the forward, in hooks and handlers of your own, around the place named here"
)
_KILLED = "the process was killed from outside: look for the OOM killer in `dmesg`"
_ABORTED = (
    "native code gave up; what it wrote stands in the run's output. Where that is gloo's `Received data size doesn't match`, "
    "ranks went apart in this exchange or one under way beside it, and either may be wrong: look at what depends on its data"
)
_UNKNOWN = "look at that rank's machine; the report of every rank is in the folder `faults` of the run"


@dataclass(frozen=True)
class Verdict:
    """Describes what went wrong. kind: a word for it. cause: a sentence. ranks: those at fault; empty if two ranks differ and
    it cannot be decided which is wrong. exchanges: collectives or transfers concerned, the likeliest first. step: 0 if unknown.
    """

    kind: str
    cause: str
    ranks: tuple[int, ...]
    remedy: str
    exchanges: tuple[SeenExchange, ...] = ()
    step: int = 0
    action: str = ""
    layer: str = ""


def verdict(found: FoundReports) -> Verdict:
    """Returns the verdict on one attempt from all of its reports."""
    by_rank = {report.rank: report for report in found.ranks}
    return (
        _raised(by_rank)
        or _killed(by_rank, found.launch)
        or _stopped(by_rank, found.launch)
        or _busy(by_rank)
        or _apart(by_rank)
        or _missing(by_rank)
        or _said(by_rank)
    )


def _raised(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict for the first rank that raised an error of its own, not one about other ranks, if any did."""
    own = [one for one in by_rank.values() if one.kind != _STUCK and one.code not in _BETWEEN]
    if not own:
        return None
    first = min(own, key=lambda one: one.time)
    same = tuple(one.rank for one in own if (one.code, one.message) == (first.code, first.message))
    whose = "all ranks" if len(same) == first.world > 1 else f"rank {first.rank}"
    cause = f"{whose} failed: {' '.join(first.message.split())}"
    remedy = first.hint or "the report of that rank has the traceback"
    return _at(first, Verdict("error", cause, same if whose == "all ranks" else (first.rank,), remedy))


def _killed(by_rank: Mapping[int, FaultReport], launch: LaunchReport | None) -> Verdict | None:
    """Returns the verdict for a rank that ended without a report, by its exit code; None if none did."""
    if launch is None:
        return None
    gone = {
        rank: code
        for rank, code in sorted(launch.codes.items())
        if rank not in by_rank and rank not in launch.silent and code not in _QUIET
    }
    # A rank that native code ended is the cause only where nothing else is.
    for rank, code in sorted(gone.items(), key=lambda one: (one[1] == _ABORT, one[0] != launch.first)):
        remedy = _ABORTED if code == _ABORT else _KILLED
        return _waited_for(rank, f"rank {rank} {_ended(code)}", "killed", remedy, by_rank)
    return None


def _ended(code: int) -> str:
    """Returns in words how a process ended. code: its exit code."""
    if code >= 0:
        return f"left with exit code {code} and said nothing"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}"


def _stopped(by_rank: Mapping[int, FaultReport], launch: LaunchReport | None) -> Verdict | None:
    """Returns the verdict for a rank that did not answer its launcher; None if there is none."""
    for rank, state in sorted(launch.silent.items()) if launch is not None else ():
        if rank not in by_rank:
            cause = f"rank {rank} did not answer{f': {state}' if state else ''}"
            return _waited_for(rank, cause, "stopped", _STOPPED if state else _UNKNOWN, by_rank)
    return None


def _busy(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict for a rank that was stuck outside of any exchange; None if there is none."""
    busy = [one for one in by_rank.values() if one.kind == _STUCK and one.wait is None]
    if not busy:
        return None
    first = busy[0]
    found = _waited_for(first.rank, f"rank {first.rank} did not come to the others: {first.message}", "busy", _SLOW, by_rank)
    return _at(first, found)


def _apart(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict for ranks that ran different exchanges; None if they did not."""
    found: Divergence | None = divergence(list(by_rank.values()))
    if found is None:
        return None
    whose = next(iter(found.ranks), None)
    if whose is None:
        cause = f"ranks have gone apart: {found.told}"
        first = min(by_rank.values(), key=lambda one: one.time)
    else:
        cause, first = f"rank {whose} differs from the others: {found.told}", by_rank[whose]
    return _at(first, Verdict(found.kind, cause, found.ranks, _ORDER, found.exchanges))


def _missing(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict for a rank that others waited for and that left no report; None if there is none."""
    for report in by_rank.values():
        if report.wait is None:
            continue
        for rank in late_for(report.wait, by_rank):
            if rank not in by_rank:
                cause = f"rank {rank} has left no report: it was killed, or stopped, or its machine is gone"
                return _waited_for(rank, cause, "missing", _UNKNOWN, by_rank)
    return None


def _said(by_rank: Mapping[int, FaultReport]) -> Verdict:
    """Returns the verdict that only repeats the first report, if no other fits."""
    if not by_rank:
        return Verdict("unknown", "no rank has said anything", (), _UNKNOWN)
    first = min(by_rank.values(), key=lambda one: one.time)
    seen = () if first.wait is None else (first.wait.exchange,)
    return _at(first, Verdict("said", first.message, (), first.hint or _UNKNOWN, seen))


def _waited_for(rank: int, cause: str, kind: str, remedy: str, by_rank: Mapping[int, FaultReport]) -> Verdict:
    """Returns the verdict on a rank without a report of its own, with the exchanges in which others waited for it."""
    waiting = [one for one in by_rank.values() if one.wait is not None and rank in one.wait.exchange.ranks]
    # Whoever waits for it and nobody else says most: what all wait for at last has all ranks in it.
    waiting.sort(key=lambda one: (len(one.wait.exchange.ranks) if one.wait else 0, one.time))
    if not waiting:
        return Verdict(kind, cause, (rank,), remedy)
    first = waiting[0]
    assert first.wait is not None, first
    told = f"{cause}; rank {first.rank} waited for it in the {first.wait.exchange}"
    seen = tuple(dict.fromkeys(one.wait.exchange for one in waiting if one.wait is not None))
    return Verdict(kind, told, (rank,), remedy, seen, first.step)


def _at(report: FaultReport, found: Verdict) -> Verdict:
    """Returns the verdict with the place of `report`'s rank in its step."""
    return replace(found, step=report.step, action=report.pending, layer=report.layer)


def evidence(reports: Sequence[FaultReport]) -> list[str]:
    """Returns a line for each rank that has reported: where it was, what it waited in, and its error."""
    return [_line(report) for report in reports]


def _line(report: FaultReport) -> str:
    """Returns one line of text about a report: where the rank was, for what it waited, and its error."""
    stage = "" if report.stage is None else f" (stage {report.stage})"
    parts = [f"step {report.step}" if report.step else "before the first step"]
    if report.finished:
        parts.append(f"after {in_words(report.finished)}")
    if report.pending:
        parts.append(f"in {in_words(report.pending)}")
    if report.layer:
        parts.append(f"last layer called: {report.layer}")
    if (wait := report.wait) is not None:
        size = f", {wait.exchange.num_bytes} bytes" if wait.exchange.num_bytes else ""
        whom = "" if wait.peer is None else f" for rank {wait.peer}"
        number = f"number {wait.exchange.number} of `{wait.exchange.queue}`"
        parts.append(f"waited {wait.seconds:.1f} s{whom} in the {wait.exchange} ({number}{size})")
    said = " ".join(f"{report.code}: {report.message}".split())
    return f"rank {report.rank}{stage}: {', '.join(parts)}; {said[:_LONGEST]}{'...' if len(said) > _LONGEST else ''}"

"""Finds the last step of a run and whether it still runs, from its rows, its summary, its folder's lock and its records.

A row of a step is written when all ranks have come to that step's end, since each gives its part of the loss there. So the last
row says of every rank where it was, also where all were killed at once and nobody could report anything.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sley_core.metrics.jsonl import NAME as METRICS
from sley_core.metrics.jsonl import rows
from sley_core.metrics.summary import NAME as SUMMARY
from sley_doctor.reports.work_record import WorkRecord
from train_cli.folder_lock import TakenError, check_free

RUNNING, KILLED, UNKNOWN = "running", "killed", "unknown"
"""Beside the outcomes of a summary: finished, interrupted, failed."""

RECENT_S = 60.0
"""What has written so lately may be under way elsewhere: locks are of one host, or of none."""

SAME_TIME_S = 2.0
"""Clocks of hosts may be that far apart; between the end of a run and its next start lies more."""


@dataclass(frozen=True)
class RunState:
    """Holds how far a run has come.

    state: RUNNING; the outcome that the run has noted at its end; KILLED if it has ended and noted none; UNKNOWN if it may be
    running on another host. step: the last one that all ranks have taken, 0 if none is known. time: when its row was written,
    in seconds since the epoch, or None.
    """

    state: str
    step: int
    time: float | None


def state_of(run: Path, records: Sequence[WorkRecord], now: float) -> RunState:
    """Returns how far the run in folder `run` has come. records: what its ranks have recorded. now: seconds since the epoch.
    Raises OSError.
    """
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
    if outcome == KILLED and _may_be_elsewhere(records, now, time):
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


def _may_be_elsewhere(records: Sequence[WorkRecord], now: float, row: float | None) -> bool:
    """Returns whether a run may be under way although this host has no lock on its folder, which rank 0's host would have."""
    times = [record.windows[-1].time for record in records if record.windows]
    host = records[0].start.host if records else socket.gethostname()
    return host != socket.gethostname() or now - max([*times, row or 0.0]) < RECENT_S


def state_in_words(found: RunState, now: float) -> str:
    """Returns one sentence. now: seconds since the epoch."""
    ago = "" if found.time is None else f", {_ago(now - found.time)} ago"
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


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"

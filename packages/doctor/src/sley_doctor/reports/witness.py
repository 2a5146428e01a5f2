"""Writes this rank's report when it fails, or is found stuck: where it is, in what it waits, and its threads' stacks.

The report must never hide the first error: a failure here is dropped, and a file system that hangs costs at most `MOST_S`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sley_doctor.reports.fault_report import FaultReport, SeenExchange, SeenWait, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sley_core.comm.guard import Turn
    from sley_core.comm.progress import Progress
    from sley_core.comm.world import World
    from sley_core.errors import Diagnostic

MOST_S = 2.0
"""How long the report may take."""

MOST_THREADS, MOST_LINES = 16, 80
"""Of stacks: a report stays small."""


def report_error(folder: Path, world: World, what: Diagnostic, error: BaseException) -> None:
    """Writes into the run's `folder` what this rank was doing when it failed with `error`. what: the error as the user
    sees it.
    """
    lines = [line for part in traceback.format_exception(error) for line in part.splitlines()]
    _report(folder, world, "error", what, {"the error": tuple(lines[-MOST_LINES:])})


def report_stuck(folder: Path, world: World, what: Diagnostic) -> None:
    """Writes what this rank is doing if it was asked to end and does not; called in a thread other than the main one."""
    _report(folder, world, "stuck", what, {})


def _report(folder: Path, world: World, kind: str, what: Diagnostic, stacks: Mapping[str, tuple[str, ...]]) -> None:
    """Writes a fault report in a thread, waiting at most MOST_S; failures are ignored, since the error itself matters more."""

    def tell() -> None:
        # A report is worth less than the error that it tells of.
        with suppress(Exception):
            write(folder, seen(world, kind, what, {**stacks, **_stacks()}))

    thread = threading.Thread(target=tell, name="sley-fault-report", daemon=True)
    thread.start()
    thread.join(MOST_S)


def seen(world: World, kind: str, what: Diagnostic, stacks: Mapping[str, tuple[str, ...]]) -> FaultReport:
    """Returns the report of this rank's present state, from the groups that were made last."""
    known = FaultReport(
        world.rank,
        world.size,
        kind,
        time.time(),
        what.code,
        what.message,
        what.hint or "",
        host=socket.gethostname(),
        pid=os.getpid(),
        stacks=stacks,
    )
    if not world.made:
        return known
    groups = world.made[-1]
    return replace(_with_progress(known, groups.progress), stage=groups["pp"].coord)


def _with_progress(known: FaultReport, progress: Progress) -> FaultReport:
    step_progress = progress.step_progress
    # Copied, since the main thread of a rank that is stuck may go on.
    queues = {queue: tuple(map(_exchange, list(kept))) for queue, kept in list(progress.recent.items())}
    return replace(
        known,
        step=step_progress.step,
        finished=str(step_progress.finished),
        pending=str(step_progress.pending),
        layer=step_progress.layer,
        wait=_wait(progress),
        exchanges=queues,
    )


def _wait(progress: Progress) -> SeenWait | None:
    """Returns the wait in which this rank is or has failed, as a report has it; None if there is none."""
    wait = progress.wait
    if wait is None:
        return None
    return SeenWait(_exchange(wait.turn), wait.seconds, wait.end, wait.peer)


def _exchange(turn: Turn) -> SeenExchange:
    members = turn.members
    return SeenExchange(
        turn.operation, turn.what, str(members), members.ranks, turn.queue, turn.number, turn.num_bytes, turn.peer
    )


def _stacks() -> dict[str, tuple[str, ...]]:
    """Returns the stack of every Python thread except the calling one, the outermost frame first."""
    frames = sys._current_frames()
    found = {}
    for thread in threading.enumerate()[:MOST_THREADS]:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            lines = [line for part in traceback.format_stack(frame) for line in part.splitlines()]
            found[thread.name] = tuple(lines[-MOST_LINES:])
    return found

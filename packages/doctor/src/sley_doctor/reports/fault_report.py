"""Reports of a failure by each rank and by the launcher: small JSON files in the run's folder. Imports no torch.

runs/NAME/faults/0/rank-1.json      what rank 1 of the first attempt did, waited in and raised
                   launcher.json    how the ranks ended, if our own launcher started them

A rank reports when it fails, or is found stuck: where it is, in what it waits, and its threads' stacks. The report must never
hide the first error: a failure here is dropped, and a file system that hangs costs at most `MOST_S`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from sley_core.json_text import to_json
from sley_core.whole_files import write_atomically
from train_cli.run_folder import FAULTS

if TYPE_CHECKING:
    from sley_core.comm.guard import Turn
    from sley_core.comm.world import World
    from sley_core.errors import Diagnostic

LAUNCHER = "launcher.json"
FORMAT = 1  # of these files; others are not read


@dataclass(frozen=True)
class SeenExchange:
    """Describes an exchange that a rank has started: the `number`-th of `queue`, whose exchanges all members start in one
    order. group: in words. ranks: its members. peer: the rank at the other end of a message; None if all members take part.
    """

    operation: str
    what: str
    group: str
    ranks: tuple[int, ...]
    queue: str
    number: int
    num_bytes: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.operation} of {self.what.removesuffix(f' over {self.group}')} over {self.group}"


@dataclass(frozen=True)
class SeenWait:
    """Describes a wait in `exchange`. end: "" while it lasts, "late", "closed" or "differs". peer: who did not come."""

    exchange: SeenExchange
    seconds: float
    end: str = ""
    peer: int | None = None


@dataclass(frozen=True)
class FaultReport:
    """Holds the report of rank `rank` of `world`. kind: "error" if it failed, "stuck" if it was asked to end and could not.

    code, message, hint: of its error. time: seconds since the epoch. step: the optimizer step, from 1; 0 before the first.
    finished, pending: entries of its list. layer: the one called last. exchanges: the last of each queue, ascending. stacks:
    lines by the name of the thread.
    """

    rank: int
    world: int
    kind: str
    time: float
    code: str = ""
    message: str = ""
    hint: str = ""
    stage: int | None = None
    host: str = ""
    pid: int = 0
    step: int = 0
    finished: str = ""
    pending: str = ""
    layer: str = ""
    wait: SeenWait | None = None
    exchanges: Mapping[str, tuple[SeenExchange, ...]] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchReport:
    """Holds what the launcher saw. codes: exit codes by rank, negative for signals. silent: the state, in words, of ranks that
    had to be killed. first: the rank that ended first.
    """

    world: int
    codes: Mapping[int, int]
    silent: Mapping[int, str]
    first: int | None = None


@dataclass(frozen=True)
class FoundReports:
    """Holds the reports of one attempt. ranks: in order of rank. unreadable: files that are damaged or of another version."""

    attempt: int
    ranks: tuple[FaultReport, ...]
    launch: LaunchReport | None
    unreadable: tuple[str, ...] = ()


def attempt_of(environ: Mapping[str, str]) -> int:
    """Returns how often torchrun has restarted the ranks before this attempt; 0 without torchrun."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def write(run_folder: Path, report: FaultReport) -> None:
    """Writes the report of a rank, atomically; the first one of an attempt is kept. Raises OSError."""
    path = run_folder / FAULTS / str(attempt_of(os.environ)) / f"rank-{report.rank}.json"
    if not path.exists():
        _write(path, asdict(report))


def write_launch(run_folder: Path, report: LaunchReport) -> None:
    """Writes the report of a launcher. Raises OSError."""
    _write(run_folder / FAULTS / str(attempt_of(os.environ)) / LAUNCHER, asdict(report))


def forget(run_folder: Path) -> None:
    """Removes the reports of an earlier run; called before a run begins, but not if torchrun restarts its ranks."""
    root = run_folder / FAULTS
    if root.is_symlink():  # which must not say where ranks write
        root.unlink()
    shutil.rmtree(root, ignore_errors=True)


def read(run_folder: Path) -> list[FoundReports]:
    """Returns the reports of every attempt that left any, in order. Raises OSError if they cannot be listed."""
    root = run_folder / FAULTS
    if not root.is_dir():
        return []
    attempts = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir())
    found = (_attempt(root / str(attempt), attempt) for attempt in attempts)
    return [one for one in found if one.ranks or one.launch or one.unreadable]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json({"format": FORMAT, **content}) + "\n")


def _attempt(folder: Path, attempt: int) -> FoundReports:
    """Reads all reports of one attempt in `folder`; lists the names of files that cannot be read."""
    ranks: list[FaultReport] = []
    launch, unreadable = None, []
    launches, faults = TypeAdapter(LaunchReport), TypeAdapter(FaultReport)
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(path.name)
            if path.name == LAUNCHER:
                launch = launches.validate_python(content)
            else:
                ranks.append(faults.validate_python(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            unreadable.append(path.name)
    return FoundReports(attempt, tuple(sorted(ranks, key=lambda one: one.rank)), launch, tuple(unreadable))


MOST_S = 2.0  # how long the report may take
MOST_THREADS, MOST_LINES = 16, 80  # of stacks: a report stays small


def report_error(folder: Path, world: World, what: Diagnostic, error: BaseException) -> None:
    """Writes what this rank was doing when it failed with `error`. what: the error as the user sees it."""
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
    place: dict[str, Any] = {}
    if world.created:
        groups = world.created[-1]
        progress, step, wait = groups.progress, groups.progress.step_progress, groups.progress.wait
        place = {
            "stage": groups["pp"].coord,
            "step": step.step,
            "finished": str(step.finished),
            "pending": str(step.pending),
            "layer": step.layer,
            "wait": None if wait is None else SeenWait(_exchange(wait.turn), wait.seconds, wait.end, wait.peer),
            # Copied, since the main thread of a rank that is stuck may go on.
            "exchanges": {queue: tuple(map(_exchange, list(kept))) for queue, kept in list(progress.recent.items())},
        }
    error = what.code, what.message, what.hint or ""
    host, now = socket.gethostname(), time.time()
    return FaultReport(world.rank, world.size, kind, now, *error, host=host, pid=os.getpid(), stacks=stacks, **place)


def _exchange(turn: Turn) -> SeenExchange:
    group = turn.members
    return SeenExchange(turn.operation, turn.what, str(group), group.ranks, turn.queue, turn.number, turn.num_bytes, turn.peer)


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

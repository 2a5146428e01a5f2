"""Writes and reads the fault reports of ranks and of the launcher: small JSON files in the folder of a run. Imports no torch.

runs/NAME/faults/0/rank-1.json      the actions, waits and error of rank 1 in the first attempt
                   launcher.json    the exit codes of the ranks, if `train-cli` launched them

A rank writes a report when it fails or is stuck, with its position in the step, its wait, and the stacks of its threads. A
report must never hide the original error, so failures to write it are ignored, and a file system that hangs delays the rank by
at most `MAX_REPORT_S`.
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
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from sley_core.errors import Diagnostic
from sley_core.files import write_atomically
from sley_core.json_text import to_json
from sley_doctor.work_record import record_work
from train_cli.run_folder import FAULTS, RunRecorder

if TYPE_CHECKING:
    from sley_core.comm.exchanges import Turn
    from sley_core.comm.world import World
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts

LAUNCHER_FILE = "launcher.json"  # the name of the file with the launcher's report
FORMAT = 1  # the version of all reports; reports of other versions are not read


@dataclass(frozen=True)
class ExchangeRecord:
    """A record of an exchange (a collective or a message) that a rank has started. number: the exchange's position in `queue`.
    All members must start the exchanges of a queue in the same order. label: a description of the exchanged tensors. group: the
    description of the group. ranks: the members of the group. num_bytes: the size of this rank's tensors. peer: the rank at the
    other end of a message; None for a collective.
    """

    operation: str
    label: str
    group: str
    ranks: tuple[int, ...]
    queue: str
    number: int
    num_bytes: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.operation} of {self.label.removesuffix(f' over {self.group}')} over {self.group}"


@dataclass(frozen=True)
class WaitRecord:
    """A record of a wait in `exchange` that has lasted for `seconds`. end: "" while the wait lasts; else why it ended: "late"
    after a timeout, "closed" if a peer closed its connection, "differs" if a peer's exchange differs. peer: the rank for which
    this rank waits; None if unknown.
    """

    exchange: ExchangeRecord
    seconds: float
    end: str = ""
    peer: int | None = None


@dataclass(frozen=True)
class FaultReport:
    """The report of rank `rank` of `world` ranks. kind: "error" if the rank failed, "stuck" if it could not end when asked to.
    code, message, hint: the rank's error. time: in seconds since the epoch. stage: the rank's pipeline stage; None if the rank
    has not created its groups. step: the optimizer step, from 1; 0 before the first step. finished, pending: the last finished
    and the current entry of the rank's action list. layer: the layer called last. wait: the wait that is in progress or has
    failed, if any. exchanges: the latest exchanges of each queue, in order. stacks: the lines of each stack, by thread name.
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
    wait: WaitRecord | None = None
    exchanges: Mapping[str, tuple[ExchangeRecord, ...]] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchReport:
    """The launcher's report. codes: exit codes by rank, or negative signal numbers for killed ranks. silent: by rank, the state
    of each process that did not respond and had to be killed. first: the rank that failed first; None if unknown.
    """

    world: int
    codes: Mapping[int, int]
    silent: Mapping[int, str]
    first: int | None = None


@dataclass(frozen=True)
class AttemptReports:
    """The reports of one attempt. ranks: the fault reports in order of rank. launch: the launcher's report; None if there is
    none. unreadable: the names of files that are damaged or of another version.
    """

    attempt: int
    ranks: tuple[FaultReport, ...]
    launch: LaunchReport | None
    unreadable: tuple[str, ...] = ()


def read_attempt_number() -> int:
    """Returns how often torchrun has restarted the ranks before this attempt; 0 without torchrun."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def write_report(run_folder: Path, report: FaultReport) -> None:
    """Writes a rank's report atomically, unless this attempt already has a report of this rank. Raises OSError on failure."""
    path = run_folder / FAULTS / str(read_attempt_number()) / f"rank-{report.rank}.json"
    if not path.exists():
        _write_json(path, asdict(report))


def read_reports(run_folder: Path) -> list[AttemptReports]:
    """Returns the reports of each attempt that left any, in order. Raises OSError if the folder cannot be listed."""
    root = run_folder / FAULTS
    if not root.is_dir():
        return []
    attempts = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir())
    reports = (_read_attempt(root / str(attempt), attempt) for attempt in attempts)
    return [report for report in reports if report.ranks or report.launch or report.unreadable]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json({"format": FORMAT, **content}) + "\n")


def _read_attempt(folder: Path, attempt: int) -> AttemptReports:
    """Returns the reports in `folder`, the folder of attempt number `attempt`."""
    ranks: list[FaultReport] = []
    launch, unreadable = None, []
    launches, faults = TypeAdapter(LaunchReport), TypeAdapter(FaultReport)
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(path.name)
            if path.name == LAUNCHER_FILE:
                launch = launches.validate_python(content)
            else:
                ranks.append(faults.validate_python(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            unreadable.append(path.name)
    return AttemptReports(attempt, tuple(sorted(ranks, key=lambda report: report.rank)), launch, tuple(unreadable))


MAX_REPORT_S = 2.0  # the time limit in seconds for writing a report
MAX_THREADS, MAX_LINES = 16, 80  # the maximum numbers of threads in a report, and of lines in the stack of each thread


class DoctorRecorder(RunRecorder):
    """The recorder of sley-doctor. Writes `work/rank-N.jsonl` while rank N trains, and files in `faults/` when ranks fail."""

    def record_steps(self, parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> AbstractContextManager[None]:
        return record_work(parts, feed, folder, notes)

    def report_failure(self, folder: Path, world: World, diagnostic: Diagnostic, error: BaseException) -> None:
        lines = [line for part in traceback.format_exception(error) for line in part.splitlines()]
        _write_in_thread(folder, world, "error", diagnostic, {"the error": tuple(lines[-MAX_LINES:])})

    def report_hang(self, folder: Path, world: World, diagnostic: Diagnostic) -> None:
        _write_in_thread(folder, world, "stuck", diagnostic, {})

    def report_launch(
        self, folder: Path, world_size: int, exit_codes: Mapping[int, int], killed_states: Mapping[int, str], first_failed: int
    ) -> None:
        path = folder / FAULTS / str(read_attempt_number()) / LAUNCHER_FILE
        _write_json(path, asdict(LaunchReport(world_size, exit_codes, killed_states, first_failed)))

    def delete_reports(self, folder: Path) -> None:
        """Deletes the reports of earlier attempts. Removes a link instead of following it."""
        root = folder / FAULTS
        if root.is_symlink():  # a link must not redirect the writes of ranks
            root.unlink()
        shutil.rmtree(root, ignore_errors=True)


def _write_in_thread(
    folder: Path, world: World, kind: str, diagnostic: Diagnostic, stacks: Mapping[str, tuple[str, ...]]
) -> None:
    """Writes a fault report in a new thread. Waits at most MAX_REPORT_S for it, and ignores failures to write."""

    def write_quietly() -> None:
        # An error in writing the report must not replace the error that it reports.
        with suppress(Exception):
            write_report(folder, build_report(world, kind, diagnostic, {**stacks, **_format_thread_stacks()}))

    thread = threading.Thread(target=write_quietly, name="sley-fault-report", daemon=True)
    thread.start()
    thread.join(MAX_REPORT_S)


def build_report(world: World, kind: str, diagnostic: Diagnostic, stacks: Mapping[str, tuple[str, ...]]) -> FaultReport:
    """Returns a report of this rank's state, with the groups that `world` created last. kind: "error" or "stuck". stacks: the
    lines of each stack, by thread name.
    """
    position: dict[str, Any] = {}
    if world.open_groups:
        groups = world.open_groups[-1]
        progress, step, wait = groups.progress, groups.progress.step_progress, groups.progress.current_wait
        position = {
            "stage": groups["pp"].coord,
            "step": step.step,
            "finished": str(step.previous_entry),
            "pending": str(step.current_entry),
            "layer": step.layer,
            "wait": None if wait is None else WaitRecord(_record_exchange(wait.turn), wait.seconds, wait.failure, wait.peer),
            # The exchanges are copied, since the main thread of a stuck rank may continue and change them.
            "exchanges": {
                queue: tuple(map(_record_exchange, list(turns))) for queue, turns in list(progress.recent_turns.items())
            },
        }
    error = diagnostic.code, diagnostic.message, diagnostic.hint or ""
    host, time_s = socket.gethostname(), time.time()
    return FaultReport(world.rank, world.size, kind, time_s, *error, host=host, pid=os.getpid(), stacks=stacks, **position)


def _record_exchange(turn: Turn) -> ExchangeRecord:
    group = turn.members
    return ExchangeRecord(
        turn.operation, turn.label, str(group), group.ranks, turn.queue, turn.number, turn.num_bytes, turn.peer
    )


def _format_thread_stacks() -> dict[str, tuple[str, ...]]:
    """Returns the stacks of Python threads by name, the outermost frame first, except the stack of the calling thread."""
    frames = sys._current_frames()
    stacks = {}
    for thread in threading.enumerate()[:MAX_THREADS]:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            lines = [line for part in traceback.format_stack(frame) for line in part.splitlines()]
            stacks[thread.name] = tuple(lines[-MAX_LINES:])
    return stacks

"""Reports of a failure by each rank and by the launcher: small JSON files in the run's folder. Imports no torch.

runs/NAME/faults/0/rank-1.json      what rank 1 of the first attempt did, waited in and raised
                   launcher.json    how the ranks ended, if our own launcher started them
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sley_core.json_text import to_json, write_whole
from train_cli.run_folder import FAULTS

LAUNCHER = "launcher.json"
FORMAT = 1
"""Of these files; others are not read."""


@dataclass(frozen=True)
class SeenExchange:
    """Describes an exchange that a rank has started: the `number`-th of `queue`, whose exchanges all members start in one
    order.

    group: in words. ranks: its members. peer: the rank at the other end of a message; None if all members take part.
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
    """Describes a wait for other ranks in `exchange`. end: "" while it lasts, "late", "closed" or "differs". peer: who did not
    come.
    """

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
    """Holds the reports of one attempt. ranks: in order of rank. unreadable: names of files that are damaged or of another
    version.
    """

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
    path = _folder(run_folder) / f"rank-{report.rank}.json"
    if not path.exists():
        _write(path, asdict(report))


def write_launch(run_folder: Path, report: LaunchReport) -> None:
    """Writes the report of a launcher. Raises OSError."""
    _write(_folder(run_folder) / LAUNCHER, asdict(report))


def forget(run_folder: Path) -> None:
    """Removes the reports of an earlier run; called before a run begins, but not if torchrun restarts its ranks."""
    root = run_folder / FAULTS
    if root.is_symlink():  # which must not say where ranks write
        root.unlink()
    shutil.rmtree(root, ignore_errors=True)


def read(run_folder: Path) -> list[FoundReports]:
    """Returns the reports of every attempt that has left any, the first attempt first. Raises OSError if they cannot be
    listed.
    """
    root = run_folder / FAULTS
    if not root.is_dir():
        return []
    attempts = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir())
    found = (_attempt(root / str(attempt), attempt) for attempt in attempts)
    return [one for one in found if one.ranks or one.launch or one.unreadable]


def _folder(run_folder: Path) -> Path:
    return run_folder / FAULTS / str(attempt_of(os.environ))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json({"format": FORMAT, **content}) + "\n")


def _attempt(folder: Path, attempt: int) -> FoundReports:
    """Reads all reports of one attempt in `folder`; lists the names of files that cannot be read."""
    ranks: list[FaultReport] = []
    launch, unreadable = None, []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(path.name)
            if path.name == LAUNCHER:
                launch = _launch(content)
            else:
                ranks.append(_report(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            unreadable.append(path.name)
    return FoundReports(attempt, tuple(sorted(ranks, key=lambda one: one.rank)), launch, tuple(unreadable))


def _launch(content: dict[str, Any]) -> LaunchReport:
    """Returns the launcher's report from its JSON content, in which ranks are strings."""
    by_rank = {key: {int(rank): value for rank, value in content[key].items()} for key in ("codes", "silent")}
    return LaunchReport(**{**content, **by_rank})


def _report(content: dict[str, Any]) -> FaultReport:
    """Returns the fault report with the `content` of its JSON file."""
    wait = content.pop("wait")
    if wait is not None:
        wait = SeenWait(**{**wait, "exchange": _exchange(wait["exchange"])})
    queues = content.pop("exchanges")
    exchanges = {queue: tuple(map(_exchange, seen)) for queue, seen in queues.items()}
    stacks = {thread: tuple(lines) for thread, lines in content.pop("stacks").items()}
    return FaultReport(**content, wait=wait, exchanges=exchanges, stacks=stacks)


def _exchange(content: dict[str, Any]) -> SeenExchange:
    return SeenExchange(**{**content, "ranks": tuple(content["ranks"])})

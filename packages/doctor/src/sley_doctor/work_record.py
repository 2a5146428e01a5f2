"""The record of each rank's work and waits: one file of JSON lines per rank in the run's folder `work`. `train-cli doctor` and
`train-cli report` find slow ranks in it. Imports no torch.

rank-1.jsonl      a start, then a window of steps per line; another start if the run was started again

All ranks have windows of the same steps.

Times are measured on the host: on CUDA they are the time to launch an action's kernels, not to run them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from sley_core.json_text import to_json
from train_cli.run_folder import WORK

FORMAT = 2  # version of these files; other versions are not read

DATA, BEGINNING, MESSAGES, REDUCTION, UPDATE, DEVICE, BETWEEN, EVALUATION = (
    "data",
    "beginning",
    "messages",
    "reduction",
    "update",
    "device",
    "between",
    "evaluation",
)
"""Locations of work that are no actions: the wait for the feed; the beginning of a step; starting sends and receives; the
end of the gradients' reduction; norm, clip and optimizer; the wait until the device has finished a step, which on CUDA
includes waits for other ranks; the time between two steps (rows, checkpoints, listeners); evaluations."""


class Spread(NamedTuple):
    """Holds the quartiles of a number over steps."""

    low: float
    median: float
    high: float


ZERO_SPREAD = Spread(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Window:
    """Holds the measurements of steps `first` to `last`, from 1. time: when the window was written, in seconds since the
    epoch. seconds: the duration of a step.

    work: seconds of work per step by location, without waits. `F0` is the forward of chunk 0 over all microbatches; B0, I0,
    W0, C0 likewise. waits: seconds per step in which the host waits for other ranks.
    """

    first: int
    last: int
    time: float
    seconds: Spread
    work: Mapping[str, Spread]
    waits: Spread

    @property
    def working_s(self) -> float:
        """Returns the seconds of work per step."""
        return sum(spread.median for location, spread in self.work.items() if location != DEVICE)

    @property
    def device_s(self) -> float:
        """Returns the seconds per step in which the host waits for its device, whose kernels may wait for other ranks."""
        return self.work.get(DEVICE, ZERO_SPREAD).median


@dataclass(frozen=True)
class Start:
    """Describes the rank that writes the file. time: seconds since the epoch. trained: the number of trainable elements in
    weights that this rank has at least in part.
    """

    rank: int
    world: int
    stage: int
    host: str
    pid: int
    device: str
    time: float
    trained: int = 0


@dataclass(frozen=True)
class WorkRecord:
    """Holds the record of one rank since its last start; `windows` are in ascending order."""

    start: Start
    windows: Sequence[Window]


def format_line(entry: Start | Window) -> str:
    """Returns a start or window as one line of the file."""
    head = {"format": FORMAT, "start": True} if isinstance(entry, Start) else {}
    return to_json({**head, **asdict(entry)}) + "\n"


def read_records(run_folder: Path) -> list[WorkRecord]:
    """Returns the records of all ranks of the newest start, in order of rank: a run may have been resumed with fewer ranks.
    Skips damaged lines. Raises OSError if a file cannot be read.
    """
    root = run_folder / WORK
    paths = root.glob("rank-*.jsonl") if root.is_dir() else ()
    records = [record for path in paths if (record := read_record(path)) is not None]
    newest = max((record.start for record in records), key=lambda start: start.time, default=None)
    return sorted(
        (record for record in records if newest is not None and record.start.rank < newest.world),
        key=lambda record: record.start.rank,
    )


def read_record(path: Path) -> WorkRecord | None:
    """Returns a rank's record since its last start, without windows that a resumed run repeated. Returns None
    without a start.
    """
    start: Start | None = None
    windows: list[Window] = []
    with path.open("rb") as file:
        for entry in _parse_lines(file):
            if isinstance(entry, Start):
                start, windows = entry, []
                continue
            while windows and windows[-1].last >= entry.first:  # the run was resumed, and repeats these steps
                windows.pop()
            windows.append(entry)
    return None if start is None else WorkRecord(start, windows)


@cache
def _type_adapters() -> tuple[TypeAdapter[Start], TypeAdapter[Window]]:
    return TypeAdapter(Start), TypeAdapter(Window)


def _parse_lines(lines: Iterable[bytes]) -> Iterator[Start | Window]:
    """Yields the starts and windows in `lines`; skips lines that cannot be read."""
    starts, windows = _type_adapters()
    for line in lines:
        try:
            content = json.loads(line)
            if content.pop("start", False):
                if content.pop("format") == FORMAT:
                    yield starts.validate_python(content)
            else:
                yield windows.validate_python(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue

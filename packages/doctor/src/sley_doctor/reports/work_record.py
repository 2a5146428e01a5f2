"""The record of each rank's work and waits: a file of lines per rank, in `work` of the run's folder, from which `train-cli
doctor` and a report find slow ranks. Imports no torch.

rank-1.jsonl      a start, then a window of steps per line; another start if the run was started again

Times are the host's: on CUDA the time to queue an action's kernels, not the time that they take.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from sley_core.json_text import to_json
from train_cli.run_folder import WORK

FORMAT = 1  # of these files; others are not read

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
"""Places of work that are no action of the list: the wait for the feed; the beginning of a step; sends and receives, as they
are started; the end of the gradients' reduction; norm, clip and optimizer; the wait for the device to have done a step, on CUDA
one for other ranks too; what comes between two steps (rows, checkpoints, listeners); evaluations."""


class Spread(NamedTuple):
    """Holds the quartiles of a number over steps."""

    low: float
    middle: float
    high: float


NOTHING = Spread(0.0, 0.0, 0.0)


class SeenMessage(NamedTuple):
    """Describes a message between stages, at one of its ends, in `step`: the `number`-th of its queue; at the sender only the
    last one that an action has sent.

    time_s: at the sender when it was handed over, at the receiver when it had arrived, in seconds since the epoch. waited_s:
    how long the receiver waited for it.
    """

    step: int
    number: int
    time_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Queue:
    """Describes a sequence of exchanges that the members `ranks` of a group start in one order. peer: of a message, the other
    end. exchanges, num_bytes: per step, on average, those in which this rank waited.
    """

    ranks: tuple[int, ...]
    peer: int | None = None
    exchanges: float = 0.0
    num_bytes: float = 0.0


class Usage(NamedTuple):
    """Holds the kernel's counters of the process over a window. system_s: time in the kernel. faults: page faults."""

    user_s: float
    system_s: float
    faults: float


@dataclass(frozen=True)
class Window:
    """Holds the measurements of steps `first` to `last`, from 1. time: when it was written, in seconds since the epoch.
    seconds: of a step.

    work: own seconds of a step by place, waits excluded: `F0` the forward of chunk 0, over all micro-batches, B0, I0, W0, C0
    likewise, and the places above. layers: for `F0` and the like, by layer, from every few steps. waits: seconds of a step by
    queue. sent, taken: messages of some steps by queue. private_mb, device_mb: MiB that the process holds now, on the host
    (private memory), and on its device.
    """

    first: int
    last: int
    time: float
    seconds: Spread
    work: Mapping[str, Spread]
    layers: Mapping[str, Mapping[str, Spread]]
    waits: Mapping[str, Spread]
    queues: Mapping[str, Queue]
    usage: Usage
    private_mb: float
    device_mb: float
    sent: Mapping[str, Sequence[SeenMessage]] = field(default_factory=dict)
    taken: Mapping[str, Sequence[SeenMessage]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class Start:
    """Describes the writer. time: in seconds since the epoch. trained: elements of the weights that this rank has, or has parts
    of, and trains. layers: by name, a text that is equal for layers of equal kind and sizes.
    """

    rank: int
    world: int
    stage: int
    host: str
    pid: int
    device: str
    time: float
    trained: int = 0
    layers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkRecord:
    """Holds what one rank has recorded since its last start; `windows` are in ascending order."""

    start: Start
    windows: Sequence[Window]

    def within(self, first: int, last: int) -> Sequence[Window]:
        """Returns the windows that have any of the steps `first` to `last`."""
        begin = bisect_left(self.windows, first, key=lambda window: window.last)
        return self.windows[begin : bisect_right(self.windows, last, key=lambda window: window.first)]


def line(one: Start | Window) -> str:
    """Returns a start or window as a line of the file."""
    head = {"format": FORMAT, "start": True} if isinstance(one, Start) else {}
    return to_json({**head, **asdict(one)}) + "\n"


def read(run_folder: Path) -> list[WorkRecord]:
    """Returns the records of the ranks, by rank: only of those in the newest start, since a run may be resumed with fewer.
    Damaged lines, as of a full disk, are skipped. Raises OSError if a file cannot be read.
    """
    root = run_folder / WORK
    paths = root.glob("rank-*.jsonl") if root.is_dir() else ()
    found = [record for path in paths if (record := record_in(path)) is not None]
    newest = max((one.start for one in found), key=lambda start: start.time, default=None)
    return sorted(
        (one for one in found if newest is not None and one.start.rank < newest.world), key=lambda one: one.start.rank
    )


def record_in(path: Path) -> WorkRecord | None:
    """Returns a rank's record since its last start, without windows that a resumed run repeats; None without a start."""
    start: Start | None = None
    windows: list[Window] = []
    with path.open("rb") as file:
        for one in _parsed(file):
            if isinstance(one, Start):
                start, windows = one, []
                continue
            while windows and windows[-1].last >= one.first:  # the run was brought back, and takes these steps again
                windows.pop()
            windows.append(one)
    return None if start is None else WorkRecord(start, windows)


def roundness(step: int) -> int:
    """Returns how often 2 divides the number of steps before `step`; for the first step more than for any other. Whoever keeps
    few of many steps keeps the roundest: so all ranks keep the same ones without communication.
    """
    before = step - 1
    return (before & -before).bit_length() - 1 if before else 64


@cache
def _readers() -> tuple[TypeAdapter[Start], TypeAdapter[Window]]:
    return TypeAdapter(Start), TypeAdapter(Window)


def _parsed(lines: Iterable[bytes]) -> Iterator[Start | Window]:
    """Yields the starts and windows in `lines`; skips lines that cannot be read."""
    starts, windows = _readers()
    for one in lines:
        try:
            content = json.loads(one)
            if content.pop("start", False):
                if content.pop("format") == FORMAT:
                    yield starts.validate_python(content)
            else:
                yield windows.validate_python(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue

"""What each rank worked at and waited for: a file of lines per rank, in `work` of the run's folder, by which `train-cli doctor`
and a report tell who is slow. Imports no torch.

rank-1.jsonl      a start, then a window of steps per line; another start where the run was started again

A time is that of the host: on CUDA what it took to queue an action's kernels, not what they took.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sley_core.metrics.json_text import to_json

FOLDER = "work"
FORMAT = 1
"""Of these files; others are not read."""

MOST_DETAILED = 240
"""Windows of a record whose layers and messages are read are no more than twice as many."""

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
    """The quartiles of a number over steps."""

    low: float
    middle: float
    high: float


NOTHING = Spread(0.0, 0.0, 0.0)


class SeenMessage(NamedTuple):
    """A message between stages, at one of its ends, in `step`: the `number`-th of its queue; at the sender the last one of
    what an action has sent.

    time_s: at the sender when it was handed over, at the receiver when it was there, in seconds since the epoch. waited_s: how
    long the receiver waited for it.
    """

    step: int
    number: int
    time_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Queue:
    """What members of a group start in one order. group: in words, as `stage[0, 1]`. peer: of a message, the other end.

    exchanges, num_bytes: of a step, on average, those that this rank waited in.
    """

    group: str
    ranks: tuple[int, ...]
    peer: int | None = None
    exchanges: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Usage:
    """What the kernel says of the process over a window. system_s: time in the kernel. minor, major: page faults without and
    with a read from a disk. switches: how often it lost its processor to others.
    """

    user_s: float
    system_s: float
    minor: int
    major: int
    switches: int

    def __sub__(self, before: Usage) -> Usage:
        """Returns what was used since `before`."""
        return Usage(
            round(self.user_s - before.user_s, 6),
            round(self.system_s - before.system_s, 6),
            self.minor - before.minor,
            self.major - before.major,
            self.switches - before.switches,
        )


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, from 1. time: when it was written, in seconds since the epoch. seconds: of a step.

    work: own seconds of a step by place, waits excluded: `F0` the forward of chunk 0, over all micro-batches, B0, D0, W0, C0
    likewise, and the places above. layers: of `F0` and its like, by layer, from every few steps. waits: seconds of a step by
    queue. sent, taken: messages of some steps by queue. private_mb, device_mb: MiB that the process holds now, on the host
    for itself alone, and on its device.
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
        """How many steps it has."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class Start:
    """Who writes. time: in seconds since the epoch. trained: elements of the weights that this rank has, or has parts of, and
    trains. layers: by name what is alike of layers that are: kind and sizes.
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
    """What one rank has left of its last start; `windows` ascend."""

    start: Start
    windows: Sequence[Window]

    def within(self, first: int, last: int) -> Sequence[Window]:
        """Returns the windows that have any of the steps `first` to `last`."""
        begin = bisect_left(self.windows, first, key=lambda window: window.last)
        return self.windows[begin : bisect_right(self.windows, last, key=lambda window: window.first)]


def line(one: Start | Window) -> str:
    """Returns a line of the file."""
    head = {"format": FORMAT, "start": True} if isinstance(one, Start) else {}
    return to_json({**head, **asdict(one)}) + "\n"


def read(run_folder: Path) -> list[WorkRecord]:
    """Returns the records of all ranks that have any, by rank: of those that the newest start has, since a run may go on with
    fewer. Lines that are damaged, as by a full disk, are left out. Raises OSError if a file cannot be read.
    """
    root = run_folder / FOLDER
    paths = root.glob("rank-*.jsonl") if root.is_dir() else ()
    found = [record for path in paths if (record := record_in(path)) is not None]
    newest = max((one.start for one in found), key=lambda start: start.time, default=None)
    return sorted(
        (one for one in found if newest is not None and one.start.rank < newest.world), key=lambda one: one.start.rank
    )


def record_in(path: Path) -> WorkRecord | None:
    """Returns what one rank has left in its file of its last start, if that is in it. Raises OSError."""
    with path.open("rb") as file:
        return _record_of(file)


def _record_of(lines: Iterable[bytes]) -> WorkRecord | None:
    """Builds the record from the lines of a file: windows that a resumed run repeats are replaced, old ones lose details.

    Returns None if no start was recorded.
    """
    start: Start | None = None
    windows: list[Window] = []
    for one in _parsed(lines):
        if isinstance(one, Start):
            start, windows = one, []
        else:
            while windows and windows[-1].last >= one.first:  # the run was brought back, and takes these steps again
                windows.pop()
            windows.append(one)
            if len(windows) % MOST_DETAILED == 0:
                windows = _with_some_details(windows)
    return None if start is None else WorkRecord(start, windows)


def _with_some_details(windows: list[Window]) -> list[Window]:
    """Returns `windows`, of which those have layers and messages that have the roundest steps: of all ranks about the same."""
    kept = [_roundest(one) for one in windows if one.layers or one.sent or one.taken]
    while len(kept) > MOST_DETAILED:
        least = min(kept)
        kept = [one for one in kept if one > least]
    least = min(kept, default=0)
    return [one if _roundest(one) >= least else replace(one, layers={}, sent={}, taken={}) for one in windows]


def _roundest(window: Window) -> int:
    return max(roundness(window.first), ((window.first - 1) ^ (window.last - 1)).bit_length() - 1)


def roundness(step: int) -> int:
    """Returns how often 2 divides the number of steps before `step`; of the first one more often than of any other.

    Who keeps few of many steps keeps the roundest, as others do without a word between them.
    """
    before = step - 1
    return (before & -before).bit_length() - 1 if before else 64


def _parsed(lines: Iterable[bytes]) -> Iterator[Start | Window]:
    """Yields the starts and windows in `lines`; skips lines that cannot be read."""
    for one in lines:
        try:
            content = json.loads(one)
            if content.pop("start", False):
                if content.pop("format") == FORMAT:
                    yield Start(**content)
            else:
                yield _window(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def _window(content: dict[str, Any]) -> Window:
    """Returns the window with the `content` of its JSON line."""

    def spreads(found: Mapping[str, Any]) -> dict[str, Spread]:
        return {name: Spread(*value) for name, value in found.items()}

    def messages(found: Mapping[str, Any]) -> dict[str, tuple[SeenMessage, ...]]:
        return {name: tuple(SeenMessage(*one) for one in some) for name, some in found.items()}

    content["seconds"] = Spread(*content["seconds"])
    content["work"], content["waits"] = spreads(content["work"]), spreads(content["waits"])
    content["layers"] = {place: spreads(some) for place, some in content["layers"].items()}
    content["queues"] = {
        name: Queue(**{**one, "ranks": tuple(one["ranks"])}) for name, one in content["queues"].items()
    }
    content["usage"] = Usage(**content["usage"])
    content["sent"], content["taken"] = messages(content["sent"]), messages(content["taken"])
    return Window(**content)

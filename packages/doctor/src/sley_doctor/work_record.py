"""Writes and reads the record of each rank's work and waits, from which `train-cli doctor` and `train-cli report` find slow
ranks. Each rank has a file of JSON lines in the folder `work` of the run. Imports no torch unless a run is recorded.

rank-1.jsonl      a start, then one window of steps per line; another start if the run was started again

    entered F0.0 ──> waited ──> entered B0.0 ... ──> entered "the beginning of the step" ──> a sample
    samples ──> after a while a window

Work is the time between two entries of the action list, without waits for other ranks. Recording an entry takes two reads of a
dict and one of the clock; everything else is computed when a window ends. A window has a twentieth of the steps so far, but at
least 8 and at most 256. So all ranks have windows of the same steps, and a million steps have about 4,000 windows.

Times are measured on the host. On CUDA, they include the launches of the kernels of an action, but not the runs of the kernels.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter

from sley_core.actions.action import Action, Transfer
from sley_core.json_text import to_json
from train_cli.run_folder import WORK

if TYPE_CHECKING:
    from sley_core.comm.exchanges import Turn
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts

FORMAT = 2  # the format version of the record files; starts in another version are not read


class Location(StrEnum):
    """Names the kinds of work that are not part of an action. DATA: the wait for the feed. BEGINNING: the beginning of the
    step, before its first action. MESSAGES: starting sends and receives. REDUCTION: the end of the reduction of gradients.
    UPDATE: norm, clipping and optimizer. DEVICE: the wait until the device has finished a step; on CUDA, the device may itself
    wait for other ranks. BETWEEN: the time between two steps, for metrics, checkpoints and listeners. EVALUATION: evaluations.
    """

    DATA = "data"
    BEGINNING = "beginning"
    MESSAGES = "messages"
    REDUCTION = "reduction"
    UPDATE = "update"
    DEVICE = "device"
    BETWEEN = "between"
    EVALUATION = "evaluation"


class Spread(NamedTuple):
    """The lower quartile, the median and the upper quartile of a quantity over steps."""

    low: float
    median: float
    high: float


ZERO_SPREAD = Spread(0.0, 0.0, 0.0)  # the spread of the time of work that a rank does not do


@dataclass(frozen=True)
class Window:
    """The measurements of steps `first` to `last`; the first step of a run is 1. time: when the window was written, in seconds
    since the epoch. seconds: the duration of a step. work: the time in seconds of work per step, by location, without waits for
    other ranks. The location of an action is its kind and chunk: `F0` is the forward of chunk 0, over all microbatches. waits:
    the time in seconds per step that the host waits for other ranks.
    """

    first: int
    last: int
    time: float
    seconds: Spread
    work: Mapping[str, Spread]
    waits: Spread

    @property
    def working_s(self) -> float:
        """Returns the time of work per step, in seconds, without the wait for the device."""
        return sum(spread.median for location, spread in self.work.items() if location != Location.DEVICE)

    @property
    def data_wait_s(self) -> float:
        """Returns the median time per step, in seconds, that the rank waits for its data."""
        return self.work.get(Location.DATA, ZERO_SPREAD).median

    @property
    def device_wait_s(self) -> float:
        """Returns the median time per step, in seconds, that the host waits for its device. This includes the time in which the
        device's kernels wait for other ranks.
        """
        return self.work.get(Location.DEVICE, ZERO_SPREAD).median


@dataclass(frozen=True)
class Start:
    """A record of the start of a rank in a run of `world` ranks. time: in seconds since the epoch. device: the type of the
    rank's device, such as "cuda". trained: the number of elements in the rank's trainable weights.
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
    """The work and the waits of one rank since its last start. windows: the measurements, in ascending order of steps."""

    start: Start
    windows: Sequence[Window]


def format_line(entry: Start | Window) -> str:
    """Returns a start or a window as one line of JSON, with its line break."""
    head = {"format": FORMAT, "start": True} if isinstance(entry, Start) else {}
    return to_json({**head, **asdict(entry)}) + "\n"


def read_records(run_folder: Path) -> list[WorkRecord]:
    """Returns the records of all ranks of the newest start, in order of rank. Omits ranks that only earlier starts had, and
    damaged lines. Raises OSError if a file cannot be read.
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
    """Returns a rank's record since its last start, or None if the file has no start or the last start has another format
    version. Omits windows whose steps a resumed run has repeated. Raises OSError if the file cannot be read.
    """
    start: Start | None = None
    windows: list[Window] = []
    with path.open("rb") as file:
        for entry in _parse_lines(file):
            if not isinstance(entry, Window):
                start, windows = entry, []
                continue
            while windows and windows[-1].last >= entry.first:  # the run was resumed, and repeats these steps
                windows.pop()
            windows.append(entry)
    return None if start is None else WorkRecord(start, windows)


_STARTS, _WINDOWS = TypeAdapter(Start), TypeAdapter(Window)  # validate the lines of a file


def _parse_lines(lines: Iterable[bytes]) -> Iterator[Start | Window | None]:
    """Yields the starts and windows in `lines`; None for a start of another format version. Skips damaged lines."""
    for line in lines:
        try:
            content = json.loads(line)
            if content.pop("start", False):
                yield _STARTS.validate_python(content) if content.pop("format") == FORMAT else None
            else:
                yield _WINDOWS.validate_python(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


WINDOW_SHARE = 1 / 20  # the number of steps in a window, as a share of the steps so far
MIN_WINDOW_STEPS, MAX_WINDOW_STEPS = 8, 256  # limits of the steps in a window; quartiles of fewer steps mean little


@contextmanager
def record_work(parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> Iterator[None]:
    """Records the steps of a run in a file in `folder`, the run's folder, while the block runs. Ranks do not wait for each
    other. feed: the feed for which the steps wait, or None. notes: the run's notes. If the file cannot be written, recording
    ends with a note.
    """
    start = Start(
        parts.world.rank,
        parts.world.size,
        parts.groups["pp"].coord,
        socket.gethostname(),
        os.getpid(),
        parts.world.device.type,
        time.time(),
        sum(entry.numel for entry in parts.registry.trainable),
    )
    recorder = WorkRecorder(parts, feed, WorkFile(folder / WORK / f"rank-{parts.world.rank}.jsonl", start, notes).write)
    recorder.attach()
    try:
        yield
    except BaseException:
        recorder.detach(write=False)  # a file system that hangs may have caused the error
        raise
    recorder.detach()


class WorkRecorder:
    """Measures the work and waits of this rank. feed: the feed for which the steps wait, or None. write_line: writes a line."""

    def __init__(self, parts: Parts, feed: Feed | None, write_line: Callable[[str], None]) -> None:
        self._progress = parts.groups.progress
        self._feed = feed
        self._write_line = write_line
        from sley_core.comm import exchanges

        self._beginning = exchanges.BEGINNING
        # The locations of known entries. `on_entry` adds actions, transfers, and other strings, which belong to an evaluation.
        self._locations: dict[object, str] = {
            exchanges.BEGINNING: Location.BEGINNING,
            exchanges.REDUCTION_END: Location.REDUCTION,
            exchanges.UPDATE: Location.UPDATE,
            exchanges.DEVICE_WAIT: Location.DEVICE,
            exchanges.BETWEEN_STEPS: Location.BETWEEN,
        }
        self._location: str = Location.BETWEEN
        self._entry_start = self._step_start = time.perf_counter()
        self._step = self._last = self._num_steps = self._num_window_steps = 0
        # The times in seconds of the current step: of work by location, and of the host's waits for other ranks.
        self._work_s, self._wait_s = defaultdict[str, float](float), 0.0
        self._samples: list[tuple[float, float, Mapping[str, float]]] = []  # seconds, waits and work of the window's steps

    def attach(self) -> None:
        """Sets the callbacks on the run's progress."""
        self._progress.step_progress.on_entry = self.on_entry
        self._progress.on_wait = self.on_wait

    def detach(self, *, write: bool = True) -> None:
        """Removes the callbacks. write: whether to write the last window."""
        if write:
            self.on_entry(self._beginning)
            self._write()
        self._progress.step_progress.on_entry = self._progress.on_wait = None

    def on_entry(self, entry: object) -> None:
        """Records the end of the previous entry and the start of `entry`."""
        time_s = time.perf_counter()
        self._work_s[self._location] += time_s - self._entry_start
        self._entry_start = time_s
        previous_location = self._location
        try:
            self._location = self._locations[entry]
        except KeyError:
            self._location = self._locations[entry] = _find_location(entry)
        if self._location == Location.BEGINNING:
            self._end_step(time_s, was_taken=previous_location in (Location.BETWEEN, Location.EVALUATION))

    def on_wait(self, turn: Turn, since: float) -> None:
        """Records the end of a wait in an exchange. since: the start of the wait by `time.perf_counter`, in seconds."""
        seconds = time.perf_counter() - since
        self._entry_start += seconds
        self._wait_s += seconds

    def _end_step(self, time_s: float, *, was_taken: bool) -> None:
        """Adds a sample of the previous step, if the step was completed (`was_taken`), and starts the next sample."""
        if was_taken and self._step:
            data_s = min(self._feed.wait_s if self._feed else 0.0, self._work_s[Location.BETWEEN])
            self._work_s[Location.BETWEEN] -= data_s
            self._work_s[Location.DATA] += data_s
            self._samples.append((time_s - self._step_start, self._wait_s, self._work_s))
            self._last = self._step
            self._num_steps += 1
            self._num_window_steps += 1
            if self._num_window_steps >= min(max(self._num_steps * WINDOW_SHARE, MIN_WINDOW_STEPS), MAX_WINDOW_STEPS):
                self._write()
        self._work_s, self._wait_s = defaultdict(float), 0.0
        self._step = self._progress.step_progress.step
        self._step_start = time_s

    def _write(self) -> None:
        """Writes all samples since the last window as a new window. Does nothing if there are none."""
        if not self._samples:
            return
        seconds, waits, works = zip(*self._samples, strict=True)
        locations = dict.fromkeys(location for work in works for location in work)
        work = {location: compute_quartiles(work.get(location, 0.0) for work in works) for location in locations}
        first = self._last - self._num_window_steps + 1
        window = Window(first, self._last, time.time(), compute_quartiles(seconds), work, compute_quartiles(waits))
        self._write_line(format_line(window))
        self._samples, self._num_window_steps = [], 0


def _find_location(entry: object) -> str:
    """Returns the location of an entry: kind and chunk of an action, MESSAGES for a transfer, EVALUATION for other entries."""
    if isinstance(entry, Action):
        return f"{entry.kind.value}{entry.chunk}"
    return Location.MESSAGES if isinstance(entry, Transfer) else Location.EVALUATION


def compute_quartiles(values: Iterable[float]) -> Spread:
    """Returns the quartiles of `values` without interpolation, rounded to 7 decimals. There must be at least one value."""
    ordered = sorted(values)
    return Spread(*(round(ordered[round((len(ordered) - 1) * share)], 7) for share in (0.25, 0.5, 0.75)))


class WorkFile:
    """Appends `start`, and then lines, to a file. If a write fails, adds the reason to `notes`, and writes no more. The file is
    created with its first line, so a run that fails earlier leaves a folder that the next run may use.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._notes = path, notes
        self._head = "\n" + format_line(start)  # also ends a line that an earlier start may have left incomplete
        self._is_over = False

    def write(self, text: str) -> None:
        """Appends `text`, a line with its line break. The first call also writes the start."""
        if self._is_over:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._head + text)
            self._head = ""
        except Exception as error:  # any error: a failure to record must not end the run
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._notes.append(f"slow ranks are not recorded: cannot write `{self._path}`: {reason}")
            self._is_over = True

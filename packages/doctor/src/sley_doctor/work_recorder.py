"""Records the work and the waits of this rank while it trains, in its file of the run's folder.

    entered F0.0 ──> waited ──> entered B0.0 ... ──> entered "the beginning of the step" ──> a sample
    samples ──> after a while a line of the file, see `work_record`

Work is the time between two entries of the action list, without waits for other ranks. An entry costs two reads of a dict and
one of the clock. Nothing is computed from samples until a window ends. A window has a twentieth of the steps so far, at least 8
and at most 256 steps, so that all ranks have the same windows, and a million steps have about 4,000.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.actions.action import Action, Transfer
from sley_core.comm import progress as entry_names
from sley_doctor.work_record import (
    BEGINNING,
    BETWEEN,
    DATA,
    DEVICE,
    EVALUATION,
    MESSAGES,
    REDUCTION,
    UPDATE,
    Spread,
    Start,
    Window,
    format_line,
)
from train_cli.run_folder import WORK

if TYPE_CHECKING:
    from sley_core.comm.progress import Turn
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts


WINDOW_SHARE = 1 / 20  # the steps of a window: their share of the steps so far, and limits
MIN_WINDOW_STEPS, MAX_WINDOW_STEPS = 8, 256  # quartiles of fewer steps mean little

_LOCATIONS = {
    entry_names.BEGINNING: BEGINNING,
    entry_names.REDUCTION: REDUCTION,
    entry_names.UPDATE: UPDATE,
    entry_names.DEVICE: DEVICE,
    entry_names.BETWEEN: BETWEEN,
}
"""The locations of entries that are strings. Any other string belongs to an evaluation."""


@contextmanager
def record_work(parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> Iterator[None]:
    """Records the steps of a run in its folder `folder` while the context is active. Ranks do not wait for each other.

    feed: the sample feed that a step waits for. notes: the run's notes. A file that cannot be written ends the
    recording and adds a note.
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
    file = WorkFile(folder / WORK / f"rank-{parts.world.rank}.jsonl", start, notes)
    recorder = WorkRecorder(parts, feed, file.add)
    recorder.attach()
    try:
        yield
    except BaseException:
        recorder.unhook()  # the file stays open: a file system that hangs may have caused the error
        raise
    try:
        recorder.detach()
    finally:
        file.close()


MAX_STEPS = 64  # steps kept per window; more steps hardly change the quartiles


class WorkRecorder:
    """Measures the work and the waits of a run. feed: the sample feed that a step waits for. add: writes a line
    to the file.
    """

    def __init__(self, parts: Parts, feed: Feed | None, add: Callable[[str], None]) -> None:
        self._progress = parts.groups.progress
        self._feed = feed
        self._add = add
        self._locations: dict[object, str] = {}  # by entry
        self._location = BETWEEN
        self._entry_start = self._step_start = time.perf_counter()
        self._step = self._last = self._num_steps = self._num_window_steps = 0
        # The current step: its seconds of work by location, and the seconds in which the host waits for other ranks.
        self._spent, self._wait_s = defaultdict[str, float](float), 0.0
        self._samples: list[tuple[float, float, Mapping[str, float]]] = []  # seconds, waits and work of the window's steps

    def attach(self) -> None:
        """Sets the callbacks on the run's progress."""
        self._progress.step_progress.follow = self.on_entry
        self._progress.follow_wait = self.on_wait

    def detach(self) -> None:
        """Removes the callbacks, and writes the last window."""
        self.on_entry(entry_names.BEGINNING)
        self.unhook()
        self._write()

    def unhook(self) -> None:
        """Removes the callbacks without writing the last window."""
        self._progress.step_progress.follow = self._progress.follow_wait = None

    def on_entry(self, entry: object) -> None:
        """Records the end of the previous entry and the start of `entry`."""
        time_s = time.perf_counter()
        self._spent[self._location] += time_s - self._entry_start
        self._entry_start = time_s
        previous_location = self._location
        try:
            self._location = self._locations[entry]
        except KeyError:
            self._location = self._locations[entry] = _location_name(entry)
        if self._location == BEGINNING:
            self._end_step(time_s, was_taken=previous_location in (BETWEEN, EVALUATION))

    def on_wait(self, turn: Turn, since: float) -> None:
        """Records the end of a wait in an exchange that began at time `since`."""
        seconds = time.perf_counter() - since
        self._entry_start += seconds
        self._wait_s += seconds

    def _end_step(self, time_s: float, *, was_taken: bool) -> None:
        """Ends the sample of the previous step, if that step was taken, and starts the next sample."""
        if was_taken and self._step:
            data_s = min(self._feed.wait_s if self._feed else 0.0, self._spent[BETWEEN])
            self._spent[BETWEEN] -= data_s
            self._spent[DATA] += data_s
            if len(self._samples) < MAX_STEPS:
                self._samples.append((time_s - self._step_start, self._wait_s, self._spent))
            self._last = self._step
            self._num_steps += 1
            self._num_window_steps += 1
            if self._num_window_steps >= min(max(self._num_steps * WINDOW_SHARE, MIN_WINDOW_STEPS), MAX_WINDOW_STEPS):
                self._write()
        self._spent, self._wait_s = defaultdict(float), 0.0
        self._step = self._progress.step_progress.step
        self._step_start = time_s

    def _write(self) -> None:
        """Writes the samples so far as a window; does nothing without samples."""
        if not self._samples:
            return
        seconds, waits, works = zip(*self._samples, strict=True)
        locations = dict.fromkeys(location for work in works for location in work)
        work = {location: compute_quartiles(work.get(location, 0.0) for work in works) for location in locations}
        first = self._last - self._num_window_steps + 1
        window = Window(first, self._last, time.time(), compute_quartiles(seconds), work, compute_quartiles(waits))
        self._add(format_line(window))
        self._samples, self._num_window_steps = [], 0


def _location_name(entry: object) -> str:
    """Returns the location of an action list entry: the type and chunk of an action, messages, or a phase."""
    if isinstance(entry, Action):
        return f"{entry.kind.value}{entry.chunk}"
    if isinstance(entry, Transfer):
        return MESSAGES
    return _LOCATIONS.get(str(entry), EVALUATION)


def compute_quartiles(values: Iterable[float]) -> Spread:
    """Returns the quartiles of one or more `values`, without interpolation."""
    ordered = sorted(values)
    return Spread(*(round(ordered[round((len(ordered) - 1) * share)], 7) for share in (0.25, 0.5, 0.75)))


class WorkFile:
    """Appends lines to a file without buffering, until a write fails; the reason is then added to `notes`.

    The file is created with the first line: a run that fails earlier leaves a folder that the next run may use. It need not be
    closed, since nothing is buffered.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._start, self._notes = path, start, notes
        self._file: int | None = None
        self._is_over = False

    def add(self, text: str) -> None:
        """Appends the line `text`."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._open()
                text = "\n" + format_line(self._start) + text  # ends a line that an earlier start may have written in part
            remaining = memoryview(text.encode())
            while remaining:
                assert self._file is not None, self._path
                remaining = remaining[os.write(self._file, remaining) :]
        except Exception as error:  # any error: a failure to record must not end the run
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._notes.append(f"slow ranks are not recorded: cannot write `{self._path}`: {reason}")
            self.close()

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        self._is_over = True
        file, self._file = self._file, None  # reset first: the descriptor is free even if `close` fails, and may be reused
        if file is not None:
            with suppress(OSError):  # a network file system may report a late failure here
                os.close(file)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # a link could redirect the writes
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_link, 0o644)

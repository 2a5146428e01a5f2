"""Records the work and the waits of this rank while it trains, in its file of the run's folder.

    entered F0.0 ──> waited ──> entered B0.0 ... ──> entered "the beginning of the step" ──> a sample
    samples ──> after a while a line of the file, see `work_record`

Work is the time between two entries of the action list, without waits for other ranks. An entry costs two reads of a dict and
one of the clock; so does a wait.
Nothing is computed from samples until a window ends. A window lasts a twentieth of the time so far, but at least half a second
and eight steps, and at most a quarter of an hour, so a month of training has about 3,000 windows.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
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
    ZERO_SPREAD,
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


WINDOW_SHARE, MIN_WINDOW_S, MAX_WINDOW_S = (1 / 20, 0.5, 900.0)  # length of a window: its share of the time so far, and limits
MIN_WINDOW_STEPS = 8  # quartiles of fewer steps mean little; a window of MAX_WINDOW_S may have fewer

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


class WorkRecorder:
    """Measures the work and the waits of a run. feed: the sample feed that a step waits for. add: writes a line
    to the file.
    """

    def __init__(self, parts: Parts, feed: Feed | None, add: Callable[[str], None]) -> None:
        self._progress = parts.groups.progress
        self._feed = feed
        self._add = add
        self._samples = WorkSamples()
        self._entries: dict[object, int] = {}
        self._spent = self._samples.spent
        self._location = self._between = self._samples.location_index(BETWEEN)
        self._data, self._beginning = self._samples.location_index(DATA), self._samples.location_index(BEGINNING)
        self._entry_start = self._start = self._window_start = self._step_start = time.perf_counter()
        self._to_epoch = time.time() - time.perf_counter()
        self._ends = {self._between, self._samples.location_index(EVALUATION)}
        self._step = self._last = 0

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
            self._location = self._entries[entry]
        except KeyError:
            self._location = self._entries[entry] = self._samples.location_index(_location_name(entry))
        if self._location == self._beginning:
            self._end_step(time_s, was_taken=previous_location in self._ends)

    def on_wait(self, turn: Turn, since: float) -> None:
        """Records the end of a wait in an exchange that began at time `since`."""
        seconds = time.perf_counter() - since
        self._entry_start += seconds
        self._samples.wait_s += seconds

    def _end_step(self, time_s: float, *, was_taken: bool) -> None:
        """Ends the sample of the previous step, if that step was taken, and starts the next sample."""
        if was_taken and self._step:
            data_s = min(self._feed.wait_s if self._feed else 0.0, self._spent[self._between])
            self._spent[self._between] -= data_s
            self._spent[self._data] += data_s
            self._samples.end_step(time_s - self._step_start)
            self._last = self._step
        else:
            self._samples.discard_step()
        steps, seconds = self._samples.num_steps, time_s - self._window_start
        is_long = seconds >= max((time_s - self._start) * WINDOW_SHARE, MIN_WINDOW_S) and steps >= MIN_WINDOW_STEPS
        if steps > 0 and (is_long or seconds >= MAX_WINDOW_S):
            self._write()
        self._spent = self._samples.spent
        self._step = self._progress.step_progress.step
        self._step_start = time_s

    def _write(self) -> None:
        """Writes the samples so far as a window; does nothing without samples."""
        if not self._samples.num_steps:
            return
        self._window_start = time.perf_counter()
        self._add(format_line(self._samples.build_window(self._last, self._window_start + self._to_epoch)))
        self._samples.start_window()


def _location_name(entry: object) -> str:
    """Returns the location of an action list entry: the type and chunk of an action, messages, or a phase."""
    if isinstance(entry, Action):
        return f"{entry.kind.value}{entry.chunk}"
    if isinstance(entry, Transfer):
        return MESSAGES
    return _LOCATIONS.get(str(entry), EVALUATION)


MAX_STEPS = 64  # steps kept per window; more steps hardly change the quartiles


class WorkSamples:
    """Collects the samples of a window. spent: seconds of the current step by location index, in a new list for each step.
    wait_s: seconds of the current step in which the host waits for other ranks. num_steps: the number of steps in the window.
    """

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.wait_s = 0.0
        self.num_steps = 0
        self._locations: dict[str, int] = {}
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def location_index(self, name: str) -> int:
        """Returns the index of the location `name`; adds it if it is new."""
        if name not in self._locations:
            self._locations[name] = len(self.spent)
            self.spent.append(0.0)
        return self._locations[name]

    def end_step(self, seconds: float) -> None:
        """Keeps the current step, which took `seconds`, as a sample."""
        self.num_steps += 1
        if self.num_steps <= MAX_STEPS:
            self._steps.append(self.spent)
            self._seconds.append(seconds)
            self._waits.append(self.wait_s)
        self.discard_step()

    def discard_step(self) -> None:
        """Discards the current step and starts a new one."""
        self.spent = [0.0] * len(self.spent)
        self.wait_s = 0.0

    def start_window(self) -> None:
        """Starts a new window; locations keep their indices."""
        self.num_steps = 0
        self._steps, self._seconds, self._waits = [], [], []

    def build_window(self, last: int, time_s: float) -> Window:
        """Returns the window of the samples, which end with step `last`. time_s: the time of writing."""
        work = {
            # A step is shorter than the list of locations if it is older than the location.
            name: compute_quartiles(step[index] if index < len(step) else 0.0 for step in self._steps)
            for name, index in self._locations.items()
        }
        seconds, waits = compute_quartiles(self._seconds), compute_quartiles(self._waits)
        return Window(last - self.num_steps + 1, last, time_s, seconds, work, waits)


def compute_quartiles(values: Iterable[float]) -> Spread:
    """Returns the quartiles of `values`, without interpolation."""
    ordered = sorted(values)
    last = len(ordered) - 1
    if last < 0:
        return ZERO_SPREAD
    return Spread(*(round(ordered[round(last * share)], 7) for share in (0.25, 0.5, 0.75)))


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

"""Collects the samples of a rank's window, and appends windows to its file (`work_record`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sley_doctor.reports.work_record import ZERO_SPREAD, Spread, Start, Window, format_line

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

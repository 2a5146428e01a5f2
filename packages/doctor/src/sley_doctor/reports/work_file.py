"""A rank's file of windows (`work_record`), with a limited number of lines, however long the run."""

from __future__ import annotations

import os
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread

from sley_core.json_text import write_whole
from sley_doctor.reports.work_merge import fewer
from sley_doctor.reports.work_record import Start, line, record_in

MOST_LINES = 512
"""Of a file; then neighbours among its older windows become one."""

PATIENCE_S = 1.0
"""For the end of a file whose run fails: its file system may hang, and be the reason."""

FEWER_LINES = 448
"""How many stay by then: windows of a long run have about as many steps each, and the next time is hours away."""


class WorkFile:
    """Appends lines to a file, each at once, until a write fails; then `notes` has the reason.

    The file is created with the first line: a run that fails before that leaves a folder that the next run may use. A thread
    shortens the file beside the steps of the run: that takes half a second of processor time if a rank has many layers.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._start, self._notes = path, start, notes
        self._file: int | None = None
        self._is_over = False
        self._num_lines = 0
        self._late = ""
        self._shortening: Future[int] | None = None

    def add(self, text: str) -> None:
        """Adds a line; while the file is being shortened, keeps it for the next write. Does not wait."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._open(with_start=True)
            self._late += text
            if self._shortening is None or self._shortening.done():
                self._write()
        except Exception as error:  # whatever it is: a run does not end because of its record
            self._give_up(error)

    def close(self) -> None:
        """Closes the file, after writing the lines that are kept; later lines are dropped."""
        if self._shortening is not None:
            wait([self._shortening])
        try:
            if not self._is_over and self._late:
                self._write(is_last=True)
        except Exception as error:
            self._give_up(error)
        self._end()

    def leave(self) -> None:
        """Closes the file as `close` does, but stops waiting after `PATIENCE_S`; the closing continues in a thread."""
        closing = Thread(target=self.close, name="sley-work-file", daemon=True)
        closing.start()
        closing.join(PATIENCE_S)

    def _give_up(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        self._notes.append(f"who is slow is not recorded: cannot write `{self._path}`: {reason}")
        self._end()

    def _end(self) -> None:
        self._is_over = True
        with suppress(OSError):  # what a network file system could not keep; nothing reads on from here
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None  # first: its number is free, and perhaps another's, also where this fails
        if file is not None:
            os.close(file)

    def _write(self, *, is_last: bool = False) -> None:
        """Writes the lines that are kept, and shortens the file if it has become long."""
        if self._shortening is not None:
            before, self._shortening = self._shortening, None
            self._num_lines = before.result()
            self._close_file()
            self._open()
        assert self._file is not None, "opened before anything is kept"
        left = memoryview(self._late.encode())
        while left:
            left = left[os.write(self._file, left) :]
        self._num_lines += self._late.count("\n")
        self._late = ""
        if self._num_lines > MOST_LINES and not is_last:
            self._shortening = Future()
            Thread(target=self._shorten, args=(self._shortening,), name="sley-work-file", daemon=True).start()

    def _shorten(self, done: Future[int]) -> None:
        """Rewrites the windows of this start, merging older ones. A reader sees either the old file or the new one."""
        try:
            found = record_in(self._path)
            if found is None:
                raise ValueError("the start that this rank wrote is gone")
            windows = fewer(found.windows, FEWER_LINES - 1)
            write_whole(self._path, "".join([line(found.start), *map(line, windows)]))
            done.set_result(1 + len(windows))
        except BaseException as error:
            done.set_exception(error)

    def _open(self, *, with_start: bool = False) -> None:
        """Opens the file for appending. with_start: the start of this run is written with the first line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # which could say where this writes
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_link, 0o644)
        if with_start:
            self._num_lines = self._path.read_bytes().count(b"\n")  # of earlier starts
            self._late = "\n" + line(self._start)  # behind a line that an earlier start has written in part

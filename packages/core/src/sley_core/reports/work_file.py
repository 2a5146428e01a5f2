"""A rank's file of windows (`work_record`), which has a number of lines at most, however long the run."""

from __future__ import annotations

import os
from pathlib import Path

from sley_core.metrics.json_text import write_whole
from sley_core.reports.work_merge import fewer
from sley_core.reports.work_record import Start, line, record_in

MOST_LINES = 512
"""Of a file; then neighbours among its older windows become one."""

FEWER_LINES = 448
"""How many stay by then: windows of a long run have about as many steps each, and the next time is hours away."""


class WorkFile:
    """A file to which lines are added, each at once, until one cannot be; `notes` then has why.

    It begins with the first one: a run that fails before that leaves a folder that the next run may take.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._start, self._notes = path, start, notes
        self._file: int | None = None
        self._is_over = False
        self._num_lines = 0

    def add(self, text: str) -> None:
        """Adds a line."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._opened()
                self._num_lines = self._path.read_bytes().count(b"\n")  # of earlier starts
                text = line(self._start) + text
            os.write(self._file, text.encode())
            self._num_lines += text.count("\n")
            if self._num_lines > MOST_LINES:
                self._shorten()
        except OSError as error:
            self.close()
            self._notes.append(f"who is slow is not recorded: cannot write `{self._path}`: {error.strerror or error}")

    def close(self) -> None:
        """Ends the file; what is added later is dropped."""
        self._is_over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _shorten(self) -> None:
        """Writes the windows of this start again, the older ones as fewer. A reader sees the old file or the new one."""
        found = record_in(self._path)
        assert found is not None, f"{self._path} has no start, and this rank has written one"
        windows = fewer(found.windows, FEWER_LINES - 1)
        write_whole(self._path, "".join([line(found.start), *map(line, windows)]))
        if self._file is not None:
            os.close(self._file)
        self._file = None  # which it stays if the next line fails
        self._file = self._opened()
        self._num_lines = 1 + len(windows)

    def _opened(self) -> int:
        no_link = getattr(os, "O_NOFOLLOW", 0)  # which could say where this writes
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_link, 0o644)

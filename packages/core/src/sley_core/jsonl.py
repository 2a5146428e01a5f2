"""Writes and reads the metrics file of a run: one JSON object per line. Imports no torch."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from sley_core.errors import RunError
from sley_core.json_text import to_json
from sley_core.plugin import JsonlConfig
from sley_core.protocols import MetricsWriter

METRICS = "metrics.jsonl"
"""The name of the metrics file in a run's folder."""


class JsonlWriter(MetricsWriter):
    """The metrics writer `core.jsonl`. When `write` returns, the row is in the file, so a killed run keeps its rows.

    Appends to an existing file, whose partial last line, if any, it ends first. Infinities and NaN become null.
    """

    def __init__(self, config: JsonlConfig, folder: Path) -> None:
        """Opens the file for appending. Raises RunError "metrics-file" if this fails."""
        self.path = folder / METRICS
        try:
            self._file = self.path.open("a+b", buffering=0)
            if not self._ends_with_newline():
                self._file.write(b"\n")
        except OSError as error:
            message = f"cannot open `{self.path}`: {error.strerror}"
            raise RunError("metrics-file", message, hint="set `[run] folder` to a writable folder") from error

    def write(self, row: Mapping[str, float | int]) -> None:
        """Appends one line in a single system call. Raises RunError "metrics-file" if this fails or the file was deleted."""
        line = (to_json(row) + "\n").encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise RunError("metrics-file", f"`{self.path}` was deleted while the run wrote to it")
            written = self._file.write(line)
        except OSError as error:
            raise RunError("metrics-file", f"cannot write to `{self.path}`: {error.strerror}") from error
        if written != len(line):
            raise RunError("metrics-file", f"cannot write to `{self.path}`: {written} of {len(line)} bytes were written")

    def rewind(self, step: int) -> None:
        """Truncates the file before the first row of a step after `step`. Raises RunError "metrics-file" if this fails."""
        try:
            end = 0
            with self.path.open("rb") as file:
                for line in file:
                    if _step_of(line) > step:
                        break
                    end += len(line)
            self._file.truncate(end)
        except OSError as error:
            raise RunError("metrics-file", f"cannot truncate `{self.path}` after step {step}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()

    def _ends_with_newline(self) -> bool:
        size = self._file.seek(0, 2)
        if size == 0:
            return True
        self._file.seek(size - 1)
        return self._file.read(1) == b"\n"


def read_rows(folder: Path) -> Iterator[dict[str, float | int]]:
    """Yields the rows of the metrics file in `folder`, if it exists. Skips invalid lines."""
    with suppress(FileNotFoundError), (folder / METRICS).open("rb") as file:
        yield from (json.loads(line) for line in file if _step_of(line))


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0

"""Metrics writers: a correct one, and some with one bug each."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sley_core.protocols import MetricsWriter

FILE = "numbers.txt"


class Naive(MetricsWriter):
    """Writes a line of JSON for each row."""

    mode = "a"

    def __init__(self, config, folder: Path) -> None:
        self.path = folder / FILE
        self.file = self.path.open(self.mode)

    def write(self, row: Mapping[str, float | int]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def rewind(self, step: int) -> None:
        self.file.close()
        lines = self.path.read_text().splitlines(keepends=True)
        self.path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
        self.file = self.path.open("a")

    def close(self) -> None:
        self.file.close()


class Begins(Naive):
    """Overwrites an existing file."""

    mode = "w"


class First(Naive):
    """Writes only the names of its first row, as in a table with a header."""

    names: tuple[str, ...] = ()

    def write(self, row: Mapping[str, float | int]) -> None:
        self.names = self.names or tuple(row)
        super().write({name: row[name] for name in self.names if name in row})


class Integers(Naive):
    """Truncates numbers to integers."""

    def write(self, row: Mapping[str, float | int]) -> None:
        super().write({name: int(value) if abs(value) < 1e9 else value for name, value in row.items()})


class Late(Naive):
    """Does not flush rows."""

    def write(self, row: Mapping[str, float | int]) -> None:
        self.file.write(json.dumps(row) + "\n")


class Deaf(Naive):
    """Ignores `rewind`."""

    def rewind(self, step: int) -> None:
        pass


class Once(Naive):
    """Raises in a second `close`."""

    def close(self) -> None:
        self.file.flush()
        self.file.close()
        del self.file


class Mute(Naive):
    """Ignores errors of a full disk."""

    def write(self, row: Mapping[str, float | int]) -> None:
        with suppress(OSError):
            super().write(row)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class Strict(Naive):
    """Omits rows with non-finite numbers."""

    def write(self, row: Mapping[str, float | int]) -> None:
        with suppress(ValueError):
            self.file.write(json.dumps(row, allow_nan=False) + "\n")
            self.file.flush()

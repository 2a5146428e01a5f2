"""A rank's file of windows: failures of its file system, and damaged lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sley_doctor.reports import work_file
from sley_doctor.reports.work_file import WorkFile
from sley_doctor.reports.work_record import Spread, Start, Window, format_line, read_records

START = Start(0, 1, 0, "here", 1, "cpu", 1.0)
STEPS = 10


def window(number: int, forward_s: float = 0.5, **changed: Any) -> Window:
    """The window number `number`, from 0, of as many steps as each."""
    first = number * STEPS + 1
    found = Window(
        first,
        first + STEPS - 1,
        float(number),
        Spread(1.0, 1.0, 1.0),
        work={"F0": Spread(forward_s, forward_s, forward_s)},
        waits=Spread(0.0, 0.1, 0.2),
    )
    return replace(found, **changed)


def written(folder: Path, numbers: range) -> Path:
    """The file of a rank that has written these windows."""
    path = folder / "work" / "rank-0.jsonl"
    notes: list[str] = []
    file = WorkFile(path, START, notes)
    for number in numbers:
        file.add(format_line(window(number)))
    file.close()
    assert notes == []
    return path


def test_a_line_that_was_written_in_part_costs_only_itself(tmp_path: Path) -> None:
    """The disk was full. What the next start wrote was taken for that of the one before."""
    path = written(tmp_path, range(2))
    path.write_bytes(path.read_bytes()[:-40])
    again = WorkFile(path, replace(START, host="there", time=2.0), [])
    again.add(format_line(window(5)))
    again.close()
    (found,) = read_records(tmp_path)
    assert (found.start.host, [one.first for one in found.windows]) == ("there", [51])


def test_a_system_that_takes_a_line_in_parts_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = work_file.os.write
    monkeypatch.setattr(work_file.os, "write", lambda file, data: write(file, data[:100]))
    written(tmp_path, range(2))
    (found,) = read_records(tmp_path)
    assert len(found.windows) == 2

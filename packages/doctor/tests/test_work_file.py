"""Tests the file of a rank's windows: failures of its file system, and damaged lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sley_doctor import work_recorder
from sley_doctor.work_record import Spread, Start, Window, format_line, read_records
from sley_doctor.work_recorder import WorkFile

START = Start(0, 1, 0, "here", 1, "cpu", 1.0)
STEPS = 10


def window(number: int, forward_s: float = 0.5, **changed: Any) -> Window:
    """Returns window `number`, from 0, of STEPS steps."""
    first = number * STEPS + 1
    default = Window(
        first,
        first + STEPS - 1,
        float(number),
        Spread(1.0, 1.0, 1.0),
        work={"F0": Spread(forward_s, forward_s, forward_s)},
        waits=Spread(0.0, 0.1, 0.2),
    )
    return replace(default, **changed)


def write_windows(folder: Path, numbers: range) -> Path:
    """Returns the file of a rank that has written these windows."""
    path = folder / "work" / "rank-0.jsonl"
    notes: list[str] = []
    file = WorkFile(path, START, notes)
    for number in numbers:
        file.add(format_line(window(number)))
    file.close()
    assert notes == []
    return path


def test_a_partly_written_line_is_skipped(tmp_path: Path) -> None:
    """A full disk cuts the last line; the next start begins a new line."""
    path = write_windows(tmp_path, range(2))
    path.write_bytes(path.read_bytes()[:-40])
    restarted = WorkFile(path, replace(START, host="there", time=2.0), [])
    restarted.add(format_line(window(5)))
    restarted.close()
    (record,) = read_records(tmp_path)
    assert (record.start.host, [window.first for window in record.windows]) == ("there", [51])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = work_recorder.os.write
    monkeypatch.setattr(work_recorder.os, "write", lambda file, data: write(file, data[:100]))
    write_windows(tmp_path, range(2))
    (record,) = read_records(tmp_path)
    assert len(record.windows) == 2

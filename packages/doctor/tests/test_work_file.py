"""A rank's record of a long run: its file stays short, and says of old steps what its many windows said."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sley_doctor.reports import work_file
from sley_doctor.reports.work_file import MAX_LINES, MAX_MESSAGES, WorkFile, merge_old_windows, merge_windows
from sley_doctor.reports.work_record import (
    MessageRecord,
    Queue,
    Spread,
    Start,
    Usage,
    Window,
    format_line,
    read_records,
    roundness,
)

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
        layers={"F0": {"head": Spread(0.1, 0.2, 0.3)}},
        waits={"all main": Spread(0.0, 0.1, 0.2)},
        queues={"all main": Queue((0, 1), None, 1.0, 48.0)},
        usage=Usage(1.0, 0.5, 11),
        private_mb=float(number),
        device_mb=0.0,
        sent={"pp up 0>1": [MessageRecord(step, 1, float(step)) for step in range(first, first + STEPS, 4)]},
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


def test_a_run_that_fails_does_not_wait_for_a_file_system_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the reason, which is told after this."""
    may_close, is_closed = Event(), Event()

    def hangs(*_: Any) -> None:
        assert may_close.wait(20)
        is_closed.set()

    file = WorkFile(tmp_path / "work" / "rank-0.jsonl", START, [])
    file.add(format_line(window(0)))
    with monkeypatch.context() as patched:
        patched.setattr(work_file, "CLOSE_TIMEOUT_S", 0.1)
        patched.setattr(work_file.os, "close", hangs)
        file.abandon()
        assert not is_closed.is_set()
        may_close.set()
        assert is_closed.wait(20)


def test_a_file_that_somebody_else_empties_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "work" / "rank-0.jsonl"
    file = WorkFile(path, START, notes)
    for number in range(MAX_LINES - 10):
        file.add(format_line(window(number)))
    path.write_bytes(b"")
    for number in range(20):
        file.add(format_line(window(number)))
    file.close()
    assert notes == [f"slow ranks are not recorded: cannot write `{path}`: the start that this rank wrote is missing"]


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


def test_a_file_of_a_long_run_stays_short_and_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_LINES // 4
    monkeypatch.setattr(work_file, "MAX_LINES", most)
    monkeypatch.setattr(work_file, "SHORTENED_LINES", work_file.SHORTENED_LINES // 4)
    path = written(tmp_path, range(3 * most))
    assert path.read_bytes().count(b"\n") <= most
    (found,) = read_records(tmp_path)
    steps = [(one.first, one.last) for one in found.windows]
    assert steps[0][0] == 1
    assert steps[-1][1] == 3 * most * STEPS
    assert all(before[1] + 1 == after[0] for before, after in pairwise(steps)), "none is missing"
    assert [one.num_steps for one in found.windows[-12:]] == [STEPS] * 12, "the newest are as they were written"
    assert sum(one.usage.faults for one in found.windows) == 3 * most * 11
    assert found.start == START


def test_what_earlier_starts_have_left_counts_and_goes_first(tmp_path: Path) -> None:
    written(tmp_path, range(MAX_LINES - 10))
    path = written(tmp_path, range(20))
    assert path.read_bytes().count(b"\n") <= 21
    (found,) = read_records(tmp_path)
    assert len(found.windows) == 20


def test_a_window_of_many_says_what_they_said() -> None:
    """Means over steps, of the windows that have a number; sums of what was used; the roundest messages."""
    silent = replace(window(1, 0.2, layers={}, sent={}, queues={}), last=25)
    found = merge_windows([window(0, 0.5), silent])
    assert (found.first, found.last, found.time, found.private_mb) == (1, 25, 1.0, 1.0)
    assert found.work["F0"].median == pytest.approx((0.5 * 10 + 0.2 * 15) / 25)
    assert found.layers["F0"]["head"] == Spread(0.1, 0.2, 0.3)
    assert found.waits["all main"] == Spread(0.0, 0.1, 0.2)
    assert found.queues["all main"].num_bytes == 48.0
    assert found.usage == Usage(2.0, 1.0, 22)
    many = merge_windows([window(number) for number in range(100)]).sent["pp up 0>1"]
    kept = {one.step for one in many}
    every = {message.step for number in range(100) for message in window(number).sent["pp up 0>1"]}
    assert len(every) > MAX_MESSAGES >= len(many)
    roundest = {step for step in every if roundness(step) >= 4}
    assert roundest < kept, "those that the other end keeps too"


def test_older_windows_get_alike_in_steps() -> None:
    """Those of a run's first seconds have few, and long ones that were made before have many."""
    found = merge_old_windows([*(window(number) for number in range(60)), *(window(number) for number in range(60, 90))], 30)
    assert len(found) <= 30
    assert [one.num_steps for one in found[-3:]] == [STEPS] * 3
    assert {one.num_steps for one in found[:-3]} <= {3 * STEPS, 4 * STEPS}


def test_a_file_that_cannot_be_made_short_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work_file, "write_atomically", full)
    notes: list[str] = []
    file = WorkFile(tmp_path / "work" / "rank-0.jsonl", START, notes)
    for number in range(MAX_LINES + 5):
        file.add(format_line(window(number)))
    file.close()
    assert len(notes) == 1
    assert "No space left on device" in notes[0]
    assert len(read_records(tmp_path)[0].windows) >= MAX_LINES - 1, "what was there stays"

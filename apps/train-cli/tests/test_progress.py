"""Progress as lines, as one line, and the closing summary."""

from __future__ import annotations

import io
import re

import pytest

from train_cli.progress import Reporter, closing, draws_line, duration, memory, rate


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **more: float) -> dict[str, float | int]:
    return {"step": step, "loss": 2.4128, "tokens_per_s": 8123.0, "memory_mb": 31949.0, **more}


def reported(num_steps: int, log_every: int, *, line: bool = False) -> str:
    stream = io.StringIO()
    with Reporter(num_steps, log_every, line=line, stream=stream) as reporter:
        for step in range(1, num_steps + 1):
            reporter(row(step))
    return stream.getvalue()


def test_lines_come_every_so_often_and_at_the_end() -> None:
    lines = reported(25, 10).splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert re.fullmatch(r"step 10/25  loss 2\.413  8\.1k tok/s  31\.2 GiB  0s left", lines[0]), lines[0]


def test_the_first_step_foretells_nothing() -> None:
    assert reported(5, 1).splitlines()[0] == "step 1/5  loss 2.413  8.1k tok/s  31.2 GiB"


def test_a_held_out_loss_is_shown() -> None:
    stream = io.StringIO()
    Reporter(10, 1, line=False, stream=stream)(row(1, held_out_loss=2.5))
    assert "loss 2.413  held-out 2.500" in stream.getvalue()


def test_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Reporter(3, 1, line=True, stream=stream) as reporter:
        for step in (1, 2, 3):
            reporter(row(step))
    assert "step 3/3" in stream.getvalue()
    assert "\x1b[2K" in stream.getvalue()


@pytest.mark.parametrize("line", [True, False])
def test_what_a_run_notes_is_shown_when_it_comes(monkeypatch: pytest.MonkeyPatch, line: bool) -> None:
    """Once, and not what was said before the first step."""
    monkeypatch.setenv("TERM", "xterm")
    stream, notes = Terminal(), ["of before"]
    with Reporter(3, 9, line=line, notes=notes, stream=stream) as reporter:
        reporter(row(1))
        notes.append("no [room] left")
        reporter(row(2))
        assert "no [room] left" in stream.getvalue()
        notes.append("after the last step")
    assert [stream.getvalue().count(note) for note in ("of before", "no [room] left", "after the last step")] == [0, 1, 1]
    assert reporter.new_notes == notes[1:]


class Broken(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the pipe is closed")


@pytest.mark.parametrize("line", [True, False])
def test_a_stream_that_takes_no_more_ends_nothing(monkeypatch: pytest.MonkeyPatch, line: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Reporter(3, 1, line=line, stream=stream) as reporter:
        reporter(row(1))
        stream.close()
        reporter(row(2))
        reporter(row(3))
    assert reporter.lost is not None
    assert reporter.lost.startswith("progress was not shown from step ")
    broken = Reporter(3, 1, line=False, stream=Broken())
    broken(row(1))
    assert broken.lost == "progress was not shown from step 1 on: the pipe is closed"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("SLEY_NO_PROGRESS", "1"), ("TERM", "dumb")])
def test_plain_output_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for other in ("NO_COLOR", "SLEY_NO_PROGRESS"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert draws_line(Terminal())
    assert not draws_line(io.StringIO())
    assert not draws_line(Terminal(), wanted=False)
    monkeypatch.setenv(name, value)
    assert not draws_line(Terminal())


def test_numbers_as_people_read_them() -> None:
    rates = [rate({"tokens_per_s": value}) for value in (812.3, 8123, 1.31e6)]
    assert rates == ["812 tok/s", "8.1k tok/s", "1.3M tok/s"]
    assert [rate({"tokens_per_s": None, "samples_per_s": value}) for value in (0.314, 31.4)] == [
        "0.31 samples/s",
        "31 samples/s",
    ]
    assert [memory(value) for value in (812.0, 31949.0)] == ["812 MiB", "31.2 GiB"]
    assert [duration(value) for value in (7.6, 62, 11100)] == ["8s", "1m 02s", "3h 05m"]


SUMMARY = {
    "outcome": "finished",
    "steps": 200,
    "skipped_steps": 0,
    "seconds": 58.4,
    "final_loss": 2.41,
    "mean_loss_last_20": 2.43,
    "held_out_loss": 2.5,
    "tokens_per_s": 14100.0,
    "counts": {"mine.handler": {"kept": 3, "sent_bytes_per_step": 39321600}},
}


def test_the_closing_lines() -> None:
    first, *lines = closing(SUMMARY, "runs/small").splitlines()
    assert first == "finished: 200 steps in 58s"
    assert closing({**SUMMARY, "skipped_steps": 2}, "x").startswith("finished: 200 steps, 2 of them skipped in 58s\n")
    assert [line.split("  ")[1].strip() for line in lines] == ["loss", "held-out loss", "speed", "run folder"]
    assert "2.4100  (mean of the last 20: 2.4300)" in lines[0]
    *_, counted, kept, sent = closing(SUMMARY, "runs/small", verbose=True).splitlines()
    assert [counted, kept] == ["  mine.handler counted", "    kept                 3"]
    assert sent == "    sent_bytes_per_step  39,321,600"


def test_the_mean_is_of_the_steps_that_there_were() -> None:
    assert "(mean of the last 3: 2.4300)" in closing({**SUMMARY, "steps": 3}, "runs/small")
    assert "mean" not in closing({**SUMMARY, "steps": 1}, "runs/small")


def test_a_run_without_a_step_has_no_numbers_to_close_with() -> None:
    none = {**dict.fromkeys(SUMMARY), "outcome": "failed", "steps": 0, "seconds": 0.0}
    assert closing(none, "runs/small") == "failed: 0 steps in 0s\n  run folder     runs/small"

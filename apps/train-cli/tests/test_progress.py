"""The output of a run: its size, progress, closing lines and `summary.json`."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sley_core.json_text import to_json, write_json
from sley_core.plan.tables import BestTable
from sley_core.run_state.best import Best
from train_cli.progress import (
    CompileNote,
    Reporter,
    RunInfo,
    RunTotals,
    UnsavedNote,
    closing,
    draws_line,
    duration,
    opening,
    rate,
    repeats,
    summary,
)

SIZES = {"parameters": 1056896, "trained": 1056896, "samples_per_step": 16, "samples_per_epoch": 4352, "tokens_per_sample": 256}
FACTS = RunInfo("quickstart", "cpu", 2, {"core": "sley-core 0.1.0"}, {"torch": "2.13.0"}, **SIZES)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "SLEY_NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


def row(step: int, **more: float) -> dict[str, float | int]:
    return {"step": step, "loss": 2.4128, "tokens_per_s": 8123.0, "memory_mb": 31949.0, **more}


def rows(num_steps: int) -> list[dict[str, float | int]]:
    return [{"step": step, "loss": 6.0 - step / 8, "tokens": 512, "seconds": 0.25} for step in range(1, num_steps + 1)]


def test_lines_come_every_so_often_and_at_the_end() -> None:
    stream = io.StringIO()
    with Reporter(25, 10, line=False, stream=stream) as reporter:
        for step in range(1, 26):
            reporter(row(step, held_out_loss=2.5, **{"held_out/accuracy": 0.5, "held_out/wiki/loss": 3.0}))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0] == "step 10/25  loss 2.413  held-out 2.500  wiki 3.000  8.1k tok/s  31.2 GiB  0s left"


@pytest.mark.parametrize("line", [True, False])
def test_notes_of_the_run_are_shown_once_when_they_come(line: bool) -> None:
    stream, notes = Terminal(), ["of before"]
    with Reporter(3, 9, line=line, notes=notes, stream=stream) as reporter:
        reporter(row(1))
        notes.append("no [room] left")
        reporter(row(3))
        assert "no [room] left" in stream.getvalue()
        notes.append("after the last step")
    assert [stream.getvalue().count(note) for note in ("of before", *notes[1:])] == [0, 1, 1]
    assert reporter.new_notes == notes[1:]
    assert ("\x1b[2K" in stream.getvalue()) == line, "one line is redrawn"


@pytest.mark.parametrize(("seconds", "told_at"), [(0.31, 5), (0.29, None), (200.0, 2)])
def test_a_long_run_without_checkpoints_says_so_once(seconds: float, told_at: int | None) -> None:
    """A thousand steps, of which the first takes a minute and does not count, and a second of them is timed first."""
    notes: list[str] = []
    note = UnsavedNote(1000, notes)
    num_notes = []
    for step in range(1, 10):
        note({"step": step, "seconds": 60.0 if step == 1 else seconds})
        num_notes.append(len(notes))
    assert num_notes == [int(told_at is not None and step >= told_at) for step in range(1, 10)]
    assert all("about 5m 10s" in text or "about 55h 30m" in text for text in notes), notes


def test_a_late_compilation_is_noted() -> None:
    notes: list[str] = []
    num_graphs = iter([3, 4, 4, 4, 6])
    note = CompileNote(notes, lambda: next(num_graphs))
    for step in range(1, 6):
        note({"step": step, "seconds": 2.0})
    assert notes == ["step 5 compiled 2 more graphs, which took part of its 2.0 s; TORCH_LOGS=recompiles prints the reasons"]


@pytest.mark.parametrize("line", [True, False])
def test_a_stream_that_takes_no_more_ends_nothing(line: bool) -> None:
    stream = Terminal()
    with Reporter(3, 1, line=line, stream=stream) as reporter:
        reporter(row(1))
        stream.close()
        reporter(row(3))
    assert reporter.write_error is not None
    assert reporter.write_error.startswith("progress was not shown after step ")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("SLEY_NO_PROGRESS", "1"), ("TERM", "dumb")])
def test_plain_output_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert (draws_line(Terminal()), draws_line(io.StringIO()), draws_line(Terminal(), is_allowed=False)) == (True, False, False)
    monkeypatch.setenv(name, value)
    assert not draws_line(Terminal())


def test_numbers_as_people_read_them() -> None:
    rates = [rate({"tokens_per_s": value}) for value in (812.3, 8123, 1.31e6)]
    assert rates == ["812 tok/s", "8.1k tok/s", "1.3M tok/s"]
    assert rate({"tokens_per_s": None, "samples_per_s": 0.314, "tflops": None, "mfu": None}) == "0.31 samples/s"
    assert rate({"tokens_per_s": 9.0, "tflops": 0.0513}) == "9 tok/s  51 GFLOP/s"
    assert rate({"tokens_per_s": 812.3, "tflops": 412.4, "mfu": 0.4168}) == "812 tok/s  412 TFLOP/s  41.7% MFU"
    assert [duration(value) for value in (7.6, 62, 11100)] == ["8s", "1m 02s", "3h 05m"]


def test_the_opening_says_how_large_the_run_is() -> None:
    held = {"weights": 4 << 20, "masters": 0, "gradients": 3 << 30}
    plan: Any = SimpleNamespace(
        run=SimpleNamespace(steps=160),
        metrics=[SimpleNamespace(name="metrics.tensorboard")],
        model=SimpleNamespace(config=SimpleNamespace(compile=True)),
    )
    assert opening(FACTS, plan, held).splitlines() == [
        "2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)",
        "rank 0 has 4.0 MiB weights, 3.0 GiB gradients, and after the first step also the optimizer states",
        "memory below is the peak of rank 0's whole process, libraries included",
        "the first step also compiles the layers, which may take minutes",
        "no metrics.jsonl: [[metrics]] lists `metrics.tensorboard`, and not `core.jsonl`",
    ]
    unknown = RunInfo("small", "NVIDIA H100", 1, parameters=9, trained=8, samples_per_step=16)
    assert opening(unknown, plan, held).startswith("1 rank, 8 of 9 parameters trained, 160 steps of 16 samples\n")


@pytest.mark.parametrize(
    ("num_samples", "words"), [(None, ""), (32, ""), (20, "steps = 2` to use each once"), (1, "a batch needs 8")]
)
def test_samples_that_an_evaluation_uses_again_are_named(num_samples: int | None, words: str) -> None:
    plan: Any = SimpleNamespace(evaluation=SimpleNamespace(steps=4), batch=SimpleNamespace(global_size=8))
    note = repeats(num_samples, plan)
    assert words in note
    assert bool(note) == bool(words)


def test_the_summary_of_a_finished_run(tmp_path: Path) -> None:
    steps = rows(40)
    steps[19]["held_out_loss"] = 3.75
    steps[39] |= {"held_out_loss": 1.5, "held_out/accuracy": 0.25, "held_out/wiki/loss": 1.75, "memory_mb": 31.5}
    for each in steps:
        each |= {"trained_tokens": 500, "tflops": 200.0 if each["step"] <= 20 else 100.0, "mfu": 0.25}
    steps[4]["held_out/exact"] = None  # NaN, in a file
    totals = RunTotals(steps[:10])  # of a run that was resumed
    for each in steps[10:]:
        totals.add(each)
    assert len(totals.losses) == 20, "it does not grow with the run"
    best = Best(BestTable(metric="held_out_loss"), 2)
    best.add(20, steps[19])
    content = summary(FACTS, "finished", totals, {"mine.handler": {"kept": 3}}, {"weights": 4000}, (), best, "it is bad")
    assert content == {
        "name": "quickstart",
        "outcome": "finished",
        "steps": 40,
        "skipped_steps": 0,
        "final_loss": 1.0,
        "mean_loss_last_20": sum(6.0 - step / 8 for step in range(21, 41)) / 20,
        "held_out_loss": 1.5,
        "evaluation": {"held_out/accuracy": 0.25, "held_out/wiki/loss": 1.75},
        "best": {"metric": "held_out_loss", "value": 3.75, "step": 20},
        "stopped_early": "it is bad",
        "tokens": 40 * 512,
        "trained_tokens": 40 * 500,
        "seconds": 10.0,
        "tokens_per_s": 2048.0,
        "samples": 640,
        "samples_per_s": 64.0,
        "tflops": 150.0,
        "mfu": 0.25,
        "epochs": 640 / 4352,
        "parameters": 1056896,
        "trained_parameters": 1056896,
        "memory_bytes": {"weights": 4000},
        "memory_mb": 31.5,
        "world": 2,
        "device": "cpu",
        "plugins": {"core": "sley-core 0.1.0"},
        "versions": {"torch": "2.13.0"},
        "counts": {"mine.handler": {"kept": 3}},
        "notes": [],
    }
    assert closing(content, "runs/small", verbose=True).splitlines() == [
        "finished: 40 steps in 10s, early: it is bad",
        "  loss           1.0000  (mean of the last 20: 2.1875)",
        "  held-out loss  1.5000",
        "  held_out/accuracy   0.2500",
        "  held_out/wiki/loss  1.7500",
        "  best           3.7500 (held_out_loss), from step 20",
        "  speed          2.0k tok/s  150 TFLOP/s  25.0% MFU",
        "  run folder     runs/small",
        "  mine.handler counted",
        "    kept  3",
    ]


def test_the_summary_of_odd_runs() -> None:
    steps = rows(4)
    steps[3] |= {"loss": math.nan, "skipped": 1}
    skipped = summary(FACTS, "finished", RunTotals(steps))
    assert (skipped["skipped_steps"], skipped["final_loss"], skipped["mean_loss_last_20"]) == (1, steps[2]["loss"], 5.75)
    assert closing(skipped, "x").startswith("finished: 4 steps, 1 of them skipped in 1s\n")
    frames = [{"step": step, "loss": 1.0, "samples": 4, "seconds": 0.25} for step in (1, 2)]
    content = summary(FACTS, "finished", RunTotals(frames))
    assert (content["tokens"], content["tokens_per_s"], content["samples_per_s"]) == (0, None, 64.0)
    none = summary(FACTS, "failed", RunTotals())
    unknown = ("final_loss", "mean_loss_last_20", "held_out_loss", "tokens_per_s", "samples_per_s", "tflops", "mfu")
    assert [none[key] for key in unknown] == [None] * 7
    assert closing(none, "runs/small") == "failed: 0 steps in 0s\n  run folder     runs/small"


def test_a_file_is_written_in_full_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_json(tmp_path / "summary.json", {"steps": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "summary.json", [object()])
    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "summary.json", {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert to_json({"a": [math.inf, (1.5, math.nan)]}) == '{"a": [null, [1.5, null]]}'

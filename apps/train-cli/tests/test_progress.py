"""The output of a run: its size, progress, closing lines and `summary.json`."""

import io
import math
import platform
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sley_core.plan.tables import KeepBestTable
from sley_core.plugin import JsonlConfig
from sley_core.run_folder import JsonlWriter, read_rows
from sley_trainer.evaluation import BestEvaluation
from train_cli import rank
from train_cli.console import (
    ProgressReporter,
    describe_repetition,
    format_duration,
    format_header,
    format_speed,
    format_summary,
)
from train_cli.rank import RunTotals, summarize_run


def fake_run(num_samples: int | None = 4352, **changes: Any) -> Any:
    """Returns the parts of a run that are shown. num_samples: of the data; None for a stream without tokens."""
    plan = SimpleNamespace(
        run=SimpleNamespace(name="quickstart", steps=160),
        batch=SimpleNamespace(global_size=16),
        model=SimpleNamespace(config=SimpleNamespace(compile=True)),
        averaging=SimpleNamespace(name="optim.ema"),
        plugins={"core": SimpleNamespace(dist="sley-core", version="0.1.0")},
    )
    content = {
        "plan": plan,
        "world": SimpleNamespace(size=2, device="cpu"),
        "num_parameters": 1056896,
        "num_trained": 1056896,
        "feed": SimpleNamespace(num_samples=num_samples),
        "dataset": SimpleNamespace(info=SimpleNamespace(sequence=num_samples and 256)),
        "samples": SimpleNamespace(meter=SimpleNamespace(unit="tokens")),
        "memory": SimpleNamespace(bytes={"weights": 4000}),
        "counts": {"mine.handler": {"kept": 3}},
        "best": None,
        "stopped_early": "",
    }
    return SimpleNamespace(**content | changes)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def row(step: int, **more: float) -> dict[str, float | int]:
    return {"step": step, "loss": 2.4128, "tokens_per_s": 8123.0, "memory_mb": 31949.0, **more}


def rows(num_steps: int) -> list[dict[str, float | int]]:
    return [{"step": step, "loss": 6.0 - step / 8, "tokens": 512, "seconds": 0.25} for step in range(1, num_steps + 1)]


def total(steps: list[dict[str, float | int]]) -> RunTotals:
    totals = RunTotals()
    for step_row in steps:
        totals.add(step_row)
    return totals


def test_lines_are_printed_every_log_every_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    with ProgressReporter(25, 10, stream=stream) as reporter:
        for step in range(1, 26):
            reporter(row(step, held_out_loss=2.5, **{"held_out/accuracy": 0.5, "held_out/wiki/loss": 3.0}))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0] == "step 10/25  loss 2.413  held-out 2.500  wiki 3.000  8.1k tok/s  31.2 GiB  0s left"


def test_graphs_are_counted_and_a_late_recompilation_is_noted_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    reasons: dict[str, str] = {}
    monkeypatch.setattr(rank, "count_graphs", lambda: 3)
    monkeypatch.setattr(rank, "recompile_reasons", lambda: reasons)
    read_row = rank.make_compile_reader(notes)
    for step, compile_id in enumerate(["", "0/1", "", "", "0/2"], start=1):
        reasons |= {compile_id: f"guard of {compile_id}"} if compile_id else {}
        read_row({"step": step, "seconds": 2.0})
    assert notes == ["the first step compiled 3 graphs, in 2s", "step 5 compiled again, since a guard failed: guard of 0/2"]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_new_notes_are_printed_once(stream: io.StringIO) -> None:
    notes = ["an earlier note"]
    with ProgressReporter(3, 9, notes, stream) as reporter:
        reporter(row(1))
        notes.append("no [room] left")
        reporter(row(3))
        assert "no [room] left" in stream.getvalue()
        notes.append("after the last step")
    assert [stream.getvalue().count(note) for note in ("an earlier note", *notes[1:])] == [0, 1, 1]
    assert reporter.new_notes == notes[1:]
    assert ("\x1b[2K" in stream.getvalue()) == stream.isatty(), "one line is redrawn"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_closed_stream_does_not_end_the_run(stream: io.StringIO) -> None:
    with ProgressReporter(3, 1, stream=stream) as reporter:
        reporter(row(1))
        stream.close()
        reporter(row(3))


def test_rates_and_durations_have_units() -> None:
    rates = [format_speed({"tokens_per_s": value}) for value in (812.3, 8123, 1.31e6)]
    assert rates == ["812 tok/s", "8.1k tok/s", "1.3M tok/s"]
    assert format_speed({"tokens_per_s": None, "samples_per_s": 0.314, "tflops": None, "mfu": None}) == "0.31 samples/s"
    assert format_speed({"tokens_per_s": 9.0, "tflops": 0.0513}) == "9 tok/s  51 GFLOP/s"
    assert format_speed({"tokens_per_s": 812.3, "tflops": 412.4, "mfu": 0.4168}) == "812 tok/s  412 TFLOP/s  41.7% MFU"
    assert [format_duration(value) for value in (7.6, 62, 11100)] == ["8s", "1m 02s", "3h 05m"]


def test_the_opening_has_the_sizes_of_the_run() -> None:
    num_bytes = {"weights": 4 << 20, "masters": 0, "gradients": 3 << 30}
    assert format_header(fake_run(), num_bytes).splitlines() == [
        "2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)",
        "rank 0 has 4.0 MiB weights, 3.0 GiB gradients, and after the first step also the optimizer states",
        "memory below is the peak of rank 0's whole process, including libraries",
        "evaluations and saved weights use the averages of `optim.ema`",
        "the first step also compiles the layers, which may take minutes",
    ]
    world = SimpleNamespace(size=1, device="NVIDIA H100")
    unknown = fake_run(None, num_parameters=9, num_trained=8, world=world)
    assert format_header(unknown, num_bytes).startswith("1 rank, 8 of 9 parameters trained, 160 steps of 16 samples\n")


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [(None, ""), (32, ""), (20, "steps = 2` to use each sample at most once"), (1, "one batch already needs 8")],
)
def test_an_evaluation_that_uses_samples_twice_has_a_note(num_samples: int | None, message: str) -> None:
    plan: Any = SimpleNamespace(evaluation=SimpleNamespace(steps=4), batch=SimpleNamespace(global_size=8))
    note = describe_repetition(num_samples, plan)
    assert (message in note, bool(note)) == (True, bool(message))


def test_the_summary_of_a_finished_run(tmp_path: Path) -> None:
    steps = rows(40)
    steps[19]["held_out_loss"] = 3.75
    steps[39] |= {"held_out_loss": 1.5, "held_out/accuracy": 0.25, "held_out/wiki/loss": 1.75, "memory_mb": 31.5}
    for step_row in steps:
        step_row |= {"trained_tokens": 500, "tflops": 200.0 if step_row["step"] <= 20 else 100.0, "mfu": 0.25}
    totals = total(steps)
    assert len(totals.losses) == 20, "its size is constant"
    best = BestEvaluation(KeepBestTable(metric="held_out_loss"), 2)
    best.add(20, steps[19])
    content = summarize_run(fake_run(best=best, stopped_early="it is bad"), "finished", totals)
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
        "first_step_s": 0.25,
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
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "counts": {"mine.handler": {"kept": 3}},
        "notes": [],
    }
    assert format_summary(content, "runs/small").splitlines() == [
        "finished: 40 steps in 10s, stopped early: it is bad",
        "  loss           1.0000  (mean of the last 20: 2.1875)",
        "  held-out loss  1.5000",
        "  held_out/accuracy   0.2500",
        "  held_out/wiki/loss  1.7500",
        "  best           3.7500 (held_out_loss), from step 20",
        "  speed          2.0k tok/s  150 TFLOP/s  25.0% MFU",
        "  run folder     runs/small",
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_of_a_file_have_the_totals_of_the_steps_that_wrote_them(bad: float, tmp_path: Path) -> None:
    steps = rows(3)
    values = {"loss": 2.0, "held_out_loss": 1.5, "held_out/exact": 0.5, "memory_mb": 31.5, "tflops": 8.0, "mfu": 0.5}
    steps[1] |= values
    steps[2] |= dict.fromkeys([*values, "held_out/never"], bad)
    with closing(JsonlWriter(JsonlConfig(), tmp_path)) as writer:
        for step_row in steps:
            writer.write(step_row)
    resumed = total(list(read_rows(tmp_path)))
    assert resumed == total(steps), "a resumed run also counts the steps of the attempts before"
    assert (resumed.num_steps, resumed.losses[-1], resumed.held_out_loss, resumed.memory_mb) == (3, 2.0, 1.5, 31.5)
    assert resumed.evaluation == {"held_out/exact": 0.5}


def test_summaries_without_tokens_losses_or_steps() -> None:
    steps = rows(4)
    steps[3] |= {"loss": math.nan, "skipped": 1}
    skipped = summarize_run(fake_run(), "finished", total(steps))
    assert (skipped["skipped_steps"], skipped["final_loss"], skipped["mean_loss_last_20"]) == (1, steps[2]["loss"], 5.75)
    assert format_summary(skipped, "x").startswith("finished: 4 steps, 1 of them skipped in 1s\n")
    frames = [{"step": step, "loss": 1.0, "samples": 4, "seconds": 0.25} for step in (1, 2)]
    content = summarize_run(fake_run(), "finished", total(frames))
    assert (content["tokens"], content["tokens_per_s"], content["samples_per_s"]) == (0, None, 64.0)
    none = summarize_run(fake_run(), "failed", RunTotals())
    unknown = ("final_loss", "mean_loss_last_20", "held_out_loss", "tokens_per_s", "samples_per_s", "tflops", "mfu")
    assert [none[key] for key in unknown] == [None] * 7
    compiled = format_summary(content | {"counts": {"compile": {"graphs": 3}}}, "x")
    assert "  first step     0s with compilation (3 graphs in the whole run)\n" in compiled
    assert format_summary(none, "runs/small") == "failed: 0 steps in 0s\n  run folder     runs/small"

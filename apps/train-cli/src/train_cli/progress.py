"""Prints the size, progress and totals of a run on stderr, and computes the content of `summary.json`.

step 120/500  loss 2.413  8.1k tok/s  412 TFLOP/s  41.7% MFU  31.2 GiB  1m 02s left
"""

from __future__ import annotations

import math
import platform
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from train_cli.console import ERASE_LINE, can_redraw, format_count

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_trainer.run import Run

Row = Mapping[str, float | int]
"""The metrics of one step, by name."""

SUMMARY = "summary.json"
"""The name of the file with a run's totals in its folder."""

_NUM_AVERAGED = 20
"""The number of last steps over which the loss is averaged, since the loss of a single step depends on its batch."""

_MIB = 1 << 20
_EVALUATION_PREFIX = "held_out/"
"""The prefix of the names of all metrics of an evaluation except `held_out_loss`."""

_REDRAW_S = 0.2
"""The minimum number of seconds between two redraws of the progress line."""


class RunTotals:
    """Accumulates the totals of a run's metrics rows. steps: the number of rows so far."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = self.trained_tokens = 0
        self.tflop = self.mfu_seconds = 0.0
        self.seconds = 0.0
        self.first_step_s: float | None = None
        self.held_out_loss: float | None = None
        self.evaluation: dict[str, float] = {}
        self.losses: deque[float] = deque(maxlen=_NUM_AVERAGED)
        self.skipped = 0
        self.memory_mb: float | None = None

    def add(self, row: Row) -> None:
        """Adds the row of one step. Ignores losses that are not finite, as in skipped steps."""
        self.steps += 1
        self.memory_mb = row.get("memory_mb", self.memory_mb)
        self.tokens += int(row.get("tokens", 0))  # absent for data without tokens
        self.trained_tokens += int(row.get("trained_tokens", 0))
        self.tflop += row.get("tflops", 0.0) * row["seconds"]
        self.mfu_seconds += row.get("mfu", 0.0) * row["seconds"]
        self.seconds += row["seconds"]
        self.first_step_s = row["seconds"] if self.first_step_s is None else self.first_step_s
        self.skipped += int(row.get("skipped", 0))
        if math.isfinite(row["loss"]):
            self.losses.append(row["loss"])
        self.held_out_loss = row.get("held_out_loss", self.held_out_loss)
        # `metrics.jsonl` has null for values that are not finite, such as a metric to which no sample contributes.
        self.evaluation |= {
            name: value for name, value in row.items() if name.startswith(_EVALUATION_PREFIX) and value is not None
        }


def _count_epochs(run: Run, steps: int) -> float | None:
    """Returns the number of epochs in `steps` steps; None if the number of samples is unknown, as for a stream."""
    num_samples = run.feed.num_samples if run.feed is not None else None
    return steps * run.plan.batch.global_size / num_samples if num_samples else None


def summarize_run(run: Run, outcome: str, totals: RunTotals, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the content of `summary.json`.

    run: rank 0's run. outcome: `"finished"`, `"interrupted"` or `"failed"`. notes: problems that did not end the run.

    A loss is None if no step or evaluation has produced it. `evaluation` has the other metrics of evaluations, and `best` is
    the state of `keep_best`. `tokens_per_s`, `samples_per_s`, `tflops` (of one device) and `mfu` are means over all steps, and
    None if they are unknown. `memory_mb` is the peak in MiB, as in the rows.
    """
    import torch

    plan, best, losses = run.plan, run.best, list(totals.losses)
    num_samples = totals.steps * plan.batch.global_size

    def per_second(amount: float) -> float | None:
        return amount / totals.seconds if amount and totals.seconds > 0 else None

    return {
        "name": plan.run.name,
        "outcome": outcome,
        "steps": totals.steps,
        "skipped_steps": totals.skipped,
        "final_loss": losses[-1] if losses else None,
        f"mean_loss_last_{_NUM_AVERAGED}": sum(losses) / len(losses) if losses else None,
        "held_out_loss": totals.held_out_loss,
        "evaluation": dict(totals.evaluation),
        "best": None if best is None else {"metric": best.table.metric, "value": best.value, "step": best.step},
        "stopped_early": run.stopped_early or None,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained_tokens,
        "seconds": totals.seconds,
        "first_step_s": totals.first_step_s,
        "tokens_per_s": per_second(totals.tokens),
        "samples": num_samples,
        "samples_per_s": per_second(num_samples),
        "tflops": per_second(totals.tflop),
        "mfu": per_second(totals.mfu_seconds),
        "epochs": _count_epochs(run, totals.steps),
        "parameters": run.num_parameters,
        "trained_parameters": run.num_trained,
        "memory_bytes": dict(run.memory.bytes),
        "memory_mb": totals.memory_mb,
        "world": run.world.size,
        "device": str(run.world.device),
        "plugins": {name: f"{plugin.dist} {plugin.version}" for name, plugin in plan.plugins.items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "counts": {name: dict(values) for name, values in run.counts.items()},
        "notes": list(notes),
    }


def format_opening(run: Run, num_bytes: Mapping[str, int]) -> str:
    """Returns the text that is printed before the first step.

        2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)
        rank 0 has 4.0 MiB weights, 4.0 MiB gradients, and after the first step also the optimizer states
        memory below is the peak of rank 0's whole process, libraries included

    num_bytes: the bytes of this rank by kind, as in `Run.memory.bytes`; the first step allocates the optimizer states.
    """
    plan, device = run.plan, str(run.world.device)
    steps, size, sequence = plan.run.steps, plan.batch.global_size, run.dataset.info.sequence
    samples = f"{format_count(steps, 'step')} of {size} samples"
    if (epochs := _count_epochs(run, steps)) is not None:
        samples += f" = {epochs:.2g} epochs"
    if sequence is not None and run.samples.meter.unit == "tokens":
        samples += f" ({steps * size * sequence:,} tokens)"
    memory_text = ", ".join(
        f"{format_bytes(num_bytes[name])} {name}" for name in ("weights", "masters", "gradients") if num_bytes[name]
    )
    measured = "whole process, libraries included" if device == "cpu" else "tensors on its GPU, activations included"
    lines = [
        ", ".join((format_count(run.world.size, "rank"), format_parameters(run.num_parameters, run.num_trained), samples)),
        f"rank 0 has {memory_text}, and after the first step also the optimizer states",
        f"memory below is the peak of rank 0's {measured}",
    ]
    if plan.averaging is not None:
        lines.append(f"evaluations and saved weights use the averages of `{plan.averaging.name}`")
    if plan.model.config.compile:
        lines.append("the first step also compiles the layers, which may take minutes")
    return "\n".join(lines)


def describe_repetition(num_samples: int | None, plan: Plan) -> str:
    """Returns a note if an evaluation uses samples more than once, else "". num_samples: None if unknown, as for a stream."""
    assert plan.evaluation is not None, "the plan has no [evaluation]"
    used, size = plan.evaluation.steps * plan.batch.global_size, plan.batch.global_size
    if not num_samples or used <= num_samples:
        return ""
    held_out = f"only {num_samples:,} {'sample is' if num_samples == 1 else 'samples are'} held out"
    problem = f"{held_out}, but an evaluation needs {used:,}, so each is used about {used / num_samples:.2g} times"
    max_steps = num_samples // size
    return f"{problem}; " + (
        f"set `[evaluation] steps = {max_steps}` to use each once" if max_steps else f"a batch needs {size:,}"
    )


class Reporter(AbstractContextManager["Reporter"]):
    """Prints the progress of a run of `num_steps` steps: append it to `run.readers`. Ignores failed writes.

    On a terminal, it redraws one line; otherwise it prints a line after every `log_every`-th step and after the last. notes:
    the list to which the run appends its notes; new notes are printed. stream: None for stderr.
    """

    def __init__(self, num_steps: int, log_every: int, notes: Sequence[str] = (), stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._stream = sys.stderr if stream is None else stream
        self._redraws = can_redraw(self._stream)
        self._first_step: tuple[int, float] | None = None
        self._notes = notes
        self._num_before = self._num_printed = len(notes)
        self._redrawn_s = 0.0

    def __call__(self, row: Row) -> None:
        """Prints the row of one step."""
        step = int(row["step"])
        text, is_last = self._format_row(step, row), step == self._num_steps
        with suppress(OSError, ValueError):
            self._print_notes()
            if self._redraws and (time.monotonic() - self._redrawn_s > _REDRAW_S or is_last):
                self._redrawn_s = time.monotonic()
                self._write(text[: shutil.get_terminal_size().columns - 1])
            elif not self._redraws and (step % self._log_every == 0 or is_last):
                self._write(f"{text}\n")

    @property
    def new_notes(self) -> list[str]:
        """The notes that the run has added since this reporter was created."""
        return list(self._notes[self._num_before :])

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ValueError):
            self._print_notes()
            self._write("")

    def _print_notes(self) -> None:
        for note in self._notes[self._num_printed :]:
            self._num_printed += 1
            self._write(f"{note}\n")

    def _write(self, text: str) -> None:
        self._stream.write(f"{ERASE_LINE}{text}" if self._redraws else text)
        self._stream.flush()

    def _format_row(self, step: int, row: Row) -> str:
        parts = [f"step {step}/{self._num_steps}", f"loss {row['loss']:.3f}"]
        if row.get("skipped"):
            parts.append("skipped")
        if "held_out_loss" in row:
            parts.append(f"held-out {row['held_out_loss']:.3f}")
        losses = [name for name in row if name.startswith(_EVALUATION_PREFIX) and name.endswith("/loss")]
        parts += [f"{name.split('/')[1]} {row[name]:.3f}" for name in losses]
        parts += [format_rate(row), format_bytes(row["memory_mb"] * _MIB)]
        time_s = time.monotonic()
        if self._first_step is None:  # the first step does not count, since it includes all warm-up
            self._first_step = step, time_s
        elif step > self._first_step[0]:
            left_s = (time_s - self._first_step[1]) / (step - self._first_step[0]) * (self._num_steps - step)
            parts.append(f"{format_duration(left_s)} left")
        return "  ".join(parts)


def format_closing(summary: Mapping[str, Any], folder: object, weights: object = None) -> str:
    """Returns the text that is printed after the last step. summary: from `summarize_run`. weights: their folder, if any."""
    steps, seconds = summary["steps"], summary["seconds"]
    skipped = f", {summary['skipped_steps']} of them skipped" if summary["skipped_steps"] else ""
    lines = [f"{summary['outcome']}: {format_count(steps, 'step')}{skipped} in {format_duration(seconds)}"]
    if summary["stopped_early"]:
        lines[0] += f", early: {summary['stopped_early']}"
    if summary["final_loss"] is not None:
        mean, last = summary[f"mean_loss_last_{_NUM_AVERAGED}"], min(steps, _NUM_AVERAGED)
        mean_text = f"  (mean of the last {last}: {mean:.4f})" if last > 1 else ""
        lines.append(f"  loss           {summary['final_loss']:.4f}{mean_text}")
    if summary["held_out_loss"] is not None:
        lines.append(f"  held-out loss  {summary['held_out_loss']:.4f}")
    width = max(map(len, summary["evaluation"]), default=0)
    lines += [f"  {name:<{width}}  {value:.4f}" for name, value in summary["evaluation"].items()]
    if (best := summary["best"]) is not None and best["value"] is not None:
        lines.append(f"  best           {best['value']:.4f} ({best['metric']}), from step {best['step']}")
    if speed := format_rate(summary):
        lines.append(f"  speed          {speed}")
    if "compile" in summary["counts"] and (first_s := summary["first_step_s"]) is not None:
        num_graphs = summary["counts"]["compile"]["graphs"]
        lines.append(f"  first step     {format_duration(first_s)} with compilation ({num_graphs} graphs in the whole run)")
    lines.append(f"  run folder     {folder}")
    if weights is not None:
        lines.append(f"  weights        {weights}")
    return "\n".join(lines)


def format_rate(row: Mapping[str, Any]) -> str:
    """Formats the speed of a row or summary: `812 tok/s`, or `8.1k tok/s  412 TFLOP/s  41.7% MFU` if FLOP/s and MFU are known;
    `31 samples/s` for data without tokens; "" if no speed is known.
    """
    rate, unit = row.get("tokens_per_s"), "tok/s"
    if rate is None:
        rate, unit = row.get("samples_per_s"), "samples/s"
    if rate is None:
        return ""
    size, letter = next((pair for pair in ((1e6, "M"), (1e3, "k")) if rate >= pair[0]), (1.0, ""))
    number = f"{rate / size:.1f}" if letter else f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    parts = [f"{number}{letter} {unit}"]
    if (tflops := row.get("tflops")) is not None:
        parts.append(f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.2g} GFLOP/s")
    if (mfu := row.get("mfu")) is not None:
        parts.append(f"{mfu:.1%} MFU")
    return "  ".join(parts)


def format_bytes(count: float) -> str:
    """Formats bytes: `12 KiB`, `1.5 MiB`, `812 MiB`, `31.2 GiB`."""
    if count < _MIB:
        return f"{count / 1024:.0f} KiB"
    if count < 1024 * _MIB:
        return f"{count / _MIB:.1f} MiB" if count < 10 * _MIB else f"{count / _MIB:.0f} MiB"
    return f"{count / 1024 / _MIB:.1f} GiB"


def format_duration(seconds: float) -> str:
    """Formats seconds: `8s`, `1m 02s`, `3h 05m`."""
    minutes, remaining = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {remaining:02}s" if minutes else f"{remaining}s"


def format_parameters(count: int, trained: int) -> str:
    """Formats numbers of parameters: `1,000 parameters`, `8 of 1,000 parameters trained`."""
    return f"{count:,} parameters" if count == trained else f"{trained:,} of {count:,} parameters trained"

"""Defines the options that several commands share, and prints lines, diagnostics and the progress of a run on stderr. stdout is
for data, such as the output of `show`. Does not import torch. A line of progress:

step 120/500  loss 2.413  8.1k tok/s  412 TFLOP/s  41.7% MFU  31.2 GiB  1m 02s left
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from sley_core.errors import Diagnostic, UsageError, make_printable
from sley_core.plan.document import printable_line
from sley_core.plan.plan import Plan
from train_cli.faults import Fault

if TYPE_CHECKING:
    from sley_trainer.run import Run


class OutputFormat(StrEnum):
    """The format of a command's output on stdout."""

    text = "text"
    json = "json"


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value of the plan, such as batch.micro_size=4; VALUE is TOML. Can be repeated.",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, help="1 samples the model's distribution; 0 is greedy.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample only from the K most likely tokens.")
]
SamplingSeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the sampling.")]
WorldOption = Annotated[
    int | None, typer.Option("--world", metavar="N", min=1, help="The number of ranks, if the plan does not set it.")
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts; with --per-node, instead of --world.")
]
PerNodeOption = Annotated[int | None, typer.Option("--per-node", metavar="N", min=1, help="The number of ranks on each host.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the best checkpoint by `[evaluation] keep_best` instead of the newest weights.")
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="The output format.")]


def resolve_world_size(world_size: int | None, nodes: int | None, per_node: int | None) -> int | None:
    """Returns the number of ranks that the options set, or None if no option is set. Raises UsageError "world" if only one of
    `nodes` and `per_node` is set, or if `world_size` is set as well.
    """
    if nodes is None and per_node is None:
        return world_size
    if nodes is None or per_node is None:
        raise UsageError("world", "`--nodes` and `--per-node` must be used together", hint="pass both, or `--world`")
    if world_size is not None:
        raise UsageError("world", "`--world` cannot be used with `--nodes` and `--per-node`", hint="remove one of them")
    return nodes * per_node


def format_count(count: int, noun: str, plural_ending: str = "s") -> str:
    """Returns a count with its noun, such as `1 rank` or `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else plural_ending}"


ERASE_LINE = "\r\x1b[2K"
"""The characters that erase the cursor's line on a terminal."""


@dataclass
class Settings:
    """The options of all commands. prints_traceback: the value of `--traceback`, which prints the traceback of an error."""

    prints_traceback: bool = False


def can_redraw(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal whose lines can be redrawn; False if NO_COLOR is set or TERM is `dumb`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_line(text: str) -> None:
    """Prints `text` and a newline on stderr, over the progress line if there is one. Ignores a closed stderr."""
    with suppress(OSError, ValueError):
        print(f"{ERASE_LINE if can_redraw(sys.stderr) else ''}{text}", file=sys.stderr, flush=True)


def print_fault(fault: Fault, settings: Settings) -> None:
    """Prints a fault on stderr: the traceback, if `settings` requests it, and the diagnostics. Ignores a closed stderr."""
    if settings.prints_traceback and fault.trace:
        print_line(fault.trace)
    if fault.diagnostics:
        with suppress(ValueError):
            print_line(format_diagnostics(fault.diagnostics, is_long=sys.stderr.isatty()).removesuffix("\n"))


def format_diagnostics(diagnostics: Sequence[Diagnostic], *, is_long: bool) -> str:
    """Returns the diagnostics as text that ends in a newline. If there are several, the last line states their number. is_long:
    whether to show source lines with carets; if not, each diagnostic is one line: `plan.toml:24:1: error[unknown-key]: ...`.
    """
    texts = list(map(_format_long if is_long else _format_short, diagnostics))
    if len(texts) > 1:
        texts.append(f"found {len(texts)} errors")
    return "".join(f"{text}\n" for text in texts)


def _format_short(diagnostic: Diagnostic) -> str:
    location = f"{diagnostic.place}: " if diagnostic.place else ""
    hint = f" (hint: {diagnostic.hint})" if diagnostic.hint else ""
    return make_printable(f"{location}error[{diagnostic.code}]: {diagnostic.message}{hint}".replace("\n", " "))


def _format_long(diagnostic: Diagnostic) -> str:
    """Returns a diagnostic in the style of rustc and ruff: the error, the source line with a caret, and the hint."""
    lines = [f"error[{diagnostic.code}]: {diagnostic.message}"]
    location = diagnostic.place
    if location is not None:
        number = str(location.line) if location.line else ""
        margin = " " * len(number)
        lines.append(f"{margin}--> {location}")
        if diagnostic.source_line is not None and location.column:
            carets = " " * (location.column - 1) + "^" * max(1, location.length)
            source_line = printable_line(diagnostic.source_line.rstrip("\r\n"))
            lines += [f"{margin} |", f"{number} | {source_line}", f"{margin} | {carets}", f"{margin} |"]
    if diagnostic.hint:
        lines += ["", f"hint: {diagnostic.hint}"]
    return "\n".join(make_printable(line) for text in lines for line in text.split("\n")) + "\n"


Row = Mapping[str, float | int]
"""The metrics of one step, by name, as in a line of `metrics.jsonl`."""

NUM_AVERAGED = 20
"""The summary averages the loss over this number of last steps, since the loss of a single step depends on its batch."""

EVALUATION_PREFIX = "held_out/"
"""The prefix of the names of all metrics of an evaluation except `held_out_loss`."""

_MIB = 1 << 20  # bytes

_REDRAW_INTERVAL_S = 0.2  # the minimum number of seconds between two redraws of the progress line


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """A member of `run.readers` that prints the progress of a run of `num_steps` steps. Ignores failed writes. On a terminal,
    it redraws one line; otherwise it prints a line after every `log_every`-th step and after the last step. notes: the list to
    which the run appends its notes; new notes are printed. stream: the output; None for stderr. As a context manager, it ends
    the output when the block ends.
    """

    def __init__(self, num_steps: int, log_every: int, notes: Sequence[str] = (), stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._stream = sys.stderr if stream is None else stream
        self._redraws = can_redraw(self._stream)
        self._first_step: tuple[int, float] | None = None  # its number, and the time at its end
        self._notes = notes
        self._num_old_notes = self._num_printed_notes = len(notes)
        self._last_redraw_s = 0.0

    def __call__(self, row: Row) -> None:
        """Prints the progress after a step. row: the metrics row of the step."""
        step = int(row["step"])
        text, is_last = self._format_row(step, row), step == self._num_steps
        with suppress(OSError, ValueError):
            self._print_notes()
            if self._redraws and (time.monotonic() - self._last_redraw_s > _REDRAW_INTERVAL_S or is_last):
                self._last_redraw_s = time.monotonic()
                self._write(text[: shutil.get_terminal_size().columns - 1])
            elif not self._redraws and (step % self._log_every == 0 or is_last):
                self._write(f"{text}\n")

    @property
    def new_notes(self) -> list[str]:
        """The notes that the run has added since this reporter was created."""
        return list(self._notes[self._num_old_notes :])

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ValueError):
            self._print_notes()
            self._write("")

    def _print_notes(self) -> None:
        for note in self._notes[self._num_printed_notes :]:
            self._num_printed_notes += 1
            self._write(f"{note}\n")

    def _write(self, text: str) -> None:
        self._stream.write(f"{ERASE_LINE}{text}" if self._redraws else text)
        self._stream.flush()

    def _format_row(self, step: int, row: Row) -> str:
        """Returns the progress line for a step, with the time left from the second call on."""
        parts = [f"step {step}/{self._num_steps}", f"loss {row['loss']:.3f}"]
        if row.get("skipped"):
            parts.append("skipped")
        if "held_out_loss" in row:
            parts.append(f"held-out {row['held_out_loss']:.3f}")
        loss_names = [name for name in row if name.startswith(EVALUATION_PREFIX) and name.endswith("/loss")]
        parts += [f"{name.split('/')[1]} {row[name]:.3f}" for name in loss_names]
        parts += [format_speed(row), format_bytes(row["memory_mb"] * _MIB)]
        now_s = time.monotonic()
        if self._first_step is None:  # the first step does not count, since it includes all warm-up
            self._first_step = step, now_s
        elif step > self._first_step[0]:
            remaining_s = (now_s - self._first_step[1]) / (step - self._first_step[0]) * (self._num_steps - step)
            parts.append(f"{format_duration(remaining_s)} left")
        return "  ".join(parts)


def count_epochs(run: "Run", num_steps: int) -> float | None:
    """Returns the number of epochs in `num_steps` steps; None if the number of samples is not known, as for a stream."""
    num_samples = run.feed.num_samples if run.feed is not None else None
    return num_steps * run.plan.batch.global_size / num_samples if num_samples else None


def format_header(run: "Run", num_bytes: Mapping[str, int]) -> str:
    """Returns the text that is printed before the first step.

        2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)
        rank 0 has 4.0 MiB weights, 4.0 MiB gradients, and after the first step also the optimizer states
        memory below is the peak of rank 0's whole process, including libraries

    num_bytes: the size in bytes of each part of this rank's memory before the first step.
    """
    plan, device = run.plan, str(run.world.device)
    steps, size, sequence = plan.run.steps, plan.batch.global_size, run.dataset.info.sequence
    samples = f"{format_count(steps, 'step')} of {size} samples"
    if (epochs := count_epochs(run, steps)) is not None:
        samples += f" = {epochs:.2g} epochs"
    if sequence is not None and run.samples.meter.unit == "tokens":
        samples += f" ({steps * size * sequence:,} tokens)"
    kinds = ("weights", "masters", "gradients")
    memory = ", ".join(f"{format_bytes(num_bytes[name])} {name}" for name in kinds if num_bytes[name])
    measured = "whole process, including libraries" if device == "cpu" else "tensors on its GPU, including activations"
    lines = [
        ", ".join((format_count(run.world.size, "rank"), format_parameters(run.num_parameters, run.num_trained), samples)),
        f"rank 0 has {memory}, and after the first step also the optimizer states",
        f"memory below is the peak of rank 0's {measured}",
    ]
    if plan.averaging is not None:
        lines.append(f"evaluations and saved weights use the averages of `{plan.averaging.name}`")
    if plan.model.config.compile:
        lines.append("the first step also compiles the layers, which may take minutes")
    return "\n".join(lines)


def describe_repetition(num_samples: int | None, plan: Plan) -> str:
    """Returns a note if an evaluation repeats samples, else "". num_samples: the number of held-out samples, or None."""
    assert plan.evaluation is not None, "the plan has no [evaluation]"
    size = plan.batch.global_size
    num_used = plan.evaluation.steps * size
    if not num_samples or num_used <= num_samples:
        return ""
    held_out = f"only {num_samples:,} {'sample is' if num_samples == 1 else 'samples are'} held out"
    problem = f"{held_out}, but an evaluation needs {num_used:,}, so each is used about {num_used / num_samples:.2g} times"
    if max_steps := num_samples // size:
        return f"{problem}; set `[evaluation] steps = {max_steps}` to use each sample at most once"
    return f"{problem}; one batch already needs {size:,}"


def format_summary(summary: Mapping[str, Any], folder: Path, weights: Path | None = None) -> str:
    """Returns the text that ends a run. summary: from `summarize_run`. weights: the folder of saved final weights, or None."""
    num_steps = summary["steps"]
    skipped = f", {summary['skipped_steps']} of them skipped" if summary["skipped_steps"] else ""
    lines = [f"{summary['outcome']}: {format_count(num_steps, 'step')}{skipped} in {format_duration(summary['seconds'])}"]
    if summary["stopped_early"]:
        lines[0] += f", stopped early: {summary['stopped_early']}"
    if summary["final_loss"] is not None:
        mean, num_averaged = summary[f"mean_loss_last_{NUM_AVERAGED}"], min(num_steps, NUM_AVERAGED)
        mean_text = f"  (mean of the last {num_averaged}: {mean:.4f})" if num_averaged > 1 else ""
        lines.append(f"  loss           {summary['final_loss']:.4f}{mean_text}")
    if summary["held_out_loss"] is not None:
        lines.append(f"  held-out loss  {summary['held_out_loss']:.4f}")
    width = max(map(len, summary["evaluation"]), default=0)
    lines += [f"  {name:<{width}}  {value:.4f}" for name, value in summary["evaluation"].items()]
    if (best := summary["best"]) is not None and best["value"] is not None:
        lines.append(f"  best           {best['value']:.4f} ({best['metric']}), from step {best['step']}")
    if speed := format_speed(summary):
        lines.append(f"  speed          {speed}")
    if "compile" in summary["counts"] and (first_s := summary["first_step_s"]) is not None:
        num_graphs = summary["counts"]["compile"]["graphs"]
        lines.append(f"  first step     {format_duration(first_s)} with compilation ({num_graphs} graphs in the whole run)")
    lines.append(f"  run folder     {folder}")
    if weights is not None:
        lines.append(f"  weights        {weights}")
    return "\n".join(lines)


def format_speed(row: Mapping[str, Any]) -> str:
    """Returns the speed in a row or summary as text: `812 tok/s`, or `8.1k tok/s  412 TFLOP/s  41.7% MFU` if FLOP/s and MFU are
    known; `31 samples/s` for data without tokens; "" if no speed is known.
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


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text, such as `12 KiB`, `1.5 MiB`, `812 MiB` or `31.2 GiB`."""
    if num_bytes < _MIB:
        return f"{num_bytes / 1024:.0f} KiB"
    if num_bytes < 1024 * _MIB:
        return f"{num_bytes / _MIB:.1f} MiB" if num_bytes < 10 * _MIB else f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / 1024 / _MIB:.1f} GiB"


def format_duration(seconds: float) -> str:
    """Returns a number of seconds as text, such as `8s`, `1m 02s` or `3h 05m`."""
    minutes, remaining = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {remaining:02}s" if minutes else f"{remaining}s"


def format_parameters(count: int, num_trained: int) -> str:
    """Returns numbers of parameters as text: `1,000 parameters`, or `8 of 1,000 parameters trained` if some are frozen."""
    return f"{count:,} parameters" if count == num_trained else f"{num_trained:,} of {count:,} parameters trained"

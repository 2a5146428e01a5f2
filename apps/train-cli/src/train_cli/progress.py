"""Shows a run on stderr: its size before the first step, then a line that is redrawn on a terminal, else one every `log_every`
steps.

step 120/500  loss 2.413  8.1k tok/s  31.2 GiB  1m 02s left
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from train_cli.summary import NUM_LAST

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from train_cli.summary import RunFacts


Row = Mapping[str, float | int]

_REDRAW_S = 0.2


def draws_line(stream: TextIO, *, wanted: bool = True) -> bool:
    """Returns whether to redraw one line of progress: `stream` is a terminal and plain output was not asked for."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("SLEY_NO_PROGRESS") or os.environ.get("TERM") == "dumb"
    return wanted and stream.isatty() and not plain


class Reporter(AbstractContextManager["Reporter"]):
    """Shows each row of a run of `num_steps` steps; used as `run.readers.append(reporter)`.

    line: redraw one line; otherwise print a line every `log_every`-th step and at the last. notes: the list to which the run
    appends its notes; new ones are shown. lost: why and since which step nothing is shown, if writing to the stream failed.
    """

    def __init__(
        self, num_steps: int, log_every: int, *, line: bool, notes: Sequence[str] = (), stream: TextIO | None = None
    ) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._stream = sys.stderr if stream is None else stream
        self._clock = Pace(num_steps)
        self.lost: str | None = None
        self._notes = notes
        self._num_before = self._num_told = len(notes)
        self._line = _Line(num_steps, self._stream) if line else None

    def __call__(self, row: Row) -> None:
        """Shows the row of one step."""
        step = int(row["step"])
        self._clock.saw(step)
        self._tell(step)
        if self._line is not None:
            self._write(step, partial(self._line.draw, step, self._text(row)))
        elif step % self._log_every == 0 or step == self._num_steps:
            self._write(step, partial(print, self._text(row), file=self._stream, flush=True))

    @property
    def new_notes(self) -> list[str]:
        """Returns what the run has noted since the reporter was made."""
        return list(self._notes[self._num_before :])

    def __exit__(self, *_: object) -> None:
        self._tell(self._num_steps)
        if self._line is not None:
            self._write(self._num_steps, self._line.close)

    def _tell(self, step: int) -> None:
        """Shows the notes that are new."""
        for note in self._notes[self._num_told :]:
            self._num_told += 1
            show = partial(print, file=self._stream, flush=True) if self._line is None else self._line.tell
            self._write(step, partial(show, note))

    def _write(self, step: int, show: Callable[[], None]) -> None:
        """Calls `show`; a write error, from a closed pipe or a full disk, ends the progress display and not the run."""
        if self.lost is not None:
            return
        try:
            show()
        except (OSError, ValueError) as error:
            self.lost = f"progress was not shown from step {step} on: {error}"

    def _text(self, row: Row) -> str:
        """Returns a row as a line of text."""
        step = int(row["step"])
        parts = [f"step {step}/{self._num_steps}", f"loss {row['loss']:.3f}"]
        if row.get("skipped"):
            parts.append("skipped")
        if "held_out_loss" in row:
            parts.append(f"held-out {row['held_out_loss']:.3f}")
        parts += [rate(row), memory(row["memory_mb"])]
        left_s = self._clock.left_s(step)
        if left_s is not None:
            parts.append(f"{duration(left_s)} left")
        return "  ".join(parts)


class Pace:
    """Estimates the remaining time from the pace so far; the first step, which warms everything up, does not count."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first: tuple[int, float] | None = None
        self._now = 0.0

    def saw(self, step: int) -> None:
        """Notes the time at which `step` ended."""
        self._now = time.monotonic()
        if self._first is None:
            self._first = step, self._now

    def left_s(self, step: int) -> float | None:
        """Returns the estimated seconds from `step` to the end; None before a second step."""
        if self._first is None or step <= self._first[0]:
            return None
        pace_s = (self._now - self._first[1]) / (step - self._first[0])
        return pace_s * (self._num_steps - step)


class _Line:
    """Redraws a bar and a text at most five times a second, in the thread of the run: a thread of its own would take time from
    it.
    """

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn())
        self._progress = Progress(*columns, console=Console(file=stream), auto_refresh=False, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("starting", total=num_steps)
        self._num_steps = num_steps
        self._drawn = 0.0

    def draw(self, step: int, text: str) -> None:
        """Updates bar and text; draws them if the last drawing is old enough, or at the last step."""
        self._progress.update(self._task, completed=step, description=text)
        if time.monotonic() - self._drawn > _REDRAW_S or step == self._num_steps:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def tell(self, text: str) -> None:
        """Prints `text` above the line."""
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Removes the line."""
        self._progress.stop()


def closing(summary: Mapping[str, Any], folder: object, weights: object = None, *, verbose: bool = False) -> str:
    """Returns the last lines of a run, from its `summary.json`. weights: where they are, if anywhere. verbose: adds the counts
    of the run's parts.
    """
    steps, seconds = summary["steps"], summary["seconds"]
    skipped = f", {summary['skipped_steps']} of them skipped" if summary["skipped_steps"] else ""
    lines = [f"{summary['outcome']}: {steps} step{'' if steps == 1 else 's'}{skipped} in {duration(seconds)}"]
    if summary["final_loss"] is not None:
        mean, last = summary[f"mean_loss_last_{NUM_LAST}"], min(steps, NUM_LAST)
        more = f"  (mean of the last {last}: {mean:.4f})" if last > 1 else ""
        lines.append(f"  loss           {summary['final_loss']:.4f}{more}")
    if summary["held_out_loss"] is not None:
        lines.append(f"  held-out loss  {summary['held_out_loss']:.4f}")
    if speed := rate(summary):
        lines.append(f"  speed          {speed}")
    lines.append(f"  run folder     {folder}")
    if weights is not None:
        lines.append(f"  weights        {weights}")
    for name, counts in summary["counts"].items() if verbose else ():
        width = max(map(len, counts), default=0)
        lines += [f"  {name} counted"] + [f"    {key:<{width}}  {value:,.10g}" for key, value in counts.items()]
    return "\n".join(lines)


def rate(found: Mapping[str, Any]) -> str:
    """Formats the speed of a row or summary: `812 tok/s`, `8.1k tok/s`; `31 samples/s` for data without sequences; "" if it has
    none.
    """
    per_s, unit = found.get("tokens_per_s"), "tok/s"
    if per_s is None:
        per_s, unit = found.get("samples_per_s"), "samples/s"
    if per_s is None:
        return ""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if per_s >= size:
            return f"{per_s / size:.1f}{letter} {unit}"
    return f"{per_s:.0f} {unit}" if per_s >= 10 else f"{per_s:.2g} {unit}"


def memory(mib: float) -> str:
    """Formats MiB: `812 MiB`, `31.2 GiB`."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """Formats seconds: `8s`, `1m 02s`, `3h 05m`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


MIB = 1 << 20
JSONL = "core.jsonl"


def opening(facts: RunFacts, plan: Plan, held: Mapping[str, int]) -> str:
    """Returns the lines that are shown before the first step.

        2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)
        rank 0 holds 4.0 MiB weights, 4.0 MiB gradients, and after the first step the optimizer's states
        memory below is the peak of rank 0's whole process, libraries included

    held: `Run.memory.bytes` of this rank, in bytes; without the optimizer's states, which are allocated in its first step.
    """
    lines = [", ".join((ranks(facts.world), _parameters(facts), _samples(facts, plan))), _held(held), _shown(facts)]
    if all(writer.name != JSONL for writer in plan.metrics):
        names = " and ".join(f"`{writer.name}`" for writer in plan.metrics) or "none"
        lines.append(f"no metrics.jsonl: [[metrics]] lists {names}, and not `{JSONL}`")
    return "\n".join(lines)


def repeats(num_samples: int | None, plan: Plan) -> str:
    """Returns a note if an evaluation of `plan` sees samples more than once; "" if not.

    num_samples: of the held-out data; None if it is not known, as for a stream.
    """
    assert plan.evaluation is not None, "the plan has no [evaluation]"
    seen, size = plan.evaluation.steps * plan.batch.global_size, plan.batch.global_size
    if not num_samples or seen <= num_samples:
        return ""
    held_out = f"only {num_samples:,} {'sample is' if num_samples == 1 else 'samples are'} held out"
    times = f"{held_out}, but an evaluation takes {seen:,}: each is used about {seen / num_samples:.2g} times"
    fits = num_samples // size
    return f"{times}; " + (f"`[evaluation] steps = {fits}` avoids this" if fits else f"a batch takes {size:,}")


def ranks(count: int) -> str:
    """Returns a number of ranks in words: `1 rank`, `2 ranks`."""
    return f"{count} rank{'' if count == 1 else 's'}"


def parameters(count: int, trained: int) -> str:
    """Returns numbers of parameters in words: `1,000 parameters`, `8 of 1,000 parameters trained`."""
    return f"{count:,} parameters" if count == trained else f"{trained:,} of {count:,} parameters trained"


def _parameters(facts: RunFacts) -> str:
    return parameters(facts.parameters, facts.trained)


def _samples(facts: RunFacts, plan: Plan) -> str:
    """Returns steps, samples, epochs and tokens as text."""
    steps = plan.run.steps
    text = f"{steps} step{'' if steps == 1 else 's'} of {facts.samples_per_step} samples"
    epochs = facts.epochs(steps)
    text += "" if epochs is None else f" = {epochs:.2g} epochs"
    if facts.tokens_per_sample is None:
        return text
    return f"{text} ({steps * facts.samples_per_step * facts.tokens_per_sample:,} tokens)"


def _held(held: Mapping[str, int]) -> str:
    parts = [f"{memory_of(held[name])} {name}" for name in ("weights", "masters", "gradients") if held[name]]
    return f"rank 0 holds {', '.join(parts)}, and after the first step the optimizer's states"


def _shown(facts: RunFacts) -> str:
    """Returns what the memory in the lines of steps counts."""
    counted = "whole process, libraries included" if facts.device == "cpu" else "tensors on its GPU, activations included"
    return f"memory below is the peak of rank 0's {counted}"


def memory_of(count: int) -> str:
    """Formats bytes: `12 KiB`, `1.5 MiB`, `31.2 GiB`."""
    if count < MIB:
        return f"{count / 1024:.0f} KiB"
    return memory(count / MIB) if count >= 10 * MIB else f"{count / MIB:.1f} MiB"

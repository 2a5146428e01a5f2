"""Records what this rank works at and waits for, for as long as it trains, into its file of the run's folder.

    entered F0.0 ──> waited ──> called layer ──> entered B0.0 ... ──> entered "the beginning of the step" ──> a sample
    samples ──> after a while a line of the file, see `work_record`

Work is what lies between two entries of the list and is no wait for others. An entry costs two reads of a dict and one of the
clock, a wait as much. By layer, and message by message, one step in `DETAILED` of the run is recorded, and long ones all.
Nothing is computed from samples until a window ends, which is after a twentieth of the time so far, half a second and eight
steps at least, and five minutes at most.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.actions.action import Action, Transfer
from sley_core.comm import progress as standing_at
from sley_doctor.reports.work_file import WorkFile, WorkSamples
from sley_doctor.reports.work_record import (
    BEGINNING,
    BETWEEN,
    DATA,
    DEVICE,
    EVALUATION,
    MESSAGES,
    REDUCTION,
    UPDATE,
    Start,
    Usage,
    line,
)
from train_cli.run_folder import WORK

if TYPE_CHECKING:
    from sley_core.comm.guard import Turn
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts
    from sley_core.model.layers import Layer


try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def private_mb() -> float:
    """Returns the memory that this process holds for itself alone, without mapped files, in MiB; 0 if unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split(maxsplit=3)
    except (OSError, ValueError):
        return 0.0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def used() -> Usage:
    """Returns what this process has used since its start, over all its threads."""
    if resource is None:
        return Usage(0.0, 0.0, 0)
    found = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(found.ru_utime, found.ru_stime, found.ru_minflt + found.ru_majflt)


DETAILED, LONG_S = 4, 1.0
"""Of a run's steps, one in so many, and those after a step that took so long: windows of such steps have few."""

SHARE, LEAST_S, MOST_S = 1 / 20, 0.5, 300.0  # how long a window is: a share of the time so far, and limits in seconds
LEAST_STEPS = 8  # of a window, unless they take longer than `MOST_S`: quartiles of a few steps tell little

_PLACES = {
    standing_at.BEGINNING: BEGINNING,
    standing_at.REDUCTION: REDUCTION,
    standing_at.UPDATE: UPDATE,
    standing_at.DEVICE: DEVICE,
    standing_at.BETWEEN: BETWEEN,
}
"""Of entries that are words; others are those of an evaluation."""


@contextmanager
def recorded_work(parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> Iterator[None]:
    """Returns a context manager in which the steps of a run are recorded in `folder`, the run's. No rank waits for another.

    feed: of the run's samples, for which a step waits. notes: of the run; a file that cannot be written ends the recording
    with one more, and nothing else.
    """
    start = Start(
        parts.world.rank,
        parts.world.size,
        parts.groups["pp"].coord,
        socket.gethostname(),
        os.getpid(),
        parts.world.device.type,
        time.time(),
        sum(entry.numel for entry in parts.registry.trainable),
        {layer.name: _likeness(layer) for layer in parts.layers},
    )
    file = WorkFile(folder / WORK / f"rank-{parts.world.rank}.jsonl", start, notes)
    recorder = WorkRecorder(parts, feed, file.add)
    recorder.attach()
    try:
        yield
    except BaseException:  # its reason is told first: a file system that hangs may have caused it
        try:
            recorder.leave()
        finally:
            file.leave()
        raise
    try:
        recorder.detach()
    finally:
        file.close()


class WorkRecorder:
    """Follows a run's step_progress and waits. feed: what a step waits for. add: takes a line of the file."""

    def __init__(self, parts: Parts, feed: Feed | None, add: Callable[[str], None]) -> None:
        self._progress = parts.groups.progress
        self._device = parts.world.device.torch_device
        self._feed = feed
        self._add = add
        self._samples = WorkSamples()
        self._entries: dict[object, int] = {}
        self._spent = self._samples.spent
        self._place = self._base = self._between = self._samples.place(BETWEEN)
        self._data, self._beginning = self._samples.place(DATA), self._samples.place(BEGINNING)
        self._is_detailed = False
        self._since = self._began = self._window_began = self._step_began = time.perf_counter()
        self._to_epoch = time.time() - time.perf_counter()
        self._usage = used()
        self._ends = {self._between, self._samples.place(EVALUATION)}
        self._step = self._last = 0
        self._outgoing = f" {parts.groups['pp'].coord}>"
        self._numbers: dict[str, int] | None = None

    def attach(self) -> None:
        """Starts to follow the run."""
        self._progress.step_progress.follow = self.entered
        self._progress.follow_wait = self.waited

    def detach(self) -> None:
        """Stops, and writes the last window."""
        self.entered(standing_at.BEGINNING)
        self.leave()
        self._write()

    def leave(self) -> None:
        """Stops, without the last window."""
        step_progress = self._progress.step_progress
        step_progress.follow = step_progress.follow_layer = step_progress.follow_output = self._progress.follow_wait = None

    def entered(self, entry: object) -> None:
        """Records that the previous entry is over, and `entry` begins."""
        now = time.perf_counter()
        self._spent[self._place] += now - self._since
        self._since = now
        if self._is_detailed:
            self._note_messages(entry, now)
        before = self._base
        try:
            self._place = self._base = self._entries[entry]
        except KeyError:
            self._place = self._base = self._entries[entry] = self._samples.place(_place_of(entry))
        if self._place == self._beginning:
            self._end_step(now, was_taken=before in self._ends)

    def called(self, layer: str) -> None:
        """Records that `layer` begins, in the forward, or in a recomputation; "" for none."""
        now = time.perf_counter()
        self._spent[self._place] += now - self._since
        self._since = now
        self._place = self._samples.layer(self._base, layer) if layer else self._base

    def made(self, layer: str, output: Any) -> None:
        """Hooks `output`, the output of `layer`, to record when the backward of that layer begins."""
        tensor = next((one for one in _tensors(output) if one.requires_grad and not one.is_leaf), None)
        if tensor is not None:
            tensor.register_hook(lambda _: self.called(layer))  # type: ignore[no-untyped-call]

    def waited(self, turn: Turn, since: float) -> None:
        """Records that a wait in `turn`, which began at `since`, is over."""
        now = time.perf_counter()
        self._since += now - since
        self._samples.waited(turn, now - since)
        if self._is_detailed and turn.peer is not None and turn.operation == "receive":
            self._samples.took(self._step, turn, now + self._to_epoch, now - since)

    def _note_messages(self, entry: object, now: float) -> None:
        """Records the end of the previous entry as the time at which its messages were handed over."""
        numbers = self._progress.numbers
        if self._numbers is not None:
            before, self._numbers = self._numbers, None
            for queue, number in numbers.items():
                if number != before.get(queue) and self._outgoing in queue:
                    self._samples.handed_over(self._step, queue, number, now + self._to_epoch)
        if type(entry) is Transfer and entry.op == "send":
            self._numbers = dict(numbers)

    def _end_step(self, now: float, *, was_taken: bool) -> None:
        """Ends the sample of the previous step, if one was taken, and begins the next one."""
        if was_taken and self._step:
            data_s = min(self._feed.wait_s if self._feed else 0.0, self._spent[self._between])
            self._spent[self._between] -= data_s
            self._spent[self._data] += data_s
            self._samples.end_step(now - self._step_began)
            self._last = self._step
        else:
            self._samples.forget_step()
        steps, seconds = self._samples.num_steps, now - self._window_began
        is_long = seconds >= max((now - self._began) * SHARE, LEAST_S) and steps >= LEAST_STEPS
        if steps > 0 and (is_long or seconds >= MOST_S):
            self._write()
        self._spent = self._samples.spent
        step_progress = self._progress.step_progress
        self._step = step_progress.step
        # By the number of the step: both ends of a message must note it, and windows of ranks end at other steps.
        self._is_detailed = self._step % DETAILED == 1 % DETAILED or now - self._step_began >= LONG_S
        self._step_began = now
        # Between the step's beginning and its first action stages tell each other what comes.
        self._numbers = dict(self._progress.numbers) if self._is_detailed else None
        step_progress.follow_layer = self.called if self._is_detailed else None
        step_progress.follow_output = self.made if self._is_detailed else None

    def _write(self) -> None:
        """Writes the samples so far, if there are any, as a window."""
        if not self._samples.num_steps:
            return
        now = time.perf_counter()
        usage = used()
        device_mb = torch.cuda.memory_allocated(self._device) / 2**20 if self._device.type == "cuda" else 0.0
        used_since = Usage(*(round(after - before, 6) for after, before in zip(usage, self._usage, strict=True)))
        self._add(line(self._samples.window(self._last, now + self._to_epoch, used_since, private_mb(), device_mb)))
        self._usage, self._window_began = usage, now
        self._samples.clear()


def _place_of(entry: object) -> str:
    """Returns the place to which the time of a list's entry is counted: an action's kind and chunk, messages, or a phase."""
    if isinstance(entry, Action):
        return f"{entry.kind.value}{entry.chunk}"
    if isinstance(entry, Transfer):
        return MESSAGES
    return _PLACES.get(str(entry), EVALUATION)


def _likeness(layer: Layer) -> str:
    """Returns a text that is equal for layers that do the same work: kinds and sizes of their parts."""
    kinds = Counter(type(module).__name__ for module in layer.module.modules())
    elements = sum(prod(parameter.shape) for parameter in layer.module.parameters())
    made_of = " ".join(f"{kind}x{count}" if count > 1 else kind for kind, count in kinds.items())
    return f"{made_of} {elements}"


def _tensors(output: Any) -> Sequence[Tensor]:
    """Returns the tensors of a layer's output that are found easily."""
    if isinstance(output, Tensor):
        return (output,)
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [one for one in values if isinstance(one, Tensor)]

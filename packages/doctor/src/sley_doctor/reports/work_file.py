"""A rank's file of windows (`work_record`), with a limited number of lines, however long the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from sley_core.whole_files import write_atomically
from sley_doctor.reports.work_record import (
    NOTHING,
    Queue,
    SeenMessage,
    Spread,
    Start,
    Usage,
    Window,
    line,
    record_in,
    roundness,
)

if TYPE_CHECKING:
    from sley_core.comm.guard import Turn


MOST_STEPS = 64  # of a window are kept; quartiles of more steps are hardly others, and take longer to find
MOST_MESSAGES = 64  # of a window are kept by queue


class _Waits:
    """Holds what a rank has waited for in one queue."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.number = turn.number - 1
        self.exchanges = self.num_bytes = 0


class WorkSamples:
    """Collects the samples of a window. spent: seconds of the step so far, by the number of a place; a separate list for each
    step. num_steps: in the window. sent, taken: messages by queue.
    """

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.num_steps = 0
        self.sent: dict[str, list[SeenMessage]] = {}
        self.taken: dict[str, list[SeenMessage]] = {}
        self._places: dict[str, int] = {}
        self._layers: dict[tuple[int, str], int] = {}
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []
        self._waits: dict[str, _Waits] = {}

    def place(self, name: str) -> int:
        """Returns the number of a place."""
        if name not in self._places:
            self._places[name] = self._one_more()
        return self._places[name]

    def layer(self, base: int, name: str) -> int:
        """Returns the number of the place for the work of layer `name` within place `base`."""
        try:
            return self._layers[base, name]
        except KeyError:
            self._layers[base, name] = self._one_more()
            return self._layers[base, name]

    def waited(self, turn: Turn, seconds: float) -> None:
        """Counts a wait."""
        found = self._waits.get(turn.queue)
        if found is None:
            found = self._waits[turn.queue] = _Waits(turn)
        found.now_s += seconds
        if turn.number > found.number:  # an exchange may be waited for at its start and at its end
            found.number = turn.number
            found.exchanges += 1
            found.num_bytes += turn.num_bytes

    def handed_over(self, step: int, queue: str, number: int, time_s: float) -> None:
        """Records the last message that an entry has sent."""
        keep_roundest(self.sent, queue, SeenMessage(step, number, round(time_s, 6)))

    def took(self, step: int, turn: Turn, time_s: float, waited_s: float) -> None:
        """Records a message that has arrived."""
        keep_roundest(self.taken, turn.queue, SeenMessage(step, turn.number, round(time_s, 6), round(waited_s, 6)))

    def end_step(self, seconds: float) -> None:
        """Keeps the step as a sample, which took `seconds`."""
        self.num_steps += 1
        if self.num_steps <= MOST_STEPS:
            self._steps.append(self.spent)
            self._seconds.append(seconds)
            for found in self._waits.values():
                found.steps_s.append(found.now_s)
        self.forget_step()

    def forget_step(self) -> None:
        """Begins a new step, discarding the present one."""
        self.spent = [0.0] * len(self.spent)
        for found in self._waits.values():
            found.now_s = 0.0

    def clear(self) -> None:
        """Begins a new window; places keep their numbers."""
        self.num_steps = 0
        self.sent, self.taken = {}, {}
        self._steps, self._seconds = [], []
        for found in self._waits.values():
            found.steps_s, found.exchanges, found.num_bytes = [], 0, 0

    def window(self, last: int, time_s: float, usage: Usage, private_mb: float, device_mb: float) -> Window:
        """Returns the window of these samples, the last of which is step `last`, as written at `time_s`."""
        num_steps, missing = max(1, self.num_steps), len(self._steps)
        names = {number: name for name, number in self._places.items()}
        inside: dict[int, list[int]] = {}
        layers: dict[str, dict[str, Spread]] = {}
        for (base, layer), number in self._layers.items():
            inside.setdefault(base, []).append(number)
            if some := [step[number] for step in self._steps if _at(step, number)]:  # of the steps that have it
                layers.setdefault(names[base], {})[layer] = spread(some)
        work = {
            name: spread([sum(_at(step, number) for number in (place, *inside.get(place, ()))) for step in self._steps])
            for name, place in self._places.items()
        }
        # 0 in steps before a queue first occurred.
        waits = {queue: spread([0.0] * (missing - len(each.steps_s)) + each.steps_s) for queue, each in self._waits.items()}
        queues = {
            queue: Queue(each.turn.members.ranks, each.turn.peer, each.exchanges / num_steps, each.num_bytes / num_steps)
            for queue, each in self._waits.items()
        }
        return Window(
            last - self.num_steps + 1,
            last,
            time_s,
            spread(self._seconds),
            work,
            layers,
            waits,
            queues,
            usage,
            private_mb,
            device_mb,
            self.sent,
            self.taken,
        )

    def _one_more(self) -> int:
        self.spent.append(0.0)
        return len(self.spent) - 1


def spread(values: Iterable[float]) -> Spread:
    """Returns the quartiles of `values`; each is one of them."""
    some = sorted(values)
    last = len(some) - 1
    if last < 0:
        return NOTHING
    return Spread(*(round(some[round(last * share)], 7) for share in (0.25, 0.5, 0.75)))


def _at(step: list[float], number: int) -> float:
    """Returns the seconds at place `number`; 0 in a step from before that place was known."""
    return step[number] if number < len(step) else 0.0


def keep_roundest(messages: dict[str, list[SeenMessage]], queue: str, one: SeenMessage) -> None:
    """Adds `one` to the messages of `queue`. If there are too many, keeps those of the roundest steps in binary, the same at
    both ends of a queue, wherever their windows begin.
    """
    kept = messages.setdefault(queue, [])
    if len(kept) >= MOST_MESSAGES:
        if roundness(one.step) < min(roundness(other.step) for other in kept):
            return
        kept.append(one)
        while len(kept) > MOST_MESSAGES and len({roundness(other.step) for other in kept}) > 1:
            least = min(roundness(other.step) for other in kept)
            kept[:] = [other for other in kept if roundness(other.step) > least]
        del kept[MOST_MESSAGES:]
    else:
        kept.append(one)


NEWEST = 1 / 8
"""Of the windows that are left: these stay as they were written, so that what changes now is seen at once."""

_Value = TypeVar("_Value")


def fewer(windows: Sequence[Window], most: int) -> list[Window]:
    """Returns at most `most` windows of the same steps: the newest unchanged, older ones merged evenly by steps."""
    if len(windows) <= most:
        return list(windows)
    num_newest = int(most * NEWEST)
    older, newest = windows[: len(windows) - num_newest], windows[len(windows) - num_newest :]
    wanted = most - num_newest
    first, num_steps = older[0].first, older[-1].last - older[0].first + 1
    groups: dict[int, list[Window]] = {}
    for one in older:
        groups.setdefault((one.last - first) * wanted // num_steps, []).append(one)
    return [*map(merged, groups.values()), *newest]


def merged(windows: Sequence[Window]) -> Window:
    """Returns one window with all steps of `windows`, which are in ascending order."""
    last = windows[-1]
    return Window(
        windows[0].first,
        last.last,
        last.time,
        _mean([(one.seconds, one.num_steps) for one in windows]),
        _means(windows, lambda one: one.work),
        {place: _over(some) for place, some in _by_name(windows, lambda one: one.layers).items()},
        _means(windows, lambda one: one.waits),
        {name: _queue(some) for name, some in _by_name(windows, lambda one: one.queues).items()},
        Usage(*(round(sum(counts), 6) for counts in zip(*(one.usage for one in windows), strict=True))),
        last.private_mb,
        last.device_mb,
        _messages(windows, lambda one: one.sent),
        _messages(windows, lambda one: one.taken),
    )


def _by_name(windows: Sequence[Window], of: Callable[[Window], Mapping[str, _Value]]) -> dict[str, list[tuple[Window, _Value]]]:
    """Collects the values that `of` gives for each window, by name, each with its window."""
    found: dict[str, list[tuple[Window, _Value]]] = {}
    for one in windows:
        for name, value in of(one).items():
            found.setdefault(name, []).append((one, value))
    return found


def _means(windows: Sequence[Window], of: Callable[[Window], Mapping[str, Spread]]) -> dict[str, Spread]:
    return _over([(one, of(one)) for one in windows])


def _over(found: Sequence[tuple[Window, Mapping[str, Spread]]]) -> dict[str, Spread]:
    """Returns the means of the windows' spreads, by name."""
    names = dict.fromkeys(name for _, some in found for name in some)
    return {name: _mean([(some[name], one.num_steps) for one, some in found if name in some]) for name in names}


def _mean(found: Sequence[tuple[Spread, int]]) -> Spread:
    """Returns the mean of spreads, weighted by their numbers of steps."""
    total = sum(steps for _, steps in found)
    if not total:
        return NOTHING
    return Spread(*(round(sum(one[place] * steps for one, steps in found) / total, 7) for place in range(3)))


def _queue(found: Sequence[tuple[Window, Queue]]) -> Queue:
    """Returns the last queue, with numbers of exchanges and bytes per step averaged over all windows."""
    steps = sum(one.num_steps for one, _ in found)
    queue = found[-1][1]
    exchanges = sum(one.exchanges * window.num_steps for window, one in found) / steps
    num_bytes = sum(one.num_bytes * window.num_steps for window, one in found) / steps
    return Queue(queue.ranks, queue.peer, exchanges, num_bytes)


def _messages(
    windows: Sequence[Window], of: Callable[[Window], Mapping[str, Sequence[SeenMessage]]]
) -> dict[str, list[SeenMessage]]:
    """Collects messages of all windows by queue, keeping those of the roundest steps."""
    found: dict[str, list[SeenMessage]] = {}
    for one in windows:
        for queue, some in of(one).items():
            for message in some:
                keep_roundest(found, queue, message)
    return found


MOST_LINES = 512  # of a file; then neighbours among its older windows become one
PATIENCE_S = 1.0  # for the end of a file whose run fails: its file system may hang, and be the reason

FEWER_LINES = 448
"""How many stay by then: windows of a long run have about as many steps each, and the next time is hours away."""


class WorkFile:
    """Appends lines to a file, each at once, until a write fails; then `notes` has the reason.

    The file is created with the first line: a run that fails before that leaves a folder that the next run may use. A long file
    is made short, which takes half a second if a rank has many layers, and is needed once in hours.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._start, self._notes = path, start, notes
        self._file: int | None = None
        self._is_over = False
        self._num_lines = 0

    def add(self, text: str) -> None:
        """Adds a line, and shortens the file if it has become long."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._open()
                self._num_lines = self._path.read_bytes().count(b"\n")  # of earlier starts
                text = "\n" + line(self._start) + text  # behind a line that an earlier start has written in part
            left = memoryview(text.encode())
            while left:
                assert self._file is not None, self._path
                left = left[os.write(self._file, left) :]
            self._num_lines += text.count("\n")
            if self._num_lines > MOST_LINES:
                self._shorten()
        except Exception as error:  # whatever it is: a run does not end because of its record
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._notes.append(f"who is slow is not recorded: cannot write `{self._path}`: {reason}")
            self.close()

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        self._is_over = True
        with suppress(OSError):  # what a network file system could not keep; nothing reads on from here
            self._close_file()

    def leave(self) -> None:
        """Closes the file as `close` does, but stops waiting after `PATIENCE_S`; the closing continues in a thread."""
        closing = Thread(target=self.close, name="sley-work-file", daemon=True)
        closing.start()
        closing.join(PATIENCE_S)

    def _close_file(self) -> None:
        file, self._file = self._file, None  # first: its number is free, and perhaps another's, also where this fails
        if file is not None:
            os.close(file)

    def _shorten(self) -> None:
        """Rewrites the windows of this start, merging older ones. A reader sees either the old file or the new one."""
        record = record_in(self._path)
        if record is None:
            raise ValueError("the start that this rank wrote is gone")
        windows = fewer(record.windows, FEWER_LINES - 1)
        write_atomically(self._path, "".join([line(record.start), *map(line, windows)]))
        self._num_lines = 1 + len(windows)
        self._close_file()
        self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # which could say where this writes
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_link, 0o644)

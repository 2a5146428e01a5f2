"""A rank's file of windows (`work_record`), whose number of lines is limited, however long the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from sley_core.whole_files import write_atomically
from sley_doctor.reports.work_record import (
    ZERO_SPREAD,
    MessageRecord,
    Queue,
    Spread,
    Start,
    Usage,
    Window,
    format_line,
    read_record,
    roundness,
)

if TYPE_CHECKING:
    from sley_core.comm.guard import Turn


MAX_STEPS = 64  # steps kept per window; more steps hardly change the quartiles
MAX_MESSAGES = 64  # messages kept per window and queue


class _QueueWaits:
    """Holds a rank's waits in one queue."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.number = turn.number - 1
        self.exchanges = self.num_bytes = 0


class WorkSamples:
    """Collects the samples of a window. spent: seconds of the current step by location index, in a new list for each step.
    num_steps: the number of steps in the window. sent, received: sent and received messages by queue.
    """

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.num_steps = 0
        self.sent: dict[str, list[MessageRecord]] = {}
        self.received: dict[str, list[MessageRecord]] = {}
        self._locations: dict[str, int] = {}
        self._layers: dict[tuple[int, str], int] = {}
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []
        self._waits: dict[str, _QueueWaits] = {}

    def location_index(self, name: str) -> int:
        """Returns the index of the location `name`; adds it if it is new."""
        if name not in self._locations:
            self._locations[name] = self._add_index()
        return self._locations[name]

    def layer_index(self, base: int, name: str) -> int:
        """Returns the index of the work of layer `name` within the location at index `base`."""
        try:
            return self._layers[base, name]
        except KeyError:
            self._layers[base, name] = self._add_index()
            return self._layers[base, name]

    def record_wait(self, turn: Turn, seconds: float) -> None:
        """Adds a wait of `seconds` in the exchange `turn`."""
        waits = self._waits.get(turn.queue)
        if waits is None:
            waits = self._waits[turn.queue] = _QueueWaits(turn)
        waits.now_s += seconds
        if turn.number > waits.number:  # a rank may wait for an exchange both at its start and at its end
            waits.number = turn.number
            waits.exchanges += 1
            waits.num_bytes += turn.num_bytes

    def record_sent(self, step: int, queue: str, number: int, time_s: float) -> None:
        """Records the last message that an action has sent."""
        add_roundest(self.sent, queue, MessageRecord(step, number, round(time_s, 6)))

    def record_received(self, step: int, turn: Turn, time_s: float, waited_s: float) -> None:
        """Records a received message."""
        add_roundest(self.received, turn.queue, MessageRecord(step, turn.number, round(time_s, 6), round(waited_s, 6)))

    def end_step(self, seconds: float) -> None:
        """Keeps the current step, which took `seconds`, as a sample."""
        self.num_steps += 1
        if self.num_steps <= MAX_STEPS:
            self._steps.append(self.spent)
            self._seconds.append(seconds)
            for waits in self._waits.values():
                waits.steps_s.append(waits.now_s)
        self.discard_step()

    def discard_step(self) -> None:
        """Discards the current step and starts a new one."""
        self.spent = [0.0] * len(self.spent)
        for waits in self._waits.values():
            waits.now_s = 0.0

    def start_window(self) -> None:
        """Starts a new window; locations keep their indices."""
        self.num_steps = 0
        self.sent, self.received = {}, {}
        self._steps, self._seconds = [], []
        for waits in self._waits.values():
            waits.steps_s, waits.exchanges, waits.num_bytes = [], 0, 0

    def build_window(self, last: int, time_s: float, usage: Usage, private_mb: float, device_mb: float) -> Window:
        """Returns the window of the samples, which end with step `last`. time_s: the time of writing."""
        num_steps, num_samples = max(1, self.num_steps), len(self._steps)
        names = {number: name for name, number in self._locations.items()}
        layer_indices: dict[int, list[int]] = {}
        layers: dict[str, dict[str, Spread]] = {}
        for (base, layer), number in self._layers.items():
            layer_indices.setdefault(base, []).append(number)
            if seconds := [step[number] for step in self._steps if _seconds_at(step, number)]:
                layers.setdefault(names[base], {})[layer] = compute_quartiles(seconds)
        work = {
            name: compute_quartiles(
                [
                    sum(_seconds_at(step, number) for number in (location, *layer_indices.get(location, ())))
                    for step in self._steps
                ]
            )
            for name, location in self._locations.items()
        }
        # 0 in steps before a queue first occurred.
        waits = {
            queue: compute_quartiles([0.0] * (num_samples - len(queue_waits.steps_s)) + queue_waits.steps_s)
            for queue, queue_waits in self._waits.items()
        }
        queues = {
            queue: Queue(
                queue_waits.turn.members.ranks,
                queue_waits.turn.peer,
                queue_waits.exchanges / num_steps,
                queue_waits.num_bytes / num_steps,
            )
            for queue, queue_waits in self._waits.items()
        }
        return Window(
            last - self.num_steps + 1,
            last,
            time_s,
            compute_quartiles(self._seconds),
            work,
            layers,
            waits,
            queues,
            usage,
            private_mb,
            device_mb,
            self.sent,
            self.received,
        )

    def _add_index(self) -> int:
        self.spent.append(0.0)
        return len(self.spent) - 1


def compute_quartiles(values: Iterable[float]) -> Spread:
    """Returns the quartiles of `values`, without interpolation."""
    ordered = sorted(values)
    last = len(ordered) - 1
    if last < 0:
        return ZERO_SPREAD
    return Spread(*(round(ordered[round(last * share)], 7) for share in (0.25, 0.5, 0.75)))


def _seconds_at(step: list[float], index: int) -> float:
    """Returns the seconds at location `index`; 0 if the step is older than the location."""
    return step[index] if index < len(step) else 0.0


def add_roundest(messages: dict[str, list[MessageRecord]], queue: str, message: MessageRecord) -> None:
    """Adds `message` to the messages of `queue`. If there are too many, keeps those of the roundest steps (`roundness`): both
    ends of a queue then keep the same steps, wherever their windows begin.
    """
    queue_messages = messages.setdefault(queue, [])
    if len(queue_messages) >= MAX_MESSAGES:
        if roundness(message.step) < min(roundness(old.step) for old in queue_messages):
            return
        queue_messages.append(message)
        while len(queue_messages) > MAX_MESSAGES and len({roundness(old.step) for old in queue_messages}) > 1:
            min_roundness = min(roundness(old.step) for old in queue_messages)
            queue_messages[:] = [old for old in queue_messages if roundness(old.step) > min_roundness]
        del queue_messages[MAX_MESSAGES:]
    else:
        queue_messages.append(message)


NEWEST_SHARE = 1 / 8
"""The share of windows that are never merged, so that recent changes stay visible."""

_Value = TypeVar("_Value")


def merge_old_windows(windows: Sequence[Window], max_windows: int) -> list[Window]:
    """Returns at most `max_windows` windows with all steps of `windows`: the newest unchanged, older ones merged evenly by
    steps.
    """
    if len(windows) <= max_windows:
        return list(windows)
    num_newest = int(max_windows * NEWEST_SHARE)
    older, newest = windows[: len(windows) - num_newest], windows[len(windows) - num_newest :]
    max_older = max_windows - num_newest
    first, num_steps = older[0].first, older[-1].last - older[0].first + 1
    groups: dict[int, list[Window]] = {}
    for window in older:
        groups.setdefault((window.last - first) * max_older // num_steps, []).append(window)
    return [*map(merge_windows, groups.values()), *newest]


def merge_windows(windows: Sequence[Window]) -> Window:
    """Returns one window with all steps of `windows`, which must be in ascending order."""
    last = windows[-1]
    return Window(
        windows[0].first,
        last.last,
        last.time,
        _mean_spread([(window.seconds, window.num_steps) for window in windows]),
        _field_means(windows, lambda window: window.work),
        {location: _mean_by_name(values) for location, values in _group_by_name(windows, lambda window: window.layers).items()},
        _field_means(windows, lambda window: window.waits),
        {name: _mean_queue(values) for name, values in _group_by_name(windows, lambda window: window.queues).items()},
        Usage(*(round(sum(counts), 6) for counts in zip(*(window.usage for window in windows), strict=True))),
        last.private_mb,
        last.device_mb,
        _merge_messages(windows, lambda window: window.sent),
        _merge_messages(windows, lambda window: window.received),
    )


def _group_by_name(
    windows: Sequence[Window], get_values: Callable[[Window], Mapping[str, _Value]]
) -> dict[str, list[tuple[Window, _Value]]]:
    """Returns the values of one field of all windows by name, each with its window."""
    groups: dict[str, list[tuple[Window, _Value]]] = {}
    for window in windows:
        for name, value in get_values(window).items():
            groups.setdefault(name, []).append((window, value))
    return groups


def _field_means(windows: Sequence[Window], get_spreads: Callable[[Window], Mapping[str, Spread]]) -> dict[str, Spread]:
    return _mean_by_name([(window, get_spreads(window)) for window in windows])


def _mean_by_name(windows: Sequence[tuple[Window, Mapping[str, Spread]]]) -> dict[str, Spread]:
    """Returns the mean of the windows' spreads for each name."""
    names = dict.fromkeys(name for _, spreads in windows for name in spreads)
    return {
        name: _mean_spread([(spreads[name], window.num_steps) for window, spreads in windows if name in spreads])
        for name in names
    }


def _mean_spread(spreads: Sequence[tuple[Spread, int]]) -> Spread:
    """Returns the mean of `spreads`, weighted by their numbers of steps."""
    total = sum(num_steps for _, num_steps in spreads)
    if not total:
        return ZERO_SPREAD
    return Spread(*(round(sum(spread[index] * num_steps for spread, num_steps in spreads) / total, 7) for index in range(3)))


def _mean_queue(windows: Sequence[tuple[Window, Queue]]) -> Queue:
    """Returns the newest queue, with exchanges and bytes per step averaged over all windows."""
    steps = sum(window.num_steps for window, _ in windows)
    queue = windows[-1][1]
    exchanges = sum(item.exchanges * window.num_steps for window, item in windows) / steps
    num_bytes = sum(item.num_bytes * window.num_steps for window, item in windows) / steps
    return Queue(queue.ranks, queue.peer, exchanges, num_bytes)


def _merge_messages(
    windows: Sequence[Window], get_messages: Callable[[Window], Mapping[str, Sequence[MessageRecord]]]
) -> dict[str, list[MessageRecord]]:
    """Returns the messages of all windows by queue, limited to those of the roundest steps."""
    merged: dict[str, list[MessageRecord]] = {}
    for window in windows:
        for queue, messages in get_messages(window).items():
            for message in messages:
                add_roundest(merged, queue, message)
    return merged


MAX_LINES = 512  # a longer file is shortened: neighbours among its older windows are merged
CLOSE_TIMEOUT_S = 1.0  # time limit for closing the file of a failed run, whose file system may hang

SHORTENED_LINES = 448
"""The number of lines after shortening. In a long run the next shortening is hours away."""


class WorkFile:
    """Appends lines to a file without buffering, until a write fails; the reason is then added to `notes`.

    The file is created with the first line: a run that fails earlier leaves a folder that the next run may use. A long file is
    shortened, which takes half a second if a rank has many layers, and happens once in hours.
    """

    def __init__(self, path: Path, start: Start, notes: list[str]) -> None:
        self._path, self._start, self._notes = path, start, notes
        self._file: int | None = None
        self._is_over = False
        self._num_lines = 0

    def add(self, text: str) -> None:
        """Appends the line `text`, and shortens the file if it has more than MAX_LINES lines."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._open()
                self._num_lines = self._path.read_bytes().count(b"\n")  # of earlier starts
                text = "\n" + format_line(self._start) + text  # ends a line that an earlier start may have written in part
            remaining = memoryview(text.encode())
            while remaining:
                assert self._file is not None, self._path
                remaining = remaining[os.write(self._file, remaining) :]
            self._num_lines += text.count("\n")
            if self._num_lines > MAX_LINES:
                self._shorten()
        except Exception as error:  # any error: a failure to record must not end the run
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._notes.append(f"slow ranks are not recorded: cannot write `{self._path}`: {reason}")
            self.close()

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        self._is_over = True
        with suppress(OSError):  # a network file system may report a late failure here
            self._close_file()

    def abandon(self) -> None:
        """Closes the file in a thread, for which it waits at most `CLOSE_TIMEOUT_S`."""
        closing = Thread(target=self.close, name="sley-work-file", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _close_file(self) -> None:
        file, self._file = self._file, None  # reset first: the descriptor is free even if `close` fails, and may be reused
        if file is not None:
            os.close(file)

    def _shorten(self) -> None:
        """Rewrites the file with the windows of this start, older ones merged. A reader sees either the old or the new file."""
        record = read_record(self._path)
        if record is None:
            raise ValueError("the start that this rank wrote is missing")
        windows = merge_old_windows(record.windows, SHORTENED_LINES - 1)
        write_atomically(self._path, "".join([format_line(record.start), *map(format_line, windows)]))
        self._num_lines = 1 + len(windows)
        self._close_file()
        self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # a link could redirect the writes
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_link, 0o644)

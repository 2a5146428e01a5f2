"""Merges windows: neighbours become one window of the same steps.

The result is what a reader would compute from both (`slow.blocks`): numbers are means over steps, of the windows that
have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sley_doctor.reports.work_record import NOTHING, Queue, SeenMessage, Spread, Usage, Window
from sley_doctor.reports.work_samples import keep_roundest

NEWEST = 1 / 8
"""Of the windows that are left: these stay as they were written, so that what changes now is seen at once."""

_Value = TypeVar("_Value")


def fewer(windows: Sequence[Window], most: int) -> list[Window]:
    """Returns at most `most` windows of the same steps: the newest unchanged, older ones merged into about equal numbers of
    steps.
    """
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
    usage = [one.usage for one in windows]
    return Window(
        windows[0].first,
        last.last,
        last.time,
        _mean([(one.seconds, one.num_steps) for one in windows]),
        _means(windows, lambda one: one.work),
        {place: _over(some) for place, some in _by_name(windows, lambda one: one.layers).items()},
        _means(windows, lambda one: one.waits),
        {name: _queue(some) for name, some in _by_name(windows, lambda one: one.queues).items()},
        Usage(
            round(sum(one.user_s for one in usage), 6),
            round(sum(one.system_s for one in usage), 6),
            sum(one.minor for one in usage),
            sum(one.major for one in usage),
            sum(one.switches for one in usage),
        ),
        last.private_mb,
        last.device_mb,
        _messages(windows, lambda one: one.sent),
        _messages(windows, lambda one: one.taken),
    )


def _by_name(
    windows: Sequence[Window], of: Callable[[Window], Mapping[str, _Value]]
) -> dict[str, list[tuple[Window, _Value]]]:
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
    return Queue(queue.group, queue.ranks, queue.peer, exchanges, num_bytes)


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

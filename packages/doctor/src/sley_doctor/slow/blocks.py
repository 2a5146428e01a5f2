"""The records of all ranks over the same steps: windows of ranks end at other steps, so each is cut to stretches that all have.

rank 0   |--- window ---|------ window ------|
rank 1   |------- window --------|- window --|
blocks   |------- block ---------|-- block --|     those of the rank with the fewest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sley_doctor.reports.work_record import DEVICE, NOTHING, Queue, Spread, Start, Usage, Window, WorkRecord

MOST_BLOCKS = 60
"""Of a run, however long."""

MOST_DEVICE = 0.03
"""Of a step: a host that waits longer for its device is not what the step waits for."""


@dataclass(frozen=True)
class RankWork:
    """Holds what one rank did in the steps of a block, as `Window` says, a mean over windows.

    user_s, system_s, faults, switches: of a step, see `Usage`; faults of both kinds.
    """

    start: Start
    seconds: Spread
    work: Mapping[str, Spread]
    layers: Mapping[str, Mapping[str, Spread]]
    waits: Mapping[str, Spread]
    queues: Mapping[str, Queue]
    user_s: float
    system_s: float
    faults: float
    switches: float

    @property
    def working_s(self) -> float:
        """Seconds of a step at work."""
        return sum(one.middle for place, one in self.work.items() if place != DEVICE)

    @property
    def waiting_s(self) -> float:
        """Seconds of a step in which the host waits for other ranks."""
        return sum(one.middle for one in self.waits.values())

    @property
    def device_s(self) -> float:
        """Seconds of a step in which the host waits for its device: for its kernels, or through them for other ranks."""
        return self.work.get(DEVICE, NOTHING).middle


@dataclass(frozen=True)
class Block:
    """Holds steps `first` to `last` of all ranks, by rank."""

    first: int
    last: int
    ranks: Mapping[int, RankWork]

    @property
    def num_steps(self) -> int:
        """How many steps it has."""
        return self.last - self.first + 1

    @property
    def step_s(self) -> float:
        """How long a step takes, as most ranks say."""
        return middle(one.seconds.middle for one in self.ranks.values())

    def has_time_left(self, rank: int) -> bool:
        """Returns whether the host of `rank` waits for its device: longer work of the host then makes no step longer."""
        return self.ranks[rank].device_s > MOST_DEVICE * self.step_s


def blocks_of(records: Sequence[WorkRecord]) -> list[Block]:
    """Returns the blocks in which all of `records` have steps, ascending, at most MOST_BLOCKS; none where a rank has recorded
    nothing.
    """
    if not records or not all(record.windows for record in records):
        return []
    coarsest = min(records, key=lambda record: len(record.windows)).windows
    first = max(record.windows[0].first for record in records)
    last = min(record.windows[-1].last for record in records)
    size = math.ceil(len(coarsest) / MOST_BLOCKS)
    ends = [coarsest[min(at + size, len(coarsest)) - 1].last for at in range(0, len(coarsest), size)]
    begins = [coarsest[at].first for at in range(0, len(coarsest), size)]
    cut = [(max(begin, first), min(end, last)) for begin, end in zip(begins, ends, strict=True)]
    return [block_of(records, *one) for one in cut if one[0] <= one[1]]


def block_of(records: Sequence[WorkRecord], first: int, last: int) -> Block:
    """Returns steps `first` to `last` of all `records`, each of which has windows there."""
    return Block(first, last, {record.start.rank: _work(record, first, last) for record in records})


def _work(record: WorkRecord, first: int, last: int) -> RankWork:
    inside = [(window, min(window.last, last) - max(window.first, first) + 1) for window in record.within(first, last)]
    layers = {
        place: _joined(inside, lambda window, place=place: window.layers.get(place, {}))  # type: ignore[misc]
        for place in dict.fromkeys(place for window, _ in inside for place in window.layers)
    }
    return RankWork(
        record.start,
        _mean([(window.seconds, steps) for window, steps in inside]),
        _joined(inside, lambda window: window.work),
        layers,
        _joined(inside, lambda window: window.waits),
        {queue: one for window, _ in inside for queue, one in window.queues.items()},
        *_per_step([(window.usage, steps / window.num_steps) for window, steps in inside], last - first + 1),
    )


def _joined(inside: Sequence[tuple[Window, int]], of: Callable[[Window], Mapping[str, Spread]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for window, _ in inside for name in of(window))
    return {
        name: _mean([(of(window)[name], steps) for window, steps in inside if name in of(window)]) for name in names
    }


def _mean(found: Sequence[tuple[Spread, int]]) -> Spread:
    """Returns the mean of spreads, weighted by their numbers of steps."""
    total = sum(steps for _, steps in found)
    if not total:
        return NOTHING
    return Spread(*(sum(one[place] * steps for one, steps in found) / total for place in range(3)))


def _per_step(found: Sequence[tuple[Usage, float]], steps: int) -> tuple[float, float, float, float]:
    def sum_of(name: str) -> float:
        return float(sum(getattr(usage, name) * share for usage, share in found)) / steps

    return sum_of("user_s"), sum_of("system_s"), sum_of("minor") + sum_of("major"), sum_of("switches")


def middle(values: Iterable[float]) -> float:
    """Returns the median of `values`, the lower one of two; 0 without any."""
    some = sorted(values)
    return some[(len(some) - 1) // 2] if some else 0.0

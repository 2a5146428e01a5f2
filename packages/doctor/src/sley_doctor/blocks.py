"""Blocks: the records of all ranks over the same steps. The windows of ranks end at different steps, so they are cut to fit.

rank 0   |--- window ---|------ window ------|
rank 1   |------- window --------|- window --|
blocks   |------- block ---------|-- block --|     the windows of the rank with the fewest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sley_doctor.work_record import (
    BETWEEN,
    DATA,
    DEVICE,
    EVALUATION,
    MESSAGES,
    UPDATE,
    ZERO_SPREAD,
    Spread,
    Start,
    Window,
    WorkRecord,
)

MAX_BLOCKS = 60  # limit of blocks per run, however long
MAX_DEVICE_SHARE = 0.03  # share of a step: if a host waits longer for its device, the host does not limit the step


@dataclass(frozen=True)
class RankWork(Window):
    """Holds one rank's measurements in a block, the means over its windows."""

    start: Start

    @property
    def working_s(self) -> float:
        """Returns the seconds of work per step."""
        return sum(spread.median for location, spread in self.work.items() if location != DEVICE)

    @property
    def waiting_s(self) -> float:
        """Returns the seconds per step in which the host waits for other ranks."""
        return self.waits.median

    @property
    def device_s(self) -> float:
        """Returns the seconds per step in which the host waits for its device, whose kernels may wait for other ranks."""
        return self.work.get(DEVICE, ZERO_SPREAD).median


@dataclass(frozen=True)
class Block:
    """Holds the work of all ranks in steps `first` to `last`, by rank."""

    first: int
    last: int
    ranks: Mapping[int, RankWork]

    @property
    def num_steps(self) -> int:
        """Returns the number of steps in the block."""
        return self.last - self.first + 1

    @property
    def step_s(self) -> float:
        """Returns the seconds per step, as the median over ranks."""
        return median(work.seconds.median for work in self.ranks.values())

    def has_idle_host(self, rank: int) -> bool:
        """Returns whether the host of `rank` waits for its device, so more work on the host would not lengthen a step."""
        return self.ranks[rank].device_s > MAX_DEVICE_SHARE * self.step_s


def build_blocks(records: Sequence[WorkRecord]) -> list[Block]:
    """Returns at most MAX_BLOCKS blocks of steps that all `records` cover, ascending; none if a rank has no windows."""
    if not records or not all(record.windows for record in records):
        return []
    coarsest = min(records, key=lambda record: len(record.windows)).windows
    first = max(record.windows[0].first for record in records)
    last = min(record.windows[-1].last for record in records)
    size = math.ceil(len(coarsest) / MAX_BLOCKS)
    ends = [coarsest[min(index + size, len(coarsest)) - 1].last for index in range(0, len(coarsest), size)]
    starts = [coarsest[index].first for index in range(0, len(coarsest), size)]
    ranges = [(max(start, first), min(end, last)) for start, end in zip(starts, ends, strict=True)]
    return [
        Block(start, end, {record.start.rank: _rank_work(record, start, end) for record in records})
        for start, end in ranges
        if start <= end
    ]


def _rank_work(record: WorkRecord, first: int, last: int) -> RankWork:
    """Returns the means of a rank's work over its windows in steps `first` to `last`, each by its number of these steps."""
    windows = record.windows_between(first, last)
    num_steps = [min(window.last, last) - max(window.first, first) + 1 for window in windows]
    return RankWork(
        first,
        last,
        windows[-1].time,
        _mean_spread(list(zip((window.seconds for window in windows), num_steps, strict=True))),
        _means_by_name(list(zip((window.work for window in windows), num_steps, strict=True))),
        _mean_spread(list(zip((window.waits for window in windows), num_steps, strict=True))),
        record.start,
    )


def _means_by_name(values: Sequence[tuple[Mapping[str, Spread], int]]) -> dict[str, Spread]:
    """Returns the mean of the spreads of each name, weighted by steps."""
    names = dict.fromkeys(name for spreads, _ in values for name in spreads)
    return {name: _mean_spread([(spreads[name], num) for spreads, num in values if name in spreads]) for name in names}


def _mean_spread(spreads: Sequence[tuple[Spread, int]]) -> Spread:
    total = sum(num_steps for _, num_steps in spreads)
    return Spread(*(sum(spread[index] * num_steps for spread, num_steps in spreads) / total for index in range(3)))


def median(values: Iterable[float]) -> float:
    """Returns the median of `values`, the lower of two middle values; 0 without values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


MAX_RATIO = 1.5  # comparable ranks may differ by this factor without being slow

MAX_FAR_RATIO = 3.0
"""The same for ranks of other stages, which have other layers and neighbours."""

_COMMON_LOCATIONS = frozenset({DATA, BETWEEN, EVALUATION})  # locations where all ranks do comparable work
_CHUNK_PREFIXES = "FBIW"  # first letters of locations where layers run


class Excess(NamedTuple):
    """Excess work: `seconds` per step more than comparable work, which takes usual_s."""

    location: str
    seconds: float
    usual_s: float


def find_excesses(block: Block, rank: int) -> list[Excess]:
    """Returns the locations where `rank` works longer than comparable ranks, the largest excess first.

    The comparison depends on the location:

    * a chunk, the update, messages: with ranks of the same stage, which do the same work on other samples or shards
    * the same in a stage of one rank: with the other stages, by a larger ratio; the update is scaled by elements
    * data, work between steps, evaluations: with all other ranks
    """
    work, works = block.ranks[rank], [candidate for number, candidate in block.ranks.items() if number != rank]
    peers = [candidate for candidate in works if candidate.start.stage == work.start.stage]
    excesses = (_find_excess(work, peers, works, location) for location in work.work if location != DEVICE)
    return sorted((excess for excess in excesses if excess is not None), key=lambda excess: -excess.seconds)


def _find_excess(work: RankWork, peers: list[RankWork], works: list[RankWork], location: str) -> Excess | None:
    """Returns the excess of a rank's time at `location` over comparable ranks; None if there is no excess."""
    spent, ratio = work.work[location], MAX_RATIO
    if location in _COMMON_LOCATIONS or peers:
        comparable = works if location in _COMMON_LOCATIONS else peers
        times = [candidate.work.get(location, ZERO_SPREAD) for candidate in comparable]
    elif location[0] in _CHUNK_PREFIXES or location in (UPDATE, MESSAGES):
        ratio = MAX_FAR_RATIO
        # A rank that steps more elements than another needs proportionally longer for its update.
        factors = [
            max(1.0, work.start.trained / max(1, candidate.start.trained)) if location == UPDATE else 1.0 for candidate in works
        ]
        times = [
            Spread(*(value * factor for value in candidate.work[location]))
            for candidate, factor in zip(works, factors, strict=True)
            if location in candidate.work
        ]
    else:
        return None
    usual = _median_spread(times)
    if not times or not _exceeds(spent, usual, ratio):
        return None
    return Excess(location, spent.median - usual.median, usual.median)


def _median_spread(spreads: Iterable[Spread]) -> Spread:
    """Returns the median of each quartile over `spreads`."""
    items = list(spreads)
    return Spread(*(median(item[index] for item in items) for index in range(3)))


def _exceeds(spent: Spread, usual: Spread, ratio: float) -> bool:
    """Returns whether `spent` exceeds `usual` by `ratio`, and by more than the spread of steps: its lower quartile exceeds
    their median, and its median exceeds their upper quartile.
    """
    return spent.median > max(ratio * usual.median, usual.high) and spent.low > usual.median

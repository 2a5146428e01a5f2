"""The records of all ranks over the same steps: windows of ranks end at other steps, so each is cut to stretches that all have.

rank 0   |--- window ---|------ window ------|
rank 1   |------- window --------|- window --|
blocks   |------- block ---------|-- block --|     those of the rank with the fewest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sley_doctor.reports.work_file import merged
from sley_doctor.reports.work_record import (
    BETWEEN,
    DATA,
    DEVICE,
    EVALUATION,
    MESSAGES,
    NOTHING,
    UPDATE,
    Queue,
    Spread,
    Start,
    Usage,
    WorkRecord,
)

MOST_BLOCKS = 60  # of a run, however long
MOST_DEVICE = 0.03  # of a step: a host that waits longer for its device is not what the step waits for


@dataclass(frozen=True)
class RankWork:
    """Holds what one rank did in the steps of a block, as `Window` says, a mean over windows. user_s, system_s, faults: of a
    step, see `Usage`.
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
    """Returns at most MOST_BLOCKS blocks in which all `records` have steps, ascending; none if a rank recorded nothing."""
    if not records or not all(record.windows for record in records):
        return []
    coarsest = min(records, key=lambda record: len(record.windows)).windows
    first = max(record.windows[0].first for record in records)
    last = min(record.windows[-1].last for record in records)
    size = math.ceil(len(coarsest) / MOST_BLOCKS)
    ends = [coarsest[min(at + size, len(coarsest)) - 1].last for at in range(0, len(coarsest), size)]
    begins = [coarsest[at].first for at in range(0, len(coarsest), size)]
    cut = [(max(begin, first), min(end, last)) for begin, end in zip(begins, ends, strict=True)]
    return [
        Block(begin, end, {record.start.rank: _work(record, begin, end) for record in records})
        for begin, end in cut
        if begin <= end
    ]


def _work(record: WorkRecord, first: int, last: int) -> RankWork:
    """Returns the work of a rank in steps `first` to `last`, where it has windows."""
    inside = []
    for window in record.within(first, last):
        begin, end = max(window.first, first), min(window.last, last)
        share = (end - begin + 1) / window.num_steps
        usage = Usage(*(count * share for count in window.usage))
        inside.append(replace(window, first=begin, last=end, usage=usage, sent={}, taken={}))
    whole = merged(inside)
    user_s, system_s, faults = (count / (last - first + 1) for count in whole.usage)
    return RankWork(record.start, whole.seconds, whole.work, whole.layers, whole.waits, whole.queues, user_s, system_s, faults)


def middle(values: Iterable[float]) -> float:
    """Returns the median of `values`, the lower one of two; 0 without any."""
    some = sorted(values)
    return some[(len(some) - 1) // 2] if some else 0.0


MOST_RATIO = 1.5  # likes take this much longer than each other and nobody is slow

MOST_FAR_RATIO = 3.0
"""As much where they are not quite alike: layers that other layers precede, weights of other shapes, other neighbours."""

_EVERYONES = frozenset({DATA, BETWEEN, EVALUATION})  # places where all ranks do the like
_OF_CHUNKS = "FBIW"  # how places begin where layers work


class Excess(NamedTuple):
    """Seconds of a step beyond comparable work, which takes usual_s. layer: "" if no single layer stands out."""

    place: str
    layer: str
    seconds: float
    usual_s: float


def excesses(block: Block, rank: int) -> list[Excess]:
    """Returns where `rank` works longer than comparable ranks or layers, the largest excess first.

    It is compared, by the place of the work:

    * a chunk, the update, a reduction: with the ranks of the same stage, which do the same work on other samples or shards
    * where a stage has one rank: with layers of the same kind and sizes anywhere; for the update, by elements stepped
    * data, work between steps, evaluations: with all other ranks
    """
    own, others = block.ranks[rank], [one for number, one in block.ranks.items() if number != rank]
    peers = [one for one in others if one.start.stage == own.start.stage]
    found = (_excess(own, peers, others, place, block) for place in own.work if place != DEVICE)
    return sorted((one for one in found if one is not None), key=lambda one: -one.seconds)


def _excess(own: RankWork, peers: list[RankWork], others: list[RankWork], place: str, block: Block) -> Excess | None:
    """Returns by how much a rank's time at `place` exceeds that of comparable ranks or chunks; None if it does not."""
    spent = own.work[place]
    if peers or place in _EVERYONES:
        likes = others if place in _EVERYONES else peers
        usual = _usual(one.work.get(place, NOTHING) for one in likes)
        if not likes or not _is_apart(spent, usual, MOST_RATIO):
            return None
        seconds = spent.middle - usual.middle
        beyond = {
            layer: one.middle - _usual(peer.layers.get(place, {}).get(layer, NOTHING) for peer in peers).middle
            for layer, one in own.layers.get(place, {}).items()
        }
        most = max(beyond, key=lambda layer: beyond[layer], default="")
        stands_out = bool(peers) and bool(most) and beyond[most] >= seconds / 2
        return Excess(place, most if stands_out else "", seconds, usual.middle)
    if place[0] in _OF_CHUNKS and place in own.layers:
        return max(_beyond_alike(own, place, block), key=lambda one: one.seconds, default=None)
    if place in (UPDATE, MESSAGES) and others:
        # Where `own` steps more elements than a like, its update takes as much longer.
        factors = [max(1.0, own.start.trained / max(1, one.start.trained)) if place == UPDATE else 1.0 for one in others]
        times = [one.work.get(place, NOTHING) for one in others]
        usual = _usual(Spread(*(value * factor for value in one)) for one, factor in zip(times, factors, strict=True))
        if _is_apart(spent, usual, MOST_FAR_RATIO):
            return Excess(place, "", spent.middle - usual.middle, usual.middle)
    return None


def _beyond_alike(own: RankWork, place: str, block: Block) -> Iterator[Excess]:
    """Yields layers that take longer than layers of the same kind, sizes and direction do on any rank."""
    for layer, spent in own.layers[place].items():
        likeness = own.start.layers.get(layer)
        alike = [
            there
            for rank in block.ranks.values()
            for other_place, layers in rank.layers.items()
            if other_place[0] == place[0] and likeness is not None
            for other, there in layers.items()
            if other != layer and rank.start.layers.get(other) == likeness
        ]
        usual = _usual(alike)
        if alike and _is_apart(spent, usual, MOST_FAR_RATIO):
            yield Excess(place, layer, spent.middle - usual.middle, usual.middle)


def _usual(likes: Iterable[Spread]) -> Spread:
    """Returns the median of each quartile over `likes`."""
    some = list(likes)
    return Spread(*(middle(one[place] for one in some) for place in range(3)))


def _is_apart(spent: Spread, usual: Spread, ratio: float) -> bool:
    """Returns whether `spent` exceeds `usual` by `ratio`, and by more than steps vary: three in four of its steps take longer
    than half of the likes', half of its steps longer than three in four of theirs.
    """
    return spent.middle > max(ratio * usual.middle, usual.high) and spent.low > usual.middle

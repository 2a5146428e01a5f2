"""Finds the rank that makes other ranks wait, and the action in which it is slow, from the work records of all ranks.

    a rank works longer than its peers, or all ranks wait for data ──> in most of the run, or of its last part ──> a cause

All ranks have the same step time, so step times do not show which rank is slow. A slow rank works longer than ranks with the
same layers. A cause must cost at least `MIN_SHARE` of a step, in blocks with at least `MIN_BLOCK_SHARE` of the steps. Smaller
differences may be noise from other processes on the machine.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from sley_core.actions.action import describe_action
from sley_doctor.work_record import ZERO_SPREAD, Location, Spread, Start, Window, WorkRecord

MIN_SHARE = 0.25  # a cause is reported only if it costs at least this share of a step's time
MIN_BLOCK_SHARE = 0.75  # a cause is reported only if it appears in blocks with at least this share of the examined steps

MIN_STEPS = 8  # the number of recorded steps below which no rank is judged

MAX_START_DIFFERENCE_S = 600.0  # records whose start times differ by more belong to different starts

MISSING_RECORD_REASONS = (  # why a rank may have no record
    "it was stopped before the end of its first window, its disk was full, or its host does not share the run's folder"
)

MAX_BLOCKS = 60  # the maximum number of blocks of steps to examine, however long the run is
MAX_DEVICE_SHARE = 0.03  # if a host waits for its device for a larger share of a step, the device limits the step, not the host

NUM_PARTS = 3  # the last part of a run is the last of NUM_PARTS equal parts of its blocks


class RankWork(NamedTuple):
    """The start record of a rank, and one window of its measurements."""

    start: Start
    window: Window


@dataclass(frozen=True)
class Block:
    """The work of all ranks, by rank, in the steps from `first` to `last`, both included."""

    first: int
    last: int
    ranks: Mapping[int, RankWork]

    @property
    def num_steps(self) -> int:
        """Returns the number of steps in the block."""
        return self.last - self.first + 1

    @property
    def step_s(self) -> float:
        """Returns the time of a step in seconds, as the median over ranks."""
        return median_low(work.window.seconds.median for work in self.ranks.values())

    def has_idle_host(self, rank: int) -> bool:
        """Returns whether the host of `rank` waits for its device, so that longer work on the host does not lengthen a step."""
        return self.ranks[rank].window.device_wait_s > MAX_DEVICE_SHARE * self.step_s


def build_blocks(records: Sequence[WorkRecord]) -> list[Block]:
    """Returns a block for each window that all `records` have, in ascending order. Skips windows at regular intervals if there
    are more than MAX_BLOCKS.
    """
    windows = [{(window.first, window.last): window for window in record.windows} for record in records]
    steps = [span for span in windows[0] if all(span in rank_windows for rank_windows in windows)]
    stride = max(1, math.ceil(len(steps) / MAX_BLOCKS))
    return [
        Block(
            *span, {record.start.rank: RankWork(record.start, own[span]) for record, own in zip(records, windows, strict=True)}
        )
        for span in steps[(len(steps) - 1) % stride :: stride]
    ]


@dataclass(frozen=True)
class Cause:
    """One reason why steps take longer than necessary. kind: "work" if a rank works longer than its peers, "data" if all ranks
    wait for data. ranks: the slow rank, or all ranks. location: the kind and chunk of the slow action, such as `F0`, or a
    `Location`. seconds: the time that is lost in each step. usual_s: the time of comparable work on other ranks. step_s: the
    time of a step. first, last: the first and last step with this cause.
    """

    kind: str
    ranks: tuple[int, ...]
    location: str
    seconds: float
    usual_s: float
    step_s: float
    first: int
    last: int


@dataclass(frozen=True)
class Judgement:
    """The result of `judge` for `blocks`. causes: the worst first. no_cause_reason: why no rank could be judged, or ""."""

    causes: tuple[Cause, ...]
    blocks: tuple[Block, ...]
    no_cause_reason: str = ""


def judge(records: Sequence[WorkRecord]) -> Judgement:
    """Returns which ranks make other ranks wait, or whether all ranks wait for data. records: the work records of all ranks of
    a run, in order of rank.
    """
    if not records:
        return Judgement((), (), "no rank has recorded a step")
    if missing := sorted(set(range(records[0].start.world)) - {record.start.rank for record in records}):
        return Judgement((), (), f"rank {missing[0]} has recorded nothing: {MISSING_RECORD_REASONS}")
    newest = max(record.start.time for record in records)
    if stale_ranks := [record.start.rank for record in records if newest - record.start.time > MAX_START_DIFFERENCE_S]:
        return Judgement((), (), f"rank {stale_ranks[0]} has recorded nothing since the run was restarted")
    blocks = build_blocks(records)
    steps = sum(block.num_steps for block in blocks)
    if steps < MIN_STEPS:
        return Judgement((), tuple(blocks), f"{steps} steps are too few; at least {MIN_STEPS} are needed")
    # The first block is left out, since it includes one-time work: compiling, opening files, first allocations.
    settled_blocks = blocks[1:] if len(blocks) > NUM_PARTS else blocks
    causes = _find_causes(settled_blocks)
    last_part = settled_blocks[-(len(settled_blocks) // NUM_PARTS) :]
    if not causes and len(settled_blocks) > NUM_PARTS and sum(block.num_steps for block in last_part) >= MIN_STEPS:
        causes = _find_causes(last_part)
    return Judgement(tuple(causes), tuple(settled_blocks))


def _find_causes(blocks: Sequence[Block]) -> list[Cause]:
    """Returns the causes that appear in most of `blocks`, the worst first."""
    causes = [*_find_slow_ranks(blocks), *_find_slow_data(blocks)]
    return sorted(causes, key=lambda cause: -cause.seconds)


def _find_slow_ranks(blocks: Sequence[Block]) -> list[Cause]:
    """Returns a cause for each rank that, in most of `blocks`, works longer than its peers while another rank waits."""
    causes = []
    for rank in blocks[0].ranks:
        slow_blocks = []
        for block in blocks:
            excesses = find_excesses(block, rank)
            excess_s = sum(excess.seconds for excess in excesses)
            if excess_s < MIN_SHARE * block.step_s or block.has_idle_host(rank):
                continue
            # Some other rank must wait at least half as long, since longer work that overlaps with other work delays nobody.
            # Waits for a device do not count, since the device may be busy with work of its own rank.
            waits = [work.window.waits.median for number, work in block.ranks.items() if number != rank]
            if max(waits, default=-1.0) >= excess_s / 2:
                slow_blocks.append((block, excesses))
        if _covers_most([block for block, _ in slow_blocks], blocks):
            causes.append(_build_rank_cause(rank, slow_blocks))
    return causes


MAX_RATIO = 1.5  # a rank is slow only if it works longer than comparable ranks by more than this factor

MAX_OTHER_STAGE_RATIO = 3.0
"""Replaces `MAX_RATIO` in comparisons with ranks of other stages, which have different layers and neighbours."""

_COMMON_LOCATIONS = frozenset({Location.DATA, Location.BETWEEN, Location.EVALUATION})
"""The locations at which all ranks do comparable work."""

_CHUNK_PREFIXES = "FBIW"  # F, B, I and W: locations that start with these letters run layers


class Excess(NamedTuple):
    """Work at `location` that takes `seconds` longer in each step than comparable work, which takes `usual_s` seconds."""

    location: str
    seconds: float
    usual_s: float


def find_excesses(block: Block, rank: int) -> list[Excess]:
    """Returns the locations at which `rank` works longer than comparable ranks, the largest excess first.

    The comparable ranks depend on the location:

    * data, work between steps, evaluation: all other ranks
    * other locations: ranks of the same stage, which do the same work on other samples or shards
    * a chunk, the update or messages in a stage with only one rank: ranks of other stages, with a larger allowed ratio

    The wait for the device is not compared. The update time of another rank is scaled up if `rank` updates more elements.
    """
    own = block.ranks[rank]
    others = [work for number, work in block.ranks.items() if number != rank]
    excesses = (_find_excess(own, others, location) for location in own.window.work if location != Location.DEVICE)
    return sorted((excess for excess in excesses if excess is not None), key=lambda excess: -excess.seconds)


def _find_excess(own: RankWork, others: list[RankWork], location: str) -> Excess | None:
    """Returns the excess of `own` at `location` over comparable ranks in `others`, or None if there is no excess."""
    own_spread, ratio = own.window.work[location], MAX_RATIO
    peers = [work for work in others if location in _COMMON_LOCATIONS or work.start.stage == own.start.stage]
    if not peers and (location[0] in _CHUNK_PREFIXES or location in (Location.UPDATE, Location.MESSAGES)):
        ratio, peers = MAX_OTHER_STAGE_RATIO, [work for work in others if location in work.window.work]
    if not peers:
        return None
    times = [
        # An update takes time in proportion to its number of elements.
        (value * max(1.0, own.start.trained / max(1, work.start.trained)) if location == Location.UPDATE else value)
        for work in peers
        for value in work.window.work.get(location, ZERO_SPREAD)
    ]
    usual = Spread(*(median_low(times[index::3]) for index in range(3)))
    # The excess must also be larger than the usual differences between steps.
    if own_spread.median <= max(ratio * usual.median, usual.high) or own_spread.low <= usual.median:
        return None
    return Excess(location, own_spread.median - usual.median, usual.median)


def _build_rank_cause(rank: int, slow_blocks: Sequence[tuple[Block, list[Excess]]]) -> Cause:
    """Returns the cause for `rank` at the location of its largest excess. slow_blocks: blocks, with the rank's excesses."""
    steps = sum(block.num_steps for block, _ in slow_blocks)
    locations, usual = defaultdict[str, float](float), defaultdict[str, float](float)
    for block, excesses in slow_blocks:
        for excess in excesses:
            locations[excess.location] += excess.seconds * block.num_steps / steps
            usual[excess.location] += excess.usual_s * block.num_steps / steps
    location = max(locations, key=lambda name: locations[name])
    return Cause(
        "work",
        (rank,),
        location,
        locations[location],
        usual[location],
        median_low(block.step_s for block, _ in slow_blocks),
        slow_blocks[0][0].first,
        slow_blocks[-1][0].last,
    )


def _find_slow_data(blocks: Sequence[Block]) -> list[Cause]:
    """Returns one cause if every rank waits for its data in most of `blocks`, else []."""
    slow_blocks = [
        block
        for block in blocks
        if all(
            work.window.data_wait_s >= MIN_SHARE * block.step_s and not block.has_idle_host(rank)
            for rank, work in block.ranks.items()
        )
    ]
    if not _covers_most(slow_blocks, blocks):
        return []
    seconds = median_low(min(work.window.data_wait_s for work in block.ranks.values()) for block in slow_blocks)
    step_s, first, last = median_low(block.step_s for block in slow_blocks), slow_blocks[0].first, slow_blocks[-1].last
    return [Cause("data", tuple(slow_blocks[0].ranks), Location.DATA, seconds, 0.0, step_s, first, last)]


def _covers_most(subset: Sequence[Block], blocks: Sequence[Block]) -> bool:
    """Returns whether the blocks in `subset` have at least MIN_BLOCK_SHARE of the steps in `blocks`."""
    return bool(subset) and sum(block.num_steps for block in subset) >= MIN_BLOCK_SHARE * sum(
        block.num_steps for block in blocks
    )


MIN_SHOWN_S = 5e-5  # times below this number of seconds are not shown

_LOCATIONS: dict[str, str] = {  # descriptions of the locations that are not actions
    Location.DATA: "wait for data",
    Location.BEGINNING: "beginning of the step",
    Location.MESSAGES: "start of messages to other stages",
    Location.REDUCTION: "end of the gradients' reduction",
    Location.UPDATE: "update (norm, clip, optimizer)",
    Location.DEVICE: "wait for the device",
    Location.BETWEEN: "work between steps (metrics, checkpoints, listeners)",
    Location.EVALUATION: "evaluation",
}
_REMEDIES: dict[str, str] = {  # remedies by location; all locations that are not listed have the remedy of "F"
    "F": "check that rank's machine (other processes, clock, temperature), and whether its stage has too many layers",
    Location.DATA: "check the storage of the data and the dataset's `__getitem__`: one thread reads one batch ahead",
    Location.UPDATE: "check the optimizer and its hooks on that rank",
    Location.BETWEEN: "write metrics, evaluate and save less often, or make the step listeners faster",
    Location.EVALUATION: "evaluate less often, or on fewer batches (`[evaluation]`)",
    Location.MESSAGES: "check the network between these stages",
}


def describe_cause(cause: Cause) -> str:
    """Returns a sentence that describes the cause and its cost."""
    step = f"in a step of {_format_seconds(cause.step_s)}"
    if cause.kind == "data":
        return f"every rank waits for its data for {_format_seconds(cause.seconds)} {step}"
    usual = _format_seconds(cause.usual_s) if cause.usual_s >= MIN_SHOWN_S else "almost no time"
    location = _LOCATIONS.get(cause.location) or describe_action(cause.location).removeprefix("the ")
    work = f"its {location} takes {_format_seconds(cause.seconds)} longer than that of other ranks ({usual})"
    return f"rank {cause.ranks[0]} makes other ranks wait: {work}, {step}"


def find_remedy(cause: Cause) -> str:
    """Returns advice on how to remove `cause`."""
    return _REMEDIES.get(cause.location, _REMEDIES["F"])


def describe_no_cause(judgement: Judgement) -> str:
    """Returns a sentence that explains why a judgement has no cause."""
    if judgement.no_cause_reason:
        return f"unknown: {judgement.no_cause_reason}"
    steps = f"steps {judgement.blocks[0].first} to {judgement.blocks[-1].last}"
    message = f"none: in {steps} no rank worked {MIN_SHARE:.0%} of a step longer than its peers"
    is_cuda = any(rank.start.device == "cuda" for rank in judgement.blocks[0].ranks.values())
    caveat = "; times are measured on the host, and show neither a slow GPU nor a host that falls behind within a step"
    return message + (caveat if is_cuda else "")


def describe_work(judgement: Judgement) -> Iterator[str]:
    """Yields a line for each rank, with the medians of its work and of its waits in a step."""
    blocks = judgement.blocks
    for rank in blocks[0].ranks if blocks else ():
        windows = [block.ranks[rank].window for block in blocks]
        medians = {
            location: median_low(window.work[location].median for window in windows if location in window.work)
            for location in windows[-1].work
            if location != Location.DEVICE
        }
        longest = sorted((name for name in medians if medians[name] >= MIN_SHOWN_S), key=lambda name: -medians[name])[:3]
        parts = ", ".join(f"{location} {_format_seconds(medians[location])}" for location in longest)
        work = _format_seconds(median_low(window.working_s for window in windows))
        waits = [
            (median_low(window.waits.median for window in windows), "other ranks"),
            (median_low(window.device_wait_s for window in windows), "its device"),
        ]
        waited = " and ".join(f"{_format_seconds(s)} for {target}" for s, target in waits if s >= MIN_SHOWN_S)
        yield (
            f"rank {rank} (stage {blocks[0].ranks[rank].start.stage}): works for {work}"
            f"{f' ({parts})' if parts else ''}, waits {waited or 'for no rank'}"
        )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

"""Decides which rank makes other ranks wait, from the work records of all ranks.

    work of a rank longer than its peers', or a wait of all for data ──> in most of the run, or of its last part ──> a cause

Victims wait and causes work: a rank is named for work that takes longer than on other ranks, never for its waits. A cause must
cost `MIN_SHARE` of a step in `MIN_BLOCK_SHARE` of the blocks; less may be noise of a busy machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sley_doctor.reports.work_record import DATA, ZERO_SPREAD, WorkRecord
from sley_doctor.slow.blocks import Block, Excess, build_blocks, find_excesses, median

MIN_SHARE = 0.25  # share of a step that a cause must cost
MIN_BLOCK_SHARE = 0.75  # share of steps in blocks that show the cause

MIN_STEPS = 8

SAME_START_S = 600.0  # limit of the difference between start times in one start, by the hosts' clocks

MISSING_RECORD_REASONS = (
    "it was stopped before the end of its first window, its disk was full, or its host does not share the run's folder"
)

NUM_PARTS = 3  # the last part of a run is one in NUM_PARTS of its blocks


@dataclass(frozen=True)
class Cause:
    """Describes one reason for longer steps.

    kind: "work" if a rank works longer than its peers, "data" if all ranks wait for data. location: a location of
    `work_record`. seconds: the cost per step; step_s: the duration of a step. usual_s: the time of comparable work. first,
    last: the steps with this cause.
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
    """Holds the result of `judge`. causes: the worst first; empty if no rank is slow. blocks: the examined
    blocks. why_not: the reason if slow ranks cannot be determined.
    """

    causes: tuple[Cause, ...]
    blocks: tuple[Block, ...]
    why_not: str = ""


def judge(records: Sequence[WorkRecord]) -> Judgement:
    """Returns the ranks or data that make other ranks wait. records: the records of all ranks of a run."""
    if not records:
        return Judgement((), (), "no rank has recorded a step")
    if missing := sorted(set(range(records[0].start.world)) - {record.start.rank for record in records}):
        return Judgement((), (), f"rank {missing[0]} has recorded nothing: {MISSING_RECORD_REASONS}")
    newest = max(record.start.time for record in records)
    if stale_ranks := [record.start.rank for record in records if newest - record.start.time > SAME_START_S]:
        return Judgement((), (), f"rank {stale_ranks[0]} has recorded nothing since the run was restarted")
    blocks = build_blocks(records)
    steps = sum(block.num_steps for block in blocks)
    if steps < MIN_STEPS:
        return Judgement((), tuple(blocks), f"{steps} steps are too few; at least {MIN_STEPS} are needed")
    # The first block includes one-time work: compiling, opening files, first allocations.
    settled = blocks[1:] if len(blocks) > NUM_PARTS else blocks
    causes = _find_causes(settled)
    last_part = settled[-(len(settled) // NUM_PARTS) :]
    if not causes and len(settled) > NUM_PARTS and sum(block.num_steps for block in last_part) >= MIN_STEPS:
        causes = _find_causes(last_part)
    return Judgement(tuple(causes), tuple(settled))


def _find_causes(blocks: Sequence[Block]) -> list[Cause]:
    """Returns the causes that most of `blocks` show, the worst first."""
    causes = [*_slow_ranks(blocks), *_slow_data(blocks)]
    return sorted(causes, key=lambda cause: -cause.seconds)


def _slow_ranks(blocks: Sequence[Block]) -> list[Cause]:
    """Returns a cause for each rank that works longer than its peers while other ranks wait."""
    causes = []
    for rank in blocks[0].ranks:
        slow_blocks = []
        for block in blocks:
            excesses = find_excesses(block, rank)
            excess_s = sum(excess.seconds for excess in excesses)
            if excess_s < MIN_SHARE * block.step_s or block.has_idle_host(rank):
                continue
            # Other ranks must wait about as long: overlapped work makes no rank wait. Waits for a device do not count, since
            # a device has its own work.
            waits = [work.waiting_s for number, work in block.ranks.items() if number != rank]
            if max(waits, default=-1.0) >= excess_s / 2:
                slow_blocks.append((block, excesses))
        if _covers_most([block for block, _ in slow_blocks], blocks):
            causes.append(_rank_cause(rank, slow_blocks))
    return causes


def _rank_cause(rank: int, slow_blocks: Sequence[tuple[Block, list[Excess]]]) -> Cause:
    """Returns the cause for `rank`, with the location of its largest excess. slow_blocks: blocks with their excesses."""
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
        median(block.step_s for block, _ in slow_blocks),
        slow_blocks[0][0].first,
        slow_blocks[-1][0].last,
    )


def _slow_data(blocks: Sequence[Block]) -> list[Cause]:
    """Returns a cause for the wait for data if every rank waits for its data; else none."""
    slow_blocks = [
        block
        for block in blocks
        if all(
            work.work.get(DATA, ZERO_SPREAD).median >= MIN_SHARE * block.step_s and not block.has_idle_host(rank)
            for rank, work in block.ranks.items()
        )
    ]
    if not _covers_most(slow_blocks, blocks):
        return []
    seconds = median(min(work.work[DATA].median for work in block.ranks.values()) for block in slow_blocks)
    step_s = median(block.step_s for block in slow_blocks)
    return [Cause("data", tuple(slow_blocks[0].ranks), DATA, seconds, 0.0, step_s, slow_blocks[0].first, slow_blocks[-1].last)]


def _covers_most(subset: Sequence[Block], blocks: Sequence[Block]) -> bool:
    """Returns whether `subset` has at least MIN_BLOCK_SHARE of the steps of `blocks`."""
    return bool(subset) and sum(block.num_steps for block in subset) >= MIN_BLOCK_SHARE * sum(
        block.num_steps for block in blocks
    )

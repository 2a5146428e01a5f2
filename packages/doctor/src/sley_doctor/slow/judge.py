"""Decides which rank makes others wait, from the records of all ranks alone.

    excess of a rank's own work over its likes ──┐
    exchanges that take long although all came ──┼──> in most of the run, or of its last part ──> a cause, or nobody
    the same rank before and after ──────────────┘

Victims have waits, causes have work: a rank is named for the work that it does longer than others do, never for what it waits.
What is named must be worth `LEAST_SHARE` of a step, in `LEAST_OF_BLOCKS` of the blocks: less may be a busy machine's noise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from sley_doctor.reports.work_record import DATA, DEVICE, NOTHING, Queue, SeenMessage, WorkRecord
from sley_doctor.slow.blocks import MOST_RATIO, Block, Excess, RankWork, blocks_of, excesses, middle

LEAST_SHARE = 0.25  # of a step: less is not told
LEAST_OF_BLOCKS = 0.75  # the share of steps in whose blocks it must be so

LEAST_STEPS = 8

SAME_START_S = 600.0  # ranks that were started together begin to record no further apart, by their hosts' clocks

WHY_NOTHING = (
    "it was stopped before the end of its first window, its disk was full, or it is on a host that does not share the run's "
    "folder"
)

LATE = 3  # the last part of a run, if it is not the whole of it: one in so many blocks

LEAST_FAULTS, LEAST_SYSTEM = 500, 0.1
"""Page faults of a step that are looked at, and how much of a rank's longer work the kernel must take for them at least."""


@dataclass(frozen=True)
class Cause:
    """Describes one reason for longer steps.

    kind: "work" of a rank longer than its likes, "data" that all ranks wait for, "link", "change" of a rank that was faster
    before, or "memory" that grows. ranks: those named; of a link, its ends. place: of `work_record`, or a queue's name. layer:
    "" if none stands out. seconds: of each step; step_s: the length of a step. usual_s: the time of the likes there. first,
    last: the steps in which it was so. faults: page faults of a step beyond those of others, if these are the reason.
    megabytes: by which memory has grown.
    """

    kind: str
    ranks: tuple[int, ...]
    place: str
    layer: str
    seconds: float
    usual_s: float
    step_s: float
    first: int
    last: int
    faults: float = 0.0
    megabytes: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """Holds what was found. causes: memory, then the worst first; empty if no rank is slow. blocks: those examined. why_not:
    why nothing can be decided.
    """

    causes: tuple[Cause, ...]
    blocks: tuple[Block, ...]
    why_not: str = ""


def judge(records: Sequence[WorkRecord]) -> Judgement:
    """Returns which ranks, links or data make others wait. records: of all ranks of a run."""
    if not records:
        return Judgement((), (), "no rank has recorded a step")
    if missing := sorted(set(range(records[0].start.world)) - {record.start.rank for record in records}):
        return Judgement((), (), f"rank {missing[0]} has recorded nothing: {WHY_NOTHING}")
    newest = max(record.start.time for record in records)
    if old := [record.start.rank for record in records if newest - record.start.time > SAME_START_S]:
        return Judgement((), (), f"rank {old[0]} has recorded nothing since the run was started again")
    blocks = blocks_of(records)
    steps = sum(block.num_steps for block in blocks)
    if steps < LEAST_STEPS:
        return Judgement((), tuple(blocks), f"{steps} steps are too few to tell, {LEAST_STEPS} are needed")
    # The first block has what is done once: compiling, opening files, first allocations.
    settled = blocks[1:] if len(blocks) > LATE else blocks
    causes = _causes(records, settled)
    late = settled[-(len(settled) // LATE) :]
    if not causes and len(settled) > LATE and sum(block.num_steps for block in late) >= LEAST_STEPS:
        causes = _causes(records, late) or _changes(settled, late)
    grown = _grown(records, middle(block.step_s for block in settled))
    # To fill memory takes time: that a rank's memory grows is why it is slow, not the other way round.
    return Judgement((*grown, *causes), tuple(settled))


def _causes(records: Sequence[WorkRecord], blocks: Sequence[Block]) -> list[Cause]:
    """Returns the causes that hold in most of `blocks`."""
    found = [*_ranks(blocks), *_data(blocks)]
    # A rank that comes late makes messages wait too, but not exchanges in which all have come.
    found += _links(records, blocks)
    return sorted(found, key=lambda one: -one.seconds)


def _ranks(blocks: Sequence[Block]) -> list[Cause]:
    """Returns the ranks that work longer than their likes while others wait; a run of one rank has no others."""
    found = []
    for rank in blocks[0].ranks:
        slow = []
        for block in blocks:
            some = excesses(block, rank)
            beyond_s = sum(one.seconds for one in some)
            if beyond_s < LEAST_SHARE * block.step_s or block.has_time_left(rank):
                continue
            # Others wait for about as long: work that overlaps other work makes no rank wait. Waits for the device are no sign
            # of it, since a device has work of its own.
            waits = [one.waiting_s for number, one in block.ranks.items() if number != rank]
            if max(waits, default=-1.0) >= beyond_s / 2:
                slow.append((block, some))
        if _is_most([block for block, _ in slow], blocks):
            found.append(_named(rank, slow))
    return found


def _named(rank: int, slow: Sequence[tuple[Block, list[Excess]]]) -> Cause:
    """Returns the cause for a rank that was slow in these blocks, with the place and layer of most of it."""
    steps = sum(block.num_steps for block, _ in slow)
    places: dict[str, float] = {}
    layers: dict[tuple[str, str], float] = {}
    usual: dict[str, float] = {}
    for block, some in slow:
        for one in some:
            places[one.place] = places.get(one.place, 0.0) + one.seconds * block.num_steps
            usual[one.place] = usual.get(one.place, 0.0) + one.usual_s * block.num_steps
            layers[one.place, one.layer] = layers.get((one.place, one.layer), 0.0) + one.seconds * block.num_steps
    place = max(places, key=lambda name: places[name])
    layer = max((key for key in layers if key[0] == place), key=lambda key: layers[key])[1]
    seconds = places[place] / steps
    return Cause(
        "work",
        (rank,),
        place,
        layer,
        seconds,
        usual[place] / steps,
        middle(block.step_s for block, _ in slow),
        slow[0][0].first,
        slow[-1][0].last,
        _faults(rank, [block for block, _ in slow], seconds),
    )


def _faults(rank: int, blocks: Sequence[Block], seconds: float) -> float:
    """Returns how many page faults of a step `rank` has beyond others, where they are what it was busy with in `seconds` more
    of work; else 0.

    They are where the kernel took most of the processor that it used beyond others. That may be far less than `seconds`, where
    other processes took the rest.
    """

    def beyond(of: Callable[[RankWork], float]) -> float:
        return middle(
            of(block.ranks[rank]) - middle(of(one) for number, one in block.ranks.items() if number != rank) for block in blocks
        )

    faults, system_s, user_s = (
        beyond(lambda one: one.faults),
        beyond(lambda one: one.system_s),
        beyond(lambda one: one.user_s),
    )
    is_why = faults >= LEAST_FAULTS and system_s >= max(user_s, LEAST_SYSTEM * seconds)
    return faults if is_why else 0.0


def _data(blocks: Sequence[Block]) -> list[Cause]:
    """Returns a cause for the wait for data, if every rank has it."""
    slow = [
        block
        for block in blocks
        if all(
            one.work.get(DATA, NOTHING).middle >= LEAST_SHARE * block.step_s and not block.has_time_left(rank)
            for rank, one in block.ranks.items()
        )
    ]
    if not _is_most(slow, blocks):
        return []
    seconds = middle(min(one.work[DATA].middle for one in block.ranks.values()) for block in slow)
    step_s = middle(block.step_s for block in slow)
    return [Cause("data", tuple(slow[0].ranks), DATA, "", seconds, 0.0, step_s, slow[0].first, slow[-1].last)]


def _links(records: Sequence[WorkRecord], blocks: Sequence[Block]) -> list[Cause]:
    """Returns a cause for each queue that was slow in most of the blocks."""
    seen: dict[tuple[str, tuple[int, ...]], list[tuple[Block, SlowExchange]]] = {}
    for block in blocks:
        for one in slow_exchanges(records, block):
            if one.seconds >= LEAST_SHARE * block.step_s:
                seen.setdefault((one.queue, one.ranks), []).append((block, one))
    return [
        Cause(
            "link",
            ranks,
            queue,
            "",
            middle(one.seconds for _, one in slow),
            middle(one.usual_s for _, one in slow),
            middle(block.step_s for block, _ in slow),
            slow[0][0].first,
            slow[-1][0].last,
        )
        for (queue, ranks), slow in seen.items()
        if _is_most([block for block, _ in slow], blocks)
    ]


def _changes(settled: Sequence[Block], late: Sequence[Block]) -> list[Cause]:
    """Returns the ranks whose own work, and not that of others, takes longer in `late` than in as many early blocks."""
    early = settled[: len(late)]
    before, after = middle(block.step_s for block in early), middle(block.step_s for block in late)
    if after - before < LEAST_SHARE * after:
        return []
    found = []
    ratios = {
        number: min(block.ranks[number].working_s for block in late) / max(block.ranks[number].working_s for block in early)
        for number in late[-1].ranks
    }
    for rank in late[-1].ranks:
        others = [ratio for number, ratio in ratios.items() if number != rank]
        if ratios[rank] <= MOST_RATIO or (others and max(others) > ratios[rank] / MOST_RATIO):
            continue
        if any(block.has_time_left(rank) for block in late):
            continue
        gained = {
            place: middle(block.ranks[rank].work[place].low for block in late)
            - middle(block.ranks[rank].work[place].high for block in early if place in block.ranks[rank].work)
            for place in late[-1].ranks[rank].work
            if place != DEVICE
        }
        place = max(gained, key=lambda name: gained[name])
        if gained[place] >= LEAST_SHARE * after:
            usual_s = middle(block.ranks[rank].work.get(place, NOTHING).middle for block in early)
            found.append(Cause("change", (rank,), place, "", gained[place], usual_s, after, late[0].first, late[-1].last))
    return found


def _grown(records: Sequence[WorkRecord], step_s: float) -> list[Cause]:
    """Returns a cause for the memory that grows most, with all ranks where it grows at least half as much."""
    found = [one for record in records for where in ("host", "device") if (one := _growth(record, where, step_s))]
    if not found:
        return []
    most = max(found, key=lambda one: one.megabytes)
    same = [one for one in found if one.place == most.place and one.megabytes >= most.megabytes / 2]
    return [replace(most, ranks=tuple(sorted(one.ranks[0] for one in same)))]


def _is_most(some: Sequence[Block], blocks: Sequence[Block]) -> bool:
    """Returns whether `some` have enough of the steps of `blocks` to count as most of them."""
    return bool(some) and sum(one.num_steps for one in some) >= LEAST_OF_BLOCKS * sum(one.num_steps for one in blocks)


LEAST_MB, LEAST_GROWTH = 64.0, 0.15  # less than this, or than this share of what there was, may be caches that fill

LEAST_WINDOWS = 5
STEADY = 0.8  # the share of windows in which it must grow


def _growth(record: WorkRecord, where: str, step_s: float) -> Cause | None:
    """Returns a cause for the growth of a rank's memory if it is large and steady until the end; else None. The first window,
    in which a run settles, is left out. where: "host" or "device".
    """
    windows = record.windows[1:]
    if len(windows) < LEAST_WINDOWS:
        return None
    held = [window.private_mb if where == "host" else window.device_mb for window in windows]
    total = held[-1] - held[0]
    rising = sum(after > before for before, after in pairwise(held)) / (len(held) - 1)
    # What has filled by now no longer grows. By steps: windows of a long run have more of them the older they are.
    since = windows[-1].last - (windows[-1].last - windows[0].last) / 3
    before = [mb for mb, one in zip(held, windows, strict=True) if one.last <= since]
    lately = held[-1] - (before[-1] if before else held[0])
    is_growing = total >= max(LEAST_MB, LEAST_GROWTH * held[0]) and rising >= STEADY and lately >= total / 6
    if not is_growing:
        return None
    first, last = windows[0].last, windows[-1].last
    return Cause("memory", (record.start.rank,), where, "", 0.0, 0.0, step_s, first, last, megabytes=total)


LATENCY_S, BYTES_PER_S = 2.5e-3, 50e6
"""Of the slowest link that is sound: an exchange over TCP on a busy machine, and half of a gigabit network."""

MOST_LINK_RATIO = 3.0  # exchanges may take this much longer than by that


class SlowExchange(NamedTuple):
    """An exchange that ranks wait in, late or not. seconds: of a step; usual_s: of a step by a slow but sound link.

    queue: its name. ranks: its members, or the sender and the receiver.

    In a collective the last rank to come waits for nobody, so the shortest wait of its members is the exchange's own. A message
    of a pipeline is on its way from when the sender has handed it over, and is waited for from when its receiver comes for it.
    """

    queue: str
    ranks: tuple[int, ...]
    seconds: float
    usual_s: float


def slow_exchanges(records: Sequence[WorkRecord], block: Block) -> list[SlowExchange]:
    """Returns the exchanges that take longer than a sound link explains, the longest first."""
    found = [*_collectives(block), *_messages(records, block)]
    slow = (one for one in found if one.seconds > MOST_LINK_RATIO * one.usual_s)
    return sorted(slow, key=lambda one: -one.seconds)


def _collectives(block: Block) -> Iterator[SlowExchange]:
    """Yields each collective queue, with the shortest wait of any member, which is the time of the exchange itself."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank in block.ranks.values():
        for name, queue in rank.queues.items():
            key = name, queue.ranks
            members = [block.ranks.get(one) for one in queue.ranks]
            if queue.peer is not None or key in seen:
                continue
            seen.add(key)
            waits = [one.waits[name].low for one in members if one is not None and name in one.waits]
            if len(waits) == len(members):  # else the one that is missing may not have waited
                yield _exchange(name, queue, queue.ranks, min(waits))


def _messages(records: Sequence[WorkRecord], block: Block) -> Iterator[SlowExchange]:
    """Yields each message queue, with the median time from the sender's action to the receiver's."""
    sent = {(record.start.rank, name): some for record in records for name, some in _of_block(record, block, "sent").items()}
    for record in records:
        taken = _of_block(record, block, "taken")
        for name, queue in block.ranks[record.start.rank].queues.items():
            if queue.peer is None:
                continue
            handed = sent.get((queue.peer, name), [])
            ways = _ways_by_step(handed, taken.get(name, []))
            if ways:
                actions = len(handed) / len({one.step for one in handed})
                yield _exchange(name, replace(queue, exchanges=actions), (queue.peer, record.start.rank), middle(ways))


def _of_block(record: WorkRecord, block: Block, end: str) -> dict[str, list[SeenMessage]]:
    """Returns a rank's messages in the block by queue. end: "sent" or "taken"."""
    found: dict[str, list[SeenMessage]] = {}
    for window in record.within(block.first, block.last):
        for name, messages in getattr(window, end).items():
            found.setdefault(name, []).extend(one for one in messages if block.first <= one.step <= block.last)
    return found


def _ways_by_step(sent: Sequence[SeenMessage], taken: Sequence[SeenMessage]) -> list[float]:
    """Returns, for each step that both ends have recorded, the seconds for which a receiver waited for messages under way. An
    action sends several in a row, of which only the last is recorded: the earlier ones count as sent at that time.
    """
    numbers = [one.number for one in sent]
    ways = dict.fromkeys((one.step for one in sent), 0.0)
    for one in taken:
        at = bisect_left(numbers, one.number)
        if at < len(sent) and sent[at].step == one.step:
            ways[one.step] += max(0.0, min(one.waited_s, one.time_s - sent[at].time_s))
    steps = {one.step for one in taken}
    return [way for step, way in ways.items() if step in steps]


def _exchange(name: str, queue: Queue, ranks: tuple[int, ...], seconds: float) -> SlowExchange:
    return SlowExchange(name, ranks, seconds, queue.exchanges * LATENCY_S + queue.num_bytes / BYTES_PER_S)

"""Finds how long exchanges themselves take: the waiting of ranks although no rank is late.

In a collective the last rank to come waits for nobody, so the shortest wait of its members is the exchange's own. A message of
a pipeline is on its way from when the sender has handed it over, and is waited for from when its receiver comes for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sley_doctor.reports.work_record import Queue, SeenMessage, WorkRecord
from sley_doctor.slow.blocks import Block, middle

LATENCY_S, BYTES_PER_S = 2.5e-3, 50e6
"""Of the slowest link that is sound: an exchange over TCP on a busy machine, and half of a gigabit network."""

MOST_RATIO = 3.0
"""Exchanges may take this much longer than by that."""


class SlowExchange(NamedTuple):
    """An exchange that ranks wait in, late or not. seconds: of a step; usual_s: of a step by a slow but sound link.

    queue: its name. ranks: its members, or the sender and the receiver. num_bytes, exchanges: of a step; of messages, the
    actions that send some.
    """

    queue: str
    group: str
    ranks: tuple[int, ...]
    seconds: float
    usual_s: float
    exchanges: float
    num_bytes: float


def slow_exchanges(records: Sequence[WorkRecord], block: Block) -> list[SlowExchange]:
    """Returns the exchanges that take longer than a sound link explains, the longest first."""
    found = [*_collectives(block), *_messages(records, block)]
    slow = (one for one in found if one.seconds > MOST_RATIO * one.usual_s)
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
    sent = {
        (record.start.rank, name): some for record in records for name, some in _of_block(record, block, "sent").items()
    }
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
    """Returns, for each step that both ends have recorded, the seconds for which a receiver waited for messages under way.

    An action sends several in a row, of which only the last is recorded: the earlier ones count as sent at that time.
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
    usual_s = queue.exchanges * LATENCY_S + queue.num_bytes / BYTES_PER_S
    return SlowExchange(name, queue.group, ranks, seconds, usual_s, queue.exchanges, queue.num_bytes)

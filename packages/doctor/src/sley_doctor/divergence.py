"""Finds the exchange at which ranks diverged, by comparing the exchanges in their reports.

    rank 0   16 gather of a   17 gather of b   18 gather of c     one queue: number 17 of rank 1 is number 18 of the
    rank 1   16 gather of a   17 gather of c                      other ranks: rank 1 has skipped the gather of b
    rank 2   16 gather of a   17 gather of b

Reports of two ranks show only that they differ, not which one is wrong. With more ranks, the rank that differs from the
majority is named.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sley_doctor.fault_report import ExchangeRecord, FaultReport

DivergenceType = Literal["size", "left out", "too many", "other", "not started"]

_MESSAGE_OPERATIONS = frozenset({"send", "receive"})
_MESSAGE_PATTERN = re.compile(r"(announcement of )?what stage .* for microbatch (\d+) \((forward|backward)")
"""Matches the description of a pipeline message. The groups are "announcement of " if it is one, its microbatch, and its
flow.
"""

_READ_QUEUE_PATTERN = re.compile(r" of \d+$")
"""Matches the end of the name of a queue in which a rank waits until other ranks have read its data. The rest of the name is
the queue of the exchange itself.
"""


@dataclass(frozen=True)
class Divergence:
    """Describes how ranks diverged. ranks: the ranks that differ from the majority; empty if there is no majority. exchanges:
    the exchanges that differ, the likeliest cause first. description: a sentence for users.
    """

    kind: DivergenceType
    ranks: tuple[int, ...]
    exchanges: tuple[ExchangeRecord, ...]
    description: str


def find_divergence(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Returns how the ranks diverged: they started different exchanges, or they wait for each other in different exchanges.
    Returns None if they did neither. by_rank: the reports by rank.
    """
    return _find_mismatch(by_rank) or _find_missing_start(by_rank)


def is_same_exchange(first: ExchangeRecord, second: ExchangeRecord) -> bool:
    """Returns whether exchanges of two ranks, with the same queue and number, are the same exchange."""
    return _has_same_description(first, second) and first.num_bytes == second.num_bytes


def _has_same_description(first: ExchangeRecord, second: ExchangeRecord) -> bool:
    """Returns whether two exchanges have the same description, or are the two ends of one message."""
    if not {first.operation, second.operation} <= _MESSAGE_OPERATIONS:
        return (first.operation, first.label) == (second.operation, second.label)
    # The description of some messages has no flow and microbatch at one end.
    matches = [re.search(_MESSAGE_PATTERN, description) for description in (first.label, second.label)]
    message_ids = {match.groups() for match in matches if match}
    return len(message_ids) <= 1


def find_late_ranks(report: FaultReport, by_rank: Mapping[int, FaultReport]) -> list[int]:
    """Returns the ranks that have not started the exchange in which the rank of `report` waits; [] if it does not wait."""
    wait = report.wait
    if wait is None:
        return []
    if wait.peer is not None:
        return [wait.peer]
    exchange = wait.exchange
    queue = _READ_QUEUE_PATTERN.sub("", exchange.queue)
    late_ranks = []
    for rank in exchange.ranks if exchange.peer is None else (exchange.peer,):
        started = by_rank[rank].exchanges.get(queue, ()) if rank in by_rank else ()
        if rank != report.rank and not (started and started[-1].number >= exchange.number):
            late_ranks.append(rank)
    return late_ranks


def _find_mismatch(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Returns the divergence at the first position with different exchanges, or None. Tries queues with waits first."""
    awaited_queues = [
        _READ_QUEUE_PATTERN.sub("", report.wait.exchange.queue) for report in by_rank.values() if report.wait is not None
    ]
    all_queues = [queue for report in by_rank.values() for queue in report.exchanges]
    for queue in dict.fromkeys([*awaited_queues, *all_queues]):
        groups: dict[tuple[int, ...], dict[int, dict[int, ExchangeRecord]]] = {}
        for rank, report in by_rank.items():
            if exchanges := report.exchanges.get(queue):
                groups.setdefault(exchanges[-1].ranks, {})[rank] = {exchange.number: exchange for exchange in exchanges}
        for started in groups.values():
            for number in sorted({number for numbers in started.values() for number in numbers}):
                exchanges_at_number = {rank: numbers[number] for rank, numbers in started.items() if number in numbers}
                if len(rank_groups := _group_by_exchange(exchanges_at_number)) > 1:
                    return _describe_mismatch(started, number, rank_groups)
    return None


def _group_by_exchange(exchanges: Mapping[int, ExchangeRecord]) -> list[list[int]]:
    """Returns groups of ranks with the same exchange, the largest group first."""
    groups: list[list[int]] = []
    for rank, exchange in exchanges.items():
        group = next((group for group in groups if is_same_exchange(exchanges[group[0]], exchange)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return sorted(groups, key=len, reverse=True)


def _describe_mismatch(
    started: Mapping[int, Mapping[int, ExchangeRecord]], number: int, rank_groups: list[list[int]]
) -> Divergence:
    """Returns the divergence at position `number` of a queue. rank_groups: ranks by exchange, the largest group first."""
    usual_rank, odd_rank = rank_groups[0][0], rank_groups[1][0]
    usual_exchanges, odd_exchanges = started[usual_rank], started[odd_rank]
    is_clear = len(rank_groups[0]) > len(rank_groups[1])
    names = tuple(rank for group in rank_groups[1:] for rank in group) if is_clear else ()
    odd, usual = odd_exchanges[number], usual_exchanges[number]
    exchanges = (usual, odd)
    if _has_same_description(odd, usual):
        description = f"rank {odd_rank} has {odd.num_bytes} bytes for the {odd}, but rank {usual_rank} has {usual.num_bytes}"
        return Divergence("size", names, exchanges, description)
    differ = f"rank {odd_rank} starts the {odd}, but rank {usual_rank} starts the {usual}, as number {number} of that queue"
    next_usual, next_odd = usual_exchanges.get(number + 1), odd_exchanges.get(number + 1)
    subject = f"rank {odd_rank}" if is_clear else "one rank"
    if next_usual is not None and is_same_exchange(next_usual, odd):
        alternative = "" if is_clear else ", or the other rank makes it once too often"
        return Divergence("left out", names, exchanges, f"{differ}: {subject} has skipped the {usual}{alternative}")
    if next_odd is not None and is_same_exchange(next_odd, usual):
        alternative = "" if is_clear else ", or the other rank has skipped it"
        return Divergence("too many", names, (odd, usual), f"{differ}: {subject} makes the {odd} once too often{alternative}")
    return Divergence("other", names, exchanges, differ)


class _LateExchange(NamedTuple):
    """Describes a wait of `rank`. num_started: the number of ranks with reports that have started the exchange."""

    num_started: int
    rank: int
    exchange: ExchangeRecord
    late: tuple[int, ...]


def _find_missing_start(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Returns a divergence if ranks wait in an exchange that ranks waiting elsewhere have not started, else None."""
    late_exchanges = sorted(_find_late_exchanges(by_rank), key=lambda late_exchange: late_exchange[:2])
    if not late_exchanges:
        return None
    # The cause is the exchange that the fewest ranks have started, within a cycle of messages if there is one. All other waits
    # are consequences of it.
    first = (_find_message_cycle(late_exchanges) or late_exchanges)[0]
    peer_exchanges = (report.exchanges.get(first.exchange.queue, ()) for rank, report in by_rank.items() if rank != first.rank)
    was_seen_before = any(exchange.label == first.exchange.label for started in peer_exchanges for exchange in started)
    if len(first.late) > first.num_started and was_seen_before:
        # Other ranks have already started an exchange like this one, so this rank is ahead: it left out the exchange in which
        # they wait.
        first = next((late_exchange for late_exchange in late_exchanges if late_exchange.late == (first.rank,)), first)
    wait = by_rank[first.late[0]].wait
    assert wait is not None, first
    exchanges = (first.exchange, wait.exchange)
    description = (
        f"rank {first.rank} is in the {first.exchange}, which rank {first.late[0]} has not started; that rank is in the "
        f"{wait.exchange}"
    )
    if first.num_started > len(first.late):
        return Divergence("left out", first.late, exchanges, description)
    if len(first.late) > first.num_started:
        return Divergence("too many", (first.rank,), exchanges, description)
    return Divergence("not started", (), exchanges, description)


def _find_message_cycle(late_exchanges: Sequence[_LateExchange]) -> list[_LateExchange]:
    """Returns the messages of ranks that wait for each other in a cycle, or [] if there is no cycle."""
    waits = {late.rank: late for late in late_exchanges if late.exchange.peer is not None}
    for start in waits:
        cycle = [start]
        while (awaited := waits[cycle[-1]].late[0]) in waits and awaited not in cycle:
            cycle.append(awaited)
        if awaited == start:
            return [waits[rank] for rank in sorted(cycle)]
    return []


def _find_late_exchanges(by_rank: Mapping[int, FaultReport]) -> Iterator[_LateExchange]:
    """Yields, for each waiting rank, its exchange and the late ranks of that exchange, if they wait in other exchanges."""
    for rank, report in by_rank.items():
        late = [member for member in find_late_ranks(report, by_rank) if member in by_rank and by_rank[member].wait is not None]
        if report.wait is not None and late:
            exchange = report.wait.exchange
            # A message has two ends, however large its group is, so no third rank shows which end is wrong.
            num_members = 2 if exchange.peer is not None else sum(member in by_rank for member in exchange.ranks)
            yield _LateExchange(num_members - len(late), rank, exchange, tuple(late))

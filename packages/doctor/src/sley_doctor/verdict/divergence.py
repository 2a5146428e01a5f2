"""Finds where ranks have diverged, by comparing the exchanges that each has reported.

    rank 0   16 gather of a   17 gather of b   18 gather of c     one queue: the 17th of rank 1 is the 18th of the others,
    rank 1   16 gather of a   17 gather of c                      so it has left out the gather of b
    rank 2   16 gather of a   17 gather of b

Two ranks show that they differ, and not which of them is wrong: with more, the one that differs from most is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sley_doctor.reports.fault_report import FaultReport, SeenExchange, SeenWait

Kind = Literal["size", "left out", "too many", "other", "group", "not started"]

_MESSAGES = frozenset({"send", "receive"})
_PLACE = re.compile(r"(announcement|what stage).* (forward|backward), .* of micro-batch (\d+)")
"""What a message of a stage link is, with flow and micro-batch, as far as its words name them."""

_READ = re.compile(r" of \d+$")
"""Ends the name of a queue in which a rank waits until others have read what it offers."""


@dataclass(frozen=True)
class Divergence:
    """Describes how ranks have diverged. ranks: those that differ from most; empty if that cannot be decided. exchanges: those
    concerned, the likeliest first. told: the description in words.
    """

    kind: Kind
    ranks: tuple[int, ...]
    exchanges: tuple[SeenExchange, ...]
    told: str


def divergence(reports: Sequence[FaultReport]) -> Divergence | None:
    """Returns where `reports` disagree about an exchange, or show ranks that wait for each other; None if neither is so."""
    by_rank = {report.rank: report for report in reports}
    return _in_another_group(by_rank) or _at_one_number(by_rank) or _not_started(by_rank)


def is_same(one: SeenExchange, other: SeenExchange) -> bool:
    """Returns whether the exchanges of two ranks with one number in one queue are the same exchange."""
    return _has_same_words(one, other) and one.num_bytes == other.num_bytes


def _has_same_words(one: SeenExchange, other: SeenExchange) -> bool:
    """Returns whether both are described in the same words; a message is described differently at either end."""
    if not {one.operation, other.operation} <= _MESSAGES:
        return (one.operation, one.what) == (other.operation, other.what)
    # Of some messages, as of those that begin a walk, the words name no place at one end.
    found = [re.search(_PLACE, what) for what in (one.what, other.what)]
    places = {match.groups() for match in found if match}
    return len(places) <= 1


def late_for(wait: SeenWait, by_rank: Mapping[int, FaultReport]) -> list[int]:
    """Returns the ranks that have not reached the exchange of `wait`; those without a report count as late."""
    exchange = wait.exchange
    if wait.peer is not None:
        return [wait.peer]
    others = exchange.ranks if exchange.peer is None else (exchange.peer,)
    own = next((rank for rank, one in by_rank.items() if one.wait is not None and one.wait.exchange is exchange), -1)
    late = []
    for rank in others:
        report = by_rank.get(rank)
        started = report.exchanges.get(_READ.sub("", exchange.queue), ()) if report is not None else ()
        if rank != own and not (started and started[-1].number >= exchange.number):
            late.append(rank)
    return late


def _in_another_group(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Finds a rank that waits over one group for what others exchange with it over another."""
    for rank, report in by_rank.items():
        if report.wait is None:
            continue
        here = report.wait.exchange
        fellows = [by_rank[one] for one in here.ranks if one != rank and one in by_rank]
        if any(_times(one, here.what, here.group) >= _times(report, here.what, here.group) for one in fellows):
            continue
        for other, theirs in by_rank.items():
            for there in _all(theirs):
                is_it = there.what == here.what and there.group != here.group and {rank, other} <= set(there.ranks)
                if is_it and _times(theirs, there.what, there.group) > _times(report, there.what, there.group):
                    told = f"rank {rank} is in the {here}, where rank {other} is in the {there}"
                    return Divergence("group", (rank,), (here, there), told)
    return None


def _times(report: FaultReport, what: str, group: str) -> int:
    return sum(seen.what == what and seen.group == group for seen in _all(report))


def _all(report: FaultReport) -> Iterator[SeenExchange]:
    for seen in report.exchanges.values():
        yield from seen


def _at_one_number(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Finds the first number of a queue at which ranks have started different exchanges; of queues that ranks wait in first."""
    waited = [_READ.sub("", one.wait.exchange.queue) for one in by_rank.values() if one.wait is not None]
    known = [queue for report in by_rank.values() for queue in report.exchanges]
    for queue in dict.fromkeys([*waited, *known]):
        groups: dict[tuple[int, ...], dict[int, dict[int, SeenExchange]]] = {}
        for rank, report in by_rank.items():
            if seen := report.exchanges.get(queue):
                groups.setdefault(seen[-1].ranks, {})[rank] = {one.number: one for one in seen}
        for started in groups.values():
            for number in sorted({number for numbers in started.values() for number in numbers}):
                here = {rank: numbers[number] for rank, numbers in started.items() if number in numbers}
                if len(kinds := _alike(here)) > 1:
                    return _named(started, number, kinds)
    return None


def _alike(here: Mapping[int, SeenExchange]) -> list[list[int]]:
    """Returns the ranks in groups that have the same exchange, the largest group first."""
    kinds: list[list[int]] = []
    for rank, exchange in here.items():
        like = next((kind for kind in kinds if is_same(here[kind[0]], exchange)), None)
        if like is None:
            kinds.append([rank])
        else:
            like.append(rank)
    return sorted(kinds, key=len, reverse=True)


def _named(started: Mapping[int, Mapping[int, SeenExchange]], number: int, kinds: list[list[int]]) -> Divergence:
    """Returns how the ranks of `kinds`, whose exchanges differ at `number`, have diverged."""
    most, odd = kinds[0][0], kinds[1][0]
    usual, own = started[most], started[odd]
    is_clear = len(kinds[0]) > len(kinds[1])
    names = tuple(rank for kind in kinds[1:] for rank in kind) if is_clear else ()
    here, there = own[number], usual[number]
    both = (there, here)
    if _has_same_words(here, there):
        told = f"rank {odd} has {here.num_bytes} bytes for the {here}, where rank {most} has {there.num_bytes}"
        return Divergence("size", names, both, told)
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    differ = f"rank {odd} makes the {here} where rank {most} makes the {there}, the {number}{ending} of that queue"
    after, later = usual.get(number + 1), own.get(number + 1)
    if after is not None and is_same(after, here):
        told = f"{differ}: rank {odd} has left that out" if is_clear else f"{differ}: one has left it out"
        return Divergence("left out", names, both, told if is_clear else f"{told}, or the other makes it once too often")
    if later is not None and is_same(later, there):
        told = f"{differ}: rank {odd} makes it once too often" if is_clear else f"{differ}: one makes it once too often"
        return Divergence("too many", names, (here, there), told if is_clear else f"{told}, or the other has left it out")
    return Divergence("other", names, both, differ)


class _Late(NamedTuple):
    """Rank `rank` waits in `exchange`, which `started` of those that reported have started, and `late` have not."""

    started: int
    rank: int
    exchange: SeenExchange
    late: tuple[int, ...]


def _not_started(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Finds an exchange that some ranks wait in and others, which wait elsewhere, have not started."""
    found = sorted(_lates(by_rank), key=lambda one: one[:2])
    if not found:
        return None
    # What fewest have come to: in what all wait for at last, those wait too that only follow. Whoever waits for ranks that wait
    # for messages of each other follows too.
    first = (_circle_of_messages(found) or found)[0]
    others = (report.exchanges.get(first.exchange.queue, ()) for rank, report in by_rank.items() if rank != first.rank)
    is_usual = any(seen.what == first.exchange.what for exchanges in others for seen in exchanges)
    if len(first.late) > first.started and is_usual:
        # It would have come for all: the rank is ahead, because it has left out what the others wait for.
        first = next((one for one in found if one.late == (first.rank,)), first)
    wait = by_rank[first.late[0]].wait
    assert wait is not None, first
    elsewhere = wait.exchange
    both = (first.exchange, elsewhere)
    told = (
        f"rank {first.rank} is in the {first.exchange}, which rank {first.late[0]} has not started: that is in the {elsewhere}"
    )
    if first.started > len(first.late):
        return Divergence("left out", first.late, both, told)
    if len(first.late) > first.started:
        return Divergence("too many", (first.rank,), both, told)
    return Divergence("not started", (), both, told)


def _circle_of_messages(found: Sequence[_Late]) -> list[_Late]:
    """Returns those among `found` that are messages of ranks that wait for each other; none if there is no such circle."""
    waits = {one.rank: one for one in found if one.exchange.peer is not None}
    for start in waits:
        circle = [start]
        while (awaited := waits[circle[-1]].late[0]) in waits and awaited not in circle:
            circle.append(awaited)
        if awaited == start:
            return [waits[rank] for rank in sorted(circle)]
    return []


def _lates(by_rank: Mapping[int, FaultReport]) -> Iterator[_Late]:
    """Yields, for each rank that waits, the members of its exchange that wait in another one."""
    for rank, report in by_rank.items():
        if report.wait is not None:
            exchange = report.wait.exchange
            waiting = [one for one in late_for(report.wait, by_rank) if one in by_rank and by_rank[one].wait is not None]
            if waiting:
                # A message has two ends, whatever the group: they differ, and nobody says who is wrong.
                members = 2 if exchange.peer is not None else sum(one in by_rank for one in exchange.ranks)
                yield _Late(members - len(waiting), rank, exchange, tuple(waiting))

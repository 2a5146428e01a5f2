"""Runs the programs of all representatives in simulated time: computing on one lane, exchanges beside it on
lanes of their own.

    compute   F0 F1 F2 ......B0===B1===B2===|wait|update
    up          >> >> >>
    down               << <<
    reduce                          [=========]            hidden under B2, then exposed

Exchanges that share a link share its bandwidth: n of them at once go at 1/n. So a simulated second has no fixed amount of work,
and the time of an end changes whenever an exchange starts or ends on one of its links. Time goes from event to event; the
result does not depend on the order in which programs are visited.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sley_core.errors import PlanError
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange, Program


class LaneSpan(NamedTuple):
    """An exchange ran from `start_s` to `end_s` on `lane`."""

    lane: str
    key: Hashable
    members: tuple[int, ...]
    start_s: float
    end_s: float


class ComputeSpan(NamedTuple):
    """A rank ran the word `at` of its program."""

    rank: int
    at: int
    start_s: float
    end_s: float


class Exposed(NamedTuple):
    """A rank waited for the exchange `key`, of `lane`, and did what is its own part of it."""

    rank: int
    lane: str
    key: Hashable
    start_s: float
    end_s: float


@dataclass
class _Moving:
    """An exchange that has not ended. begun: members that are ready. left_s: its bytes, in seconds of a free link."""

    exchange: Exchange
    begun: set[int] = field(default_factory=set)
    start_s: float = -1.0
    left_s: float = 0.0
    since_s: float = 0.0
    share: float = 1.0
    version: int = 0


class Lanes:
    """One simulated run of `programs`. Results are in `computed`, `exchanged` and `exposed`, and in `ends_s` by rank."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.computed: list[ComputeSpan] = []
        self.exchanged: list[LaneSpan] = []
        self.exposed: list[Exposed] = []
        self.ends_s = [0.0] * len(programs)
        self._at = [0] * len(programs)
        self._waits: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
        self._followers: dict[Hashable, list[Hashable]] = defaultdict(list)
        self._moving: dict[Hashable, _Moving] = {}
        self._ended: dict[Hashable, Exchange] = {}
        self._queues: dict[tuple[str, int], deque[Hashable]] = defaultdict(deque)
        # A dict keeps the order in which they came; a set's is another in each process.
        self._on_link: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)
        self._events: list[tuple[float, int, str, Hashable, int]] = []
        self._count = 0

    def run(self) -> None:
        """Runs all programs to their ends, and leaves what they did in `computed`, `exchanged`, `exposed` and `ends_s`. To be
        called once.

        Raises PlanError "schedule-deadlock" if some wait for ever, which says for what.
        """
        for rank in range(len(self.programs)):
            self._go_on(rank, 0.0)
        while self._events:
            now_s, _, what, key, version = heapq.heappop(self._events)
            if what == "rank":
                assert isinstance(key, int), key
                self._go_on(key, now_s)
            elif (moving := self._moving.get(key)) is not None and moving.version == version:
                if what == "bytes":
                    self._join_links(moving, now_s)
                else:
                    self._end(moving, now_s)
        stuck = [rank for rank, program in enumerate(self.programs) if self._at[rank] < len(program)]
        if stuck:
            places = "; ".join(f"program {rank} waits for {self._waited(rank)}" for rank in stuck)
            raise PlanError("schedule-deadlock", f"the step comes to a stop: {places}", path=("pipeline", "use"))

    def _waited(self, rank: int) -> object:
        """Returns what the rank waits for: the key of an exchange, or the word that it is at."""
        word = self.programs[rank][self._at[rank]]
        return word.key if isinstance(word, Await) else word

    def _go_on(self, rank: int, now_s: float) -> None:
        """Runs a rank's words from `now_s` until one takes time or must wait; behind the last, notes when the rank ended."""
        program = self.programs[rank]
        while self._at[rank] < len(program):
            word = program[self._at[rank]]
            if isinstance(word, Compute):
                end_s = now_s + word.seconds
                self.computed.append(ComputeSpan(rank, self._at[rank], now_s, end_s))
                self._at[rank] += 1
                if word.seconds:
                    self._event(end_s, "rank", rank)
                    return
                continue
            if isinstance(word, Begin):
                self._begin(word.exchange, rank, now_s)
            elif (ended := self._ended.get(word.key)) is None:
                self._waits[word.key].append((rank, now_s))
                return
            elif ended.attended_s:
                self._attend(ended, rank, now_s, now_s)
                return
            self._at[rank] += 1
        self.ends_s[rank] = now_s

    def _attend(self, exchange: Exchange, rank: int, since_s: float, now_s: float) -> None:
        """Ends a rank's wait, which began at `since_s`, for an exchange that is done: the rank does its own part of it
        (`attended_s`), then goes on. Both count as exposed.
        """
        end_s = now_s + exchange.attended_s
        if end_s > since_s:
            self.exposed.append(Exposed(rank, exchange.lane, exchange.key, since_s, end_s))
        self._at[rank] += 1
        if exchange.attended_s:
            self._event(end_s, "rank", rank)
        else:
            self._go_on(rank, now_s)

    def _begin(self, exchange: Exchange, rank: int, now_s: float) -> None:
        """Notes that a rank is ready for an exchange, behind those that it began before on the same lane, and starts it if it
        may start.
        """
        assert rank in exchange.members, f"program {rank} begins {exchange}"
        moving = self._moving.setdefault(exchange.key, _Moving(exchange))
        assert moving.exchange == exchange, f"{exchange} at {rank}, {moving.exchange} elsewhere"
        moving.begun.add(rank)
        self._queues[exchange.lane, rank].append(exchange.key)
        self._start_if_due(exchange.key, now_s)

    def _start_if_due(self, key: Hashable, now_s: float) -> None:
        """Starts an exchange once all members have begun it, it is the first of its lane at each, and the exchange that it
        follows, if any, has ended. Does nothing before, or if it has started; where only that last one is missing, its end asks
        again.
        """
        moving = self._moving[key]
        exchange = moving.exchange
        if len(moving.begun) < len(exchange.members) or moving.start_s >= 0:
            return
        if any(self._queues[exchange.lane, member][0] != key for member in exchange.members):
            return
        if exchange.after is not None and exchange.after not in self._ended:
            self._followers[exchange.after].append(key)
            return
        moving.start_s, moving.left_s = now_s, exchange.work_s
        self._event(now_s + exchange.latency_s, "bytes", key, moving.version)

    def _join_links(self, moving: _Moving, now_s: float) -> None:
        """Begins to move the bytes of an exchange whose latency is over, beside those of others on its links."""
        moving.since_s = now_s
        for link in moving.exchange.links:
            self._on_link[link][moving.exchange.key] = None
        self._share_again(moving, now_s)

    def _share_again(self, changed: _Moving, now_s: float) -> None:
        """Computes anew when exchanges end that share a link with `changed`, which came or went. Each goes at 1/n, n being the
        number of exchanges on the fullest of its links.
        """
        neighbours = {key: None for link in changed.exchange.links for key in self._on_link[link]}
        if changed.exchange.key in self._moving:
            neighbours[changed.exchange.key] = None
        for key in neighbours:
            moving = self._moving[key]
            moving.left_s -= (now_s - moving.since_s) * moving.share
            moving.since_s = now_s
            full = max((len(self._on_link[link]) for link in moving.exchange.links), default=1)
            moving.share = 1.0 / full
            moving.version += 1
            self._event(now_s + max(0.0, moving.left_s) * full, "end", key, moving.version)

    def _end(self, moving: _Moving, now_s: float) -> None:
        """Ends an exchange: others have more of its links, the next of its lanes and those that follow it start, and ranks that
        wait for it go on.
        """
        exchange = moving.exchange
        del self._moving[exchange.key]
        self._ended[exchange.key] = exchange
        self.exchanged.append(LaneSpan(exchange.lane, exchange.key, exchange.members, moving.start_s, now_s))
        for link in exchange.links:
            self._on_link[link].pop(exchange.key, None)
        if exchange.links:
            self._share_again(moving, now_s)
        for member in exchange.members:
            queue = self._queues[exchange.lane, member]
            assert queue.popleft() == exchange.key
            if queue:
                self._start_if_due(queue[0], now_s)
        for follower in self._followers.pop(exchange.key, ()):
            self._start_if_due(follower, now_s)
        for rank, since_s in self._waits.pop(exchange.key, ()):
            self._attend(exchange, rank, since_s, now_s)

    def _event(self, at_s: float, what: str, key: Hashable, version: int = 0) -> None:
        """Adds an event to the heap. what: "rank" to go on, "bytes" when a latency is over, "end" of an exchange; one of an
        older `version` does not count.
        """
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, what, key, version))

"""Runs a filled outline in simulated time: does what `lanes.py` does, with numbers for words, and tells only when the step
ends.

`Lanes` is its oracle: both go from event to event in the same order, and add the same seconds in the same order, so that they
give the same bits. Who wants to know why a step takes so long asks `Lanes`.
"""

from __future__ import annotations

from heapq import heappop, heappush

from sley_estimate.seconds.outline import Filled


class Timed:
    """One run of a filled outline, which it uses up.

    An event is a time, its number among events, and whose it is: a stage's, which has computed; behind the stages an
    exchange's, whose latency is over; behind these an exchange's, which ends. Of several ends of one the latest counts.
    """

    def __init__(self, step: Filled) -> None:
        exchanges = step.exchanges
        count = len(exchanges.costs)
        self._beats = step.beats
        self._seconds = step.seconds
        self._missing = exchanges.missing
        self._followers = exchanges.followers
        self._ports = exchanges.ports
        costs = [step.costs[cost] for cost in exchanges.costs]
        self._latency_s = [cost.latency_s for cost in costs]
        self._left_s = [cost.work_s for cost in costs]
        self._attended_s = [cost.attended_s for cost in costs]
        self._since_s = [0.0] * count
        self._share = [1.0] * count
        self._latest = [0] * count
        self._waits: list[list[int] | None] = [[] for _ in range(count)]  # None: it has ended
        self._on_port: list[list[int]] = [[] for _ in range(2 * len(step.beats))]
        self._at = [0] * len(step.beats)
        self._events: list[tuple[float, int, int]] = []
        self._number = 0
        self._begun = len(step.beats)  # in an event, the first exchange whose latency is over
        self._ended = self._begun + count  # the first that ends
        self._running = len(step.beats)
        self._end_s = 0.0

    def run(self) -> float | None:
        """Runs the step; returns its seconds, or None if some stages wait for ever. To be called once."""
        events, stages, ends = self._events, self._begun, self._ended
        for stage in range(stages):
            self._begin(stage, 0.0)
        while events:
            now_s, number, whose = heappop(events)
            if whose < stages:
                self._begin(whose, now_s)
            elif whose < ends:
                self._join_links(whose - stages, now_s)
            elif self._latest[whose - ends] == number:
                self._end(whose - ends, now_s)
        return None if self._running else self._end_s

    def _begin(self, stage: int, now_s: float) -> None:
        """Goes on with the next beats of a stage from `now_s`, until one takes time or must wait; behind the last, the stage is
        done.
        """
        beats, missing = self._beats[stage], self._missing
        for at in range(self._at[stage], len(beats)):
            begins, awaited, place = beats[at]
            for one in begins:
                missing[one] -= 1
                if not missing[one]:
                    self._start(one, now_s)
            if awaited >= 0 and (waits := self._waits[awaited]) is not None:
                self._at[stage] = at
                waits.append(stage)
                return
            ready_s = now_s + self._attended_s[awaited] if awaited >= 0 else now_s
            if (seconds := self._seconds[place]) or ready_s > now_s:
                self._at[stage] = at + 1
                self._event(ready_s + seconds, stage)
                return
        self._running -= 1
        self._end_s = max(self._end_s, now_s)

    def _compute(self, stage: int, now_s: float) -> None:
        """Goes on with the beat of a stage whose wait is over: its own part of the exchange, then computing, then the next
        beats.
        """
        at = self._at[stage]
        self._at[stage] = at + 1
        _, awaited, place = self._beats[stage][at]
        ready_s = now_s + self._attended_s[awaited]
        if (seconds := self._seconds[place]) or ready_s > now_s:
            self._event(ready_s + seconds, stage)
        else:
            self._begin(stage, now_s)

    def _start(self, one: int, now_s: float) -> None:
        """Starts exchange number `one`, which all members have begun and which is first of its lane at each:
        its latency runs.
        """
        self._event(now_s + self._latency_s[one], self._begun + one)

    def _join_links(self, one: int, now_s: float) -> None:
        """Begins to move the bytes of an exchange whose latency is over, beside those of others on its links."""
        self._since_s[one] = now_s
        alone = True
        for port in self._ports[one]:
            moving = self._on_port[port]
            alone = alone and not moving
            moving.append(one)
        if alone:  # as `_move` would find, without looking
            self._event(now_s + self._left_s[one], self._ended + one)
            self._latest[one] = self._number
        else:
            self._share_again(self._ports[one], now_s)

    def _share_again(self, ports: tuple[int, ...], now_s: float) -> None:
        """Computes anew when the exchanges on any of the links `ports` will end."""
        moving = self._on_port[ports[0]]
        for port in ports[1:]:
            moving = moving + [one for one in self._on_port[port] if one not in moving]
        for one in moving:
            self._move(one, now_s)

    def _move(self, one: int, now_s: float) -> None:
        """Computes anew when exchange `one` will end: it goes at 1/n, n being the number of exchanges on the fullest of its
        links.
        """
        left_s = self._left_s[one] = self._left_s[one] - (now_s - self._since_s[one]) * self._share[one]
        self._since_s[one] = now_s
        full = 1
        for port in self._ports[one]:
            if (number := len(self._on_port[port])) > full:
                full = number
        self._share[one] = 1.0 / full
        self._event(now_s + (left_s if left_s > 0.0 else 0.0) * full, self._ended + one)
        self._latest[one] = self._number

    def _end(self, one: int, now_s: float) -> None:
        """Ends an exchange: others have more of its links, those that follow on its lanes may start, and stages that wait for
        it go on.
        """
        waits, self._waits[one] = self._waits[one], None
        others = False
        for port in self._ports[one]:
            moving = self._on_port[port]
            moving.remove(one)
            others = others or bool(moving)
        if others:
            self._share_again(self._ports[one], now_s)
        for after in self._followers[one]:
            self._missing[after] -= 1
            if not self._missing[after]:
                self._start(after, now_s)
        for stage in waits or ():
            self._compute(stage, now_s)

    def _event(self, at_s: float, whose: int) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, whose))

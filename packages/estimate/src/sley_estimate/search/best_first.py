"""Puts layouts in order, the fastest first, and looks only at those whose turn comes.

    shapes ──least──> | heap by seconds | ──bound──> its layouts ──> | heap | ──estimate──> | heap | ──> the next fastest

Nothing undercuts the seconds with which it lies on the heap: when its turn comes, a shape is opened, a layout is estimated and
put back, and one that was estimated is the fastest of all that are left. Since estimates of some tell of others, too, a layout
may be sent back under more seconds instead. What does not fit is dropped on the way, and put back with its optimizer states off
the device, which is never faster: so a layout that fits comes without.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

from sley_core.errors import SleyError
from sley_estimate.search.layouts import Candidate, Shape

SLOWEST = 1.2
"""Nobody waits longer than this many times the fastest step for less memory."""

NO_LESS = 1.000001
"""What exceeds seconds by no more than this is as long: others add the same numbers in another order."""

LESS = 0.8
"""What a slower layout needs at most of the memory of those before it, to be worth a line."""


@dataclass(frozen=True)
class Estimate:
    """What one step of a layout takes. num_bytes: the peak of the rank that holds most."""

    seconds: float
    num_bytes: int


class Estimator(Protocol):
    """Tells what layouts take. All raise a SleyError for what cannot be assembled, or not be told."""

    def least(self, shape: Shape) -> Estimate:
        """Returns seconds and bytes that no layout of the shape undercuts; very cheap."""
        ...

    def bound(self, layout: Candidate) -> Estimate:
        """Returns seconds and bytes that the layout does not undercut; cheap."""
        ...

    def closer_s(self, layout: Candidate, *, look: bool = False) -> float:
        """Returns seconds that the layout does not undercut, by what its hosts take, and by what layouts show that were looked
        at before. Cheap, but where they show nothing and `look` says that this one is looked at.
        """
        ...

    def num_bytes(self, layout: Candidate) -> int:
        """Returns the bytes of the rank that holds most."""
        ...

    def seconds(self, layout: Candidate) -> float:
        """Returns the seconds of its step."""
        ...


class Space(Protocol):
    """What there is to search: shapes, the same with less on the device, none of which is faster, and the layouts of each."""

    def shapes(self) -> Iterable[Shape]:
        """Yields shapes: sizes, and what changes how long a layer takes."""
        ...

    def offloading(self, shape: Shape) -> Iterable[Shape]:
        """Yields the shapes that differ from `shape` in that optimizer states leave the device."""
        ...

    def within(self, shape: Shape) -> Iterable[Candidate]:
        """Yields the layouts of a shape."""
        ...

    def num_within(self, shape: Shape) -> int:
        """Returns how many layouts a shape has."""
        ...


@dataclass(frozen=True)
class Seen:
    """A layout and what it takes."""

    layout: Candidate
    estimate: Estimate


@dataclass
class SearchTally:
    """What a search met. num_layouts: all that there are; simulated: those whose steps were; too_large: those of which it saw
    that they do not fit. refused: those that cannot be assembled, or not be told, by the reason. hints: what to do about it, by
    the reason, where that is known.
    """

    num_layouts: int = 0
    simulated: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    hints: dict[str, str] = field(default_factory=dict)

    def refuse(self, error: SleyError, number: int = 1) -> None:
        """Counts `number` layouts that `error` refuses, under its code and message."""
        problem = error.diagnostics[0]
        reason = f"{problem.code}: {problem.message}"
        self.refused[reason] += number
        if problem.hint:
            self.hints[reason] = problem.hint


class InOrder:
    """Gives layouts of `space` that need at most `memory` bytes on any rank, one after the other, the fastest first.

    What is given does not depend on the order of the space, but for layouts of equal seconds.
    """

    def __init__(self, space: Space, estimator: Estimator, memory: int | None = None) -> None:
        self.tally = SearchTally()
        self._space = space
        self._estimator = estimator
        self._memory = memory
        self._numbers = count()
        self._heap: list[tuple[float, int, Shape | Candidate, int, bool]] = []
        self._away: dict[int, tuple[Shape, list[Shape]]] = {}
        for shape in space.shapes():
            self.tally.num_layouts += space.num_within(shape) * (1 + len(self._offloading(shape)))
            self._put_shape(shape)

    def next(self, below: int | None = None, slowest_s: float = inf) -> Seen | None:
        """Returns the next fastest layout that fits; None if none is left, or none that takes at most `slowest_s`. Estimates
        layouts on the way, and counts them in `tally`.

        below: passes over layouts that need as many bytes or more, for good.
        """
        while self._heap and self._heap[0][0] <= slowest_s:
            seconds, _, what, num_bytes, is_estimated = heapq.heappop(self._heap)
            if below is not None and num_bytes >= below:
                self.put_offloading(what)
                continue
            if isinstance(what, Shape):
                self._open(what)
            elif is_estimated:
                return Seen(what, Estimate(seconds, num_bytes))
            else:
                self._estimate(what, seconds, num_bytes, below)
        return None

    def front(self, fastest: Iterable[Seen]) -> Iterator[Seen]:
        """Yields layouts that are slower than `fastest`, which `next` has returned: each the fastest of those that need a fifth
        less memory than all before it; none that takes over `SLOWEST` times as long as the first.
        """
        given = list(fastest)
        seen = [one.estimate for one in given]
        slowest_s = SLOWEST * seen[0].seconds if seen else 0.0
        for one in given:
            self.put_offloading(one.layout)
        while seen and (found := self.next(int(LESS * min(one.num_bytes for one in seen)), slowest_s)):
            seen.append(found.estimate)
            self.put_offloading(found.layout)
            yield found

    def _put(self, what: Shape | Candidate, seconds: float, num_bytes: int, *, is_estimated: bool = False) -> None:
        """Puts a shape or a layout on the heap under seconds that it does not undercut."""
        heapq.heappush(self._heap, (seconds, next(self._numbers), what, num_bytes, is_estimated))

    def _put_shape(self, shape: Shape) -> None:
        """Puts a shape on the heap under its least seconds. Where it is refused, or does not fit, counts all of its layouts,
        and puts those shapes on that differ in what leaves the device.
        """
        number = self._space.num_within(shape)
        try:
            least = self._estimator.least(shape)
        except SleyError as error:
            self._refuse(shape, error, number)
            return
        if self._fits(least.num_bytes, number):
            self._put(shape, least.seconds, least.num_bytes)
        else:
            self.put_offloading(shape)

    def put_offloading(self, what: Shape | Candidate) -> None:
        """Puts what differs from a shape or layout in what leaves the device; nothing for one whose states leave already."""
        shape = what if isinstance(what, Shape) else what.shape
        for other in self._offloading(shape) if shape.offload is None else ():
            if isinstance(what, Shape):
                self._put_shape(other)
            else:
                self._put_layout(Candidate(other, what.schedule, what.reducer))

    def _offloading(self, shape: Shape) -> list[Shape]:
        """Returns the shapes that differ in what leaves the device: the same objects for all layouts of `shape`. It is kept,
        so that no other shape has its `id`.
        """
        if id(shape) not in self._away:
            self._away[id(shape)] = shape, list(self._space.offloading(shape))
        return self._away[id(shape)][1]

    def _open(self, shape: Shape) -> None:
        for layout in self._space.within(shape):
            self._put_layout(layout)

    def _put_layout(self, layout: Candidate) -> None:
        try:
            bound = self._estimator.bound(layout)
        except SleyError as error:
            self._refuse(layout, error)
            return
        if self._fits(bound.num_bytes):
            self._put(layout, bound.seconds, bound.num_bytes)
        else:
            self.put_offloading(layout)

    def _estimate(self, layout: Candidate, seconds: float, num_bytes: int, below: int | None) -> None:
        """Estimates a layout and puts it back on the heap, unless it does not fit, needs `below` bytes or more, or is refused;
        counts which. If others show that it takes longer than the `seconds` with which it lay there, only puts it back.
        """
        try:
            if self._is_put_back(layout, seconds, num_bytes, self._estimator.closer_s(layout)):
                return
            num_bytes = self._estimator.num_bytes(layout)
            if not self._fits(num_bytes) or (below is not None and num_bytes >= below):
                self.put_offloading(layout)
                return
            if self._is_put_back(layout, seconds, num_bytes, self._estimator.closer_s(layout, look=True)):
                return
            seconds = self._estimator.seconds(layout)
        except SleyError as error:
            self._refuse(layout, error)
            return
        self.tally.simulated += 1
        self._put(layout, seconds, num_bytes, is_estimated=True)

    def _refuse(self, what: Shape | Candidate, error: SleyError, number: int = 1) -> None:
        """Counts the `number` layouts of a shape, or the layout, that `error` refuses; what differs in what leaves the device
        is asked for by itself.
        """
        self.tally.refuse(error, number)
        self.put_offloading(what)

    def _is_put_back(self, layout: Candidate, seconds: float, num_bytes: int, closer_s: float) -> bool:
        """Puts a layout back on the heap under `closer_s` if that is more than the `seconds` with which it lay there; returns
        whether it did.
        """
        if closer_s <= NO_LESS * seconds:
            return False
        self._put(layout, closer_s, num_bytes)
        return True

    def _fits(self, num_bytes: int, number: int = 1) -> bool:
        """Returns whether `num_bytes` fit into the memory; counts `number` layouts as too large if not."""
        fits = self._memory is None or num_bytes <= self._memory
        self.tally.too_large += 0 if fits else number
        return fits


def smallest(space: Space, estimator: Estimator) -> Seen | None:
    """Returns the layout that needs the least memory, with a bound of its seconds; None if none can be assembled. Layouts that
    are refused are passed over.
    """
    least: list[tuple[int, int, Shape]] = []
    every = (one for shape in space.shapes() for one in (shape, *space.offloading(shape)))
    for number, shape in enumerate(every):
        try:
            least.append((estimator.least(shape).num_bytes, number, shape))
        except SleyError:
            continue
    found: Seen | None = None
    for num_bytes, _, shape in sorted(least):
        if found is not None and num_bytes >= found.estimate.num_bytes:
            return found
        for layout in space.within(shape):
            try:
                estimate = Estimate(estimator.bound(layout).seconds, estimator.num_bytes(layout))
            except SleyError:
                continue
            if found is None or estimate.num_bytes < found.estimate.num_bytes:
                found = Seen(layout, estimate)
    return found

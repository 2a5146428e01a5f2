"""Looks for the fastest layouts that fit, the most promising first, until no other can be better.

Layouts come in the order of a bound, the seconds that they do not undercut. One is passed over if it does not fit, or once
as many as are wanted are faster than its bound and one that was seen is both faster and smaller: it can be neither among the
fastest nor on the front of memory against time.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sley_core.errors import SleyError
from sley_core.search.layouts import Candidate


@dataclass(frozen=True)
class Estimate:
    """What one step of a layout takes. num_bytes: the peak of the rank that holds most."""

    seconds: float
    num_bytes: int


class Estimator(Protocol):
    """Tells what layouts take. Both raise a SleyError for one that cannot be assembled."""

    def bound(self, layout: Candidate) -> Estimate:
        """Returns seconds that the layout does not undercut, and its bytes; cheap."""
        ...

    def seconds(self, layout: Candidate) -> float:
        """Returns the seconds of its step."""
        ...


@dataclass(frozen=True)
class Seen:
    """A layout and what it takes."""

    layout: Candidate
    estimate: Estimate


@dataclass
class Fastest:
    """What a search saw.

    fastest: those that fit, the fastest first. front: of all that were seen, those of which none is both faster and smaller, by
    time. smallest: the one that needs the least memory, whether it fits or not, with the bound of its seconds; None if none can
    be assembled. num_layouts: all that there are; num_seen: those whose seconds were estimated; too_large: those that do not
    fit. refused: those that cannot be assembled, by the code of their first problem.
    """

    fastest: list[Seen] = field(default_factory=list)
    front: list[Seen] = field(default_factory=list)
    smallest: Seen | None = None
    num_layouts: int = 0
    num_seen: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def search(layouts: Iterable[Candidate], estimator: Estimator, *, memory: int | None = None, top: int = 5) -> Fastest:
    """Returns the `top` fastest layouts that need at most `memory` bytes on any rank, and the front of those that do.

    What is returned does not depend on the order of `layouts`, but for layouts of equal seconds.
    """
    found = Fastest()
    for seen in sorted(_bounded(layouts, estimator, found, memory), key=lambda seen: seen.estimate.seconds):
        if not _is_out(seen.estimate, found, top):
            _look(seen, estimator, found, top)
    return found


def _bounded(layouts: Iterable[Candidate], estimator: Estimator, found: Fastest, memory: int | None) -> list[Seen]:
    """Returns the layouts that fit, with their bounds."""
    fitting = []
    for layout in layouts:
        found.num_layouts += 1
        try:
            seen = Seen(layout, estimator.bound(layout))
        except SleyError as error:
            found.refused[error.diagnostics[0].code] += 1
            continue
        if found.smallest is None or seen.estimate.num_bytes < found.smallest.estimate.num_bytes:
            found.smallest = seen
        if memory is None or seen.estimate.num_bytes <= memory:
            fitting.append(seen)
        else:
            found.too_large += 1
    return fitting


def _is_out(bound: Estimate, found: Fastest, top: int) -> bool:
    """Returns whether a layout with this bound can be neither among the fastest nor on the front."""
    too_slow = len(found.fastest) == top and found.fastest[-1].estimate.seconds <= bound.seconds
    return too_slow and any(_dominates(seen.estimate, bound) for seen in found.front)


def _look(bounded: Seen, estimator: Estimator, found: Fastest, top: int) -> None:
    try:
        estimate = Estimate(estimator.seconds(bounded.layout), bounded.estimate.num_bytes)
    except SleyError as error:
        found.refused[error.diagnostics[0].code] += 1
        return
    found.num_seen += 1
    seen = Seen(bounded.layout, estimate)
    insort(found.fastest, seen, key=lambda one: one.estimate.seconds)
    del found.fastest[top:]
    if not any(_dominates(other.estimate, estimate) for other in found.front):
        found.front = [other for other in found.front if not _dominates(estimate, other.estimate)]
        insort(found.front, seen, key=lambda one: one.estimate.seconds)


def _dominates(one: Estimate, other: Estimate) -> bool:
    """Returns whether `one` is at least as fast and as small as `other`; of equal ones the first that was seen stays."""
    return one.seconds <= other.seconds and one.num_bytes <= other.num_bytes

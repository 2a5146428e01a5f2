"""Looks for the fastest layouts that fit, the most promising sizes first, until no other can be better.

Sizes come in the order of a bound, the seconds that none of their layouts undercuts. They are passed over once as many
layouts as are wanted are faster than their bound, and one that was seen is both faster and smaller than their bounds: what is
passed over can be neither among the fastest nor on the front of memory against time.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sley_core.errors import SleyError
from sley_core.search.layouts import Layout, Sizes


@dataclass(frozen=True)
class Estimate:
    """What one step of a layout takes. num_bytes: the peak of the rank that holds most."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Bound(Estimate):
    """What no layout of some sizes undercuts."""


class Estimator(Protocol):
    """Tells what layouts take. `estimate` raises a SleyError for one that cannot be assembled."""

    def bound(self, sizes: Sizes) -> Bound: ...

    def estimate(self, layout: Layout) -> Estimate: ...


@dataclass(frozen=True)
class Seen:
    """A layout and what it takes."""

    layout: Layout
    estimate: Estimate


@dataclass
class Found:
    """What a search saw.

    fastest: those that fit, the fastest first. front: of all that were seen, those of which none is both faster and smaller, by
    time. num_seen: layouts that were estimated. passed_over: sizes whose bounds were enough. refused: layouts that cannot be
    assembled, by the code of their first problem.
    """

    fastest: list[Seen] = field(default_factory=list)
    front: list[Seen] = field(default_factory=list)
    num_seen: int = 0
    passed_over: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def smallest(self) -> Seen | None:
        """The layout that needs the least memory, whether it fits or not; None if none can be assembled."""
        return min(self.front, key=lambda seen: seen.estimate.num_bytes, default=None)


def search(
    all_sizes: Iterable[Sizes],
    layouts_of: Callable[[Sizes], Iterable[Layout]],
    estimator: Estimator,
    *,
    memory: int | None = None,
    top: int = 5,
) -> Found:
    """Returns the `top` fastest layouts that need at most `memory` bytes on any rank, and the front.

    layouts_of: the layouts with some sizes. Which layouts are returned does not depend on the order of `all_sizes`, but for
    layouts of equal seconds.
    """
    found = Found()
    bounded = sorted(((estimator.bound(sizes), sizes) for sizes in all_sizes), key=lambda pair: pair[0].seconds)
    for bound, sizes in bounded:
        if _is_out(bound, found, memory, top):
            found.passed_over += 1
            continue
        for layout in layouts_of(sizes):
            _look(layout, estimator, found, memory, top)
    return found


def _is_out(bound: Bound, found: Found, memory: int | None, top: int) -> bool:
    """Returns whether no layout with this bound can be among the fastest or on the front."""
    too_large = memory is not None and bound.num_bytes > memory
    too_slow = len(found.fastest) == top and found.fastest[-1].estimate.seconds <= bound.seconds
    return (too_large or too_slow) and any(_dominates(seen.estimate, bound) for seen in found.front)


def _look(layout: Layout, estimator: Estimator, found: Found, memory: int | None, top: int) -> None:
    try:
        estimate = estimator.estimate(layout)
    except SleyError as error:
        found.refused[error.diagnostics[0].code] += 1
        return
    found.num_seen += 1
    seen = Seen(layout, estimate)
    if memory is None or estimate.num_bytes <= memory:
        insort(found.fastest, seen, key=lambda one: one.estimate.seconds)
        del found.fastest[top:]
    if not any(_dominates(other.estimate, estimate) for other in found.front):
        found.front = [other for other in found.front if not _dominates(estimate, other.estimate)]
        insort(found.front, seen, key=lambda one: one.estimate.seconds)


def _dominates(one: Estimate, other: Estimate) -> bool:
    """Returns whether `one` is at least as fast and as small as `other`; of equal ones the first that was seen stays."""
    return one.seconds <= other.seconds and one.num_bytes <= other.num_bytes

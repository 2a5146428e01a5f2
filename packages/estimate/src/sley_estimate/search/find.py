"""Finds the fastest layouts that fit: puts them in order at a glance, and takes one once its own steps have said the same.

InOrder ──the next fastest──> exact ──fits──> one of the `top`
              ^                  └──no──> dropped
              └──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from sley_core.collector import uncollected
from sley_core.errors import SleyError
from sley_estimate.search.best_first import InOrder, SearchTally, Seen, smallest
from sley_estimate.search.exact import ExactEstimate, exact

if TYPE_CHECKING:
    from sley_estimate.search.layouts import Candidate, Layouts
    from sley_estimate.search.quick import Quick


@dataclass(frozen=True)
class Final:
    """A layout that fits. seen: what it takes at a glance. exact: by its own steps; None where nobody asked for that."""

    seen: Seen
    exact: ExactEstimate | None

    @property
    def seconds(self) -> float:
        """Returns the seconds of its step: by its own steps if these were taken, else at a glance."""
        return self.exact.estimate.seconds if self.exact else self.seen.estimate.seconds

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the stage that holds most: by its own steps if these were taken, else at a glance."""
        return self.exact.estimate.num_bytes if self.exact else self.seen.estimate.num_bytes


@dataclass
class SearchFound:
    """What a search found. fastest: layouts that fit, the fastest first. front: slower ones that need less memory, at a glance.

    dropped: how many fitted at a glance, and not by their own steps. smallest: if nothing fits, the layout that needs least.
    """

    tally: SearchTally
    fastest: list[Final] = field(default_factory=list)
    front: list[Seen] = field(default_factory=list)
    dropped: int = 0
    smallest: Seen | None = None


def find(
    space: Layouts,
    quick: Quick,
    *,
    memory: int | None = None,
    top: int = 5,
    verify: bool = True,
    tell: Callable[[Candidate], None] = lambda layout: None,
) -> SearchFound:
    """Returns the `top` fastest layouts of `space` that need at most `memory` bytes on any rank (None: any number), slower ones
    that need less memory, and what was refused or did not fit; if nothing fits, the layout that needs least.

    verify: whether the figures of the fastest are those of `train-cli estimate`, and one that does not fit by them is replaced
    by the next; else those at a glance. tell: called with each layout before its steps are taken, which lasts.
    """
    with uncollected():
        order = InOrder(space, quick, memory)
    found = SearchFound(order.tally)
    seen = [] if verify else _fastest(order, top)
    found.fastest = [Final(one, None) for one in seen]
    while verify and len(found.fastest) < top and (next_one := _fastest(order, 1)):
        (one,) = next_one
        tell(one.layout)
        try:
            told = exact(quick, one.layout, memory)
        except SleyError as error:
            found.tally.refuse(error)
            continue
        if told is None:
            found.dropped += 1
            order.put_offloading(one.layout)
        else:
            seen.append(one)
            found.fastest.append(Final(one, told))
    found.fastest.sort(key=lambda final: final.seconds)
    if found.fastest:
        with uncollected():
            found.front = list(order.front(seen))
    else:
        found.smallest = smallest(space, quick)
    return found


def _fastest(order: InOrder, number: int) -> list[Seen]:
    """Returns up to `number` layouts of `order`, the fastest of those that are left. Python's collector is off meanwhile:
    simulated steps are many objects and no cycles, and to walk through all of them took a fifth of the time and more.
    """
    with uncollected():
        return list(islice(iter(order.next, None), number))

"""Finds ranks that wait for each other after a wait has failed, to tell a late rank from ranks that exchange in different
orders.

A rank whose wait fails writes into the run's store what it waits in, and how many exchanges of each queue it has started. It
waits for a peer that has started fewer of that queue than the number of its exchange. Ranks that wait for each other in a
circle never end, however fast they are: they have started their exchanges in different orders. The last rank of the circle
whose wait fails sees all of it.

    rank 0   gather 1, gather 2, reduce 1: waits      rank 1 has started no reduce
    rank 1   gather 1, gather 2, gather 3: waits      rank 0 has started two gathers
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

MOST_RANKS = 256
"""The most ranks that are read: each is compared with each."""

_LOOK_S = 0.02
"""Seconds between two reads of what the others wrote."""

_ANSWER_S = 2.0
"""Seconds for the store to answer, beyond the time for the others: its host may hang too."""


class Waiting(NamedTuple):
    """Describes what a rank waits in.

    what: in words. ranks: those that take part in it. queue, number: its place among the exchanges that these start in one
    order. numbers: how many exchanges of each queue the rank has started.
    """

    rank: int
    what: str
    ranks: tuple[int, ...]
    queue: str
    number: int
    numbers: Mapping[str, int]

    def is_for(self, other: Waiting) -> bool:
        """Returns whether the rank of `other` has not yet started what this rank waits in."""
        return other.rank in self.ranks and other.numbers.get(self.queue, 0) < self.number


def circle_in(waiting: Mapping[int, Waiting]) -> list[Waiting]:
    """Returns a circle of ranks, each of which waits for the next and the last for the first, the lowest first; [] if there is
    none.

    The result is the same on all ranks with the same input. waiting: by rank.
    """
    left = dict(waiting)
    while free := [rank for rank, one in left.items() if not any(map(one.is_for, left.values()))]:
        for rank in free:
            del left[rank]
    if not left:
        return []
    # Each of these waits for another of them, so a walk from one to the next must return to one.
    path: list[int] = []
    rank = min(left)
    while rank not in path:
        path.append(rank)
        rank = min(other.rank for other in left.values() if left[rank].is_for(other))
    found = path[path.index(rank) :]
    first = found.index(min(found))
    return [left[each] for each in (*found[first:], *found[:first])]


def told(circle: list[Waiting]) -> str:
    """Returns in words which rank waits in what for which rank."""
    after = [*circle[1:], circle[0]]
    waits = [
        f"rank {one.rank} waits in {one.what} for rank {late.rank}" for one, late in zip(circle, after, strict=True)
    ]
    return ", ".join(waits)


def heard(own: Waiting, store: Store, patience_s: float) -> dict[int, Waiting]:
    """Writes `own` into `store`; returns what the ranks wait in for which it waits, and those for which these wait, and so on.

    The result is by rank, and includes `own`; ranks that have written nothing are missing. Returns as soon as there is a
    circle, or no rank left to read; otherwise after `patience_s`, and shortly later if the store does not answer.
    """
    found = {own.rank: own}
    deadline = time.monotonic() + patience_s

    def listen() -> None:
        # If the store fails, as when its host has ended, nothing is known of the others.
        with contextlib.suppress(Exception):
            store.set(_key(own.rank), json.dumps(own))
            while _hear(found, store) and not circle_in(dict(found)) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    thread = threading.Thread(target=listen, name="sley-circles", daemon=True)
    thread.start()
    thread.join(patience_s + _ANSWER_S)
    return dict(found)


def _hear(found: dict[int, Waiting], store: Store) -> bool:
    """Adds what can be read now to `found`; returns whether ranks that are waited for have written nothing."""
    silent: set[int] = set()
    while asked := {rank for one in found.values() for rank in one.ranks} - found.keys() - silent:
        for rank in sorted(asked)[: MOST_RANKS - len(found) - len(silent)]:
            if store.check([_key(rank)]):
                number, what, ranks, *others = json.loads(store.get(_key(rank)))
                found[rank] = Waiting(number, what, tuple(ranks), *others)
            else:
                silent.add(rank)
        if len(found) + len(silent) >= MOST_RANKS:
            break
    return bool(silent)


def _key(rank: int) -> str:
    return f"waiting/{rank}"

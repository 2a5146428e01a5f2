"""Turns torch's errors of collectives into errors that name operation, group and content, or ranks that wait in a circle."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm.marks import HINT as ONE_ORDER
from sley_core.comm.progress import Members
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_LANE

HINT = "another rank of the group stopped, or did not come within [limits] collective_timeout_s"

_RACE_S = 0.1
"""Seconds to wait for a peer's write after a closed connection: a peer that times out closes its connections just before."""

_TIMED_OUT = "Timed out"


class Turn(NamedTuple):
    """Describes an exchange that this rank has started; the `number`-th of `queue`, whose exchanges `members` start in one
    order.

    what: what is exchanged. peer: the rank at the other end of a message; None if all members take part. num_bytes: of what
    this rank gives or gets.
    """

    operation: str
    members: Members
    what: str
    queue: str
    number: int
    peer: int | None = None
    num_bytes: int = 0

    def __str__(self) -> str:
        over = f" over {self.members}"  # some `what`s end with it already
        return f"{self.operation} of {self.what.removesuffix(over)}{over}"

    @property
    def waiting(self) -> Waiting:
        """What this rank tells the others when a wait in this exchange has failed."""
        members = self.members
        peers = tuple(rank for rank in members.ranks if rank != members.rank) if self.peer is None else (self.peer,)
        return Waiting(members.rank, f"the {self}", peers, self.queue, self.number, dict(members.progress.numbers))

    def failed(self, message: str, ran_out_of_time: bool, peer: int | None = None) -> RunError:
        """Returns the error of a wait in this exchange that failed: `collective-failed` with `message`, or `ranks-differ`.

        The latter if ranks wait for each other in a circle, and have written so into the store. ran_out_of_time: whether this
        rank timed out; else a peer has ended, or closed its connection. peer: the global rank that did not come, if that is
        known. May block while it waits for the others' writes.
        """
        progress = self.members.progress
        progress.failed("late" if ran_out_of_time else "closed", peer)
        if progress.store is None:
            return RunError("collective-failed", message, hint=HINT)
        others = read_waits(self.waiting, progress.store, progress.patience_s if ran_out_of_time else _RACE_S)
        if circle := circle_in(others):
            hint = f"ranks start the exchanges of a group in one order; {ONE_ORDER}"
            return RunError("ranks-differ", f"ranks wait for each other: {in_words(circle)}", hint=hint)
        more = [f"; rank {each.rank} waited in {each.what}" for each in others.values() if each.rank != self.members.rank]
        return RunError("collective-failed", message + "".join(more), hint=HINT)


def turn_of(operation: str, members: Members, what: str, lane: str = DEFAULT_LANE, num_bytes: int = 0) -> Turn:
    """Counts an exchange of all `members` on `lane`, which starts now; returns its turn. what: the content, for errors."""
    return _counted(operation, members, what, f"{members.axis} {lane}", None, num_bytes)


def message_turn(
    operation: str, members: Members, what: str, lane: str, sender: int, receiver: int, num_bytes: int = 0
) -> Turn:
    """Counts a message on `lane` between two coordinates of `members`, at either end; returns its turn."""
    peer = members.ranks[receiver if members.rank == members.ranks[sender] else sender]
    return _counted(operation, members, what, f"{members.axis} {lane} {sender}>{receiver}", peer, num_bytes)


def _counted(operation: str, members: Members, what: str, queue: str, peer: int | None, num_bytes: int) -> Turn:
    turn = Turn(operation, members, what, queue, members.progress.numbers.get(queue, 0) + 1, peer, num_bytes)
    members.progress.started(turn)
    return turn


def guarded(call: Callable[[], Any], turn: Turn) -> Any:
    """Returns `call()`, recording the wait; torch's RuntimeError becomes the error of `Turn.failed`."""
    progress = turn.members.progress
    progress.waits(turn)
    try:
        result = call()
    except RuntimeError as error:
        why = first_line(error)
        raise turn.failed(f"{turn} failed on rank {turn.members.rank}: {why}", _TIMED_OUT in why) from error
    progress.waited()
    return result


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's error, without the C++ stack; the exception's type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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

    A rank whose wait fails writes into the run's store what it waits in, and how many exchanges of each queue it has started.
    It waits for a peer that has started fewer of that queue than the number of its exchange. Ranks that wait for each other in
    a circle never end, however fast they are: they have started their exchanges in different orders. The last rank of the
    circle whose wait fails sees all of it.

        rank 0   gather 1, gather 2, reduce 1: waits      rank 1 has started no reduce
        rank 1   gather 1, gather 2, gather 3: waits      rank 0 has started two gathers
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
    none. The same on all ranks with the same input. waiting: by rank.
    """
    left = dict(waiting)
    while free := [rank for rank, wait in left.items() if not any(map(wait.is_for, left.values()))]:
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
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    return [left[each] for each in (*circle[first:], *circle[:first])]


def in_words(circle: list[Waiting]) -> str:
    """Returns in words which rank waits in what for which rank."""
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    return ", ".join(f"rank {wait.rank} waits in {wait.what} for rank {late.rank}" for wait, late in pairs)


def read_waits(own: Waiting, store: Store, patience_s: float) -> dict[int, Waiting]:
    """Writes `own` into `store`; returns the waits of the ranks for which it waits, of those for which these wait, and so on.

    The result is by rank, and includes `own`; ranks that have written nothing are missing. Returns as soon as there is a
    circle, or no rank left to read; otherwise after `patience_s`, and shortly later if the store does not answer.
    """
    waits = {own.rank: own}
    deadline = time.monotonic() + patience_s

    def read() -> None:
        # If the store fails, as when its host has ended, nothing is known of the others.
        with contextlib.suppress(Exception):
            store.set(_key(own.rank), json.dumps(own))
            while _read_new(waits, store) and not circle_in(dict(waits)) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    thread = threading.Thread(target=read, name="sley-circles", daemon=True)
    thread.start()
    thread.join(patience_s + _ANSWER_S)
    return dict(waits)


def _read_new(waits: dict[int, Waiting], store: Store) -> bool:
    """Adds to `waits` what can be read now; returns whether ranks that are waited for have written nothing."""
    silent: set[int] = set()
    while unread := {rank for wait in waits.values() for rank in wait.ranks} - waits.keys() - silent:
        for rank in sorted(unread)[: MOST_RANKS - len(waits) - len(silent)]:
            if store.check([_key(rank)]):
                number, what, ranks, *others = json.loads(store.get(_key(rank)))
                waits[rank] = Waiting(number, what, tuple(ranks), *others)
            else:
                silent.add(rank)
        if len(waits) + len(silent) >= MOST_RANKS:
            break
    return bool(silent)


def _key(rank: int) -> str:
    return f"waiting/{rank}"

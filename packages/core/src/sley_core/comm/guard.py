"""Turns torch's errors in collectives into errors that name the operation and group, or the ranks that wait for each other."""

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
from sley_core.topology import DEFAULT_CHANNEL

HINT = "check the other ranks: one of the group stopped, or did not join the collective within [limits] collective_timeout_s"

_RACE_S = 0.1
"""Seconds to wait for a peer's write after a closed connection: a peer that times out closes its connections first."""

_TIMED_OUT = "Timed out"


class Turn(NamedTuple):
    """Describes an exchange that this rank has started: the `number`-th in `queue`.

    `members` start the exchanges of a queue in one order. label: describes the content. peer: the rank at the other end of a
    message; None if all members participate. num_bytes: the bytes that this rank sends or receives.
    """

    operation: str
    members: Members
    label: str
    queue: str
    number: int
    peer: int | None = None
    num_bytes: int = 0

    def __str__(self) -> str:
        over = f" over {self.members}"  # some descriptions already end with it
        return f"{self.operation} of {self.label.removesuffix(over)}{over}"

    @property
    def waiting(self) -> RankWait:
        """Returns the record that this rank writes for the others if it fails to complete this exchange."""
        members = self.members
        peers = tuple(rank for rank in members.ranks if rank != members.rank) if self.peer is None else (self.peer,)
        return RankWait(members.rank, f"the {self}", peers, self.queue, self.number, dict(members.progress.numbers))

    def wait_error(self, message: str, ran_out_of_time: bool, peer: int | None = None) -> RunError:
        """Returns the error for a failed wait in this exchange: `collective-failed` with `message`, or `ranks-differ`.

        It is `ranks-differ` if the records in the store show ranks that wait for each other. ran_out_of_time: whether this rank
        timed out; else a peer has ended or closed its connection. peer: the missing global rank, if known. May block while it
        waits for the others' records.
        """
        progress = self.members.progress
        progress.fail_wait("late" if ran_out_of_time else "closed", peer)
        if progress.store is None:
            return RunError("collective-failed", message, hint=HINT)
        waits = exchange_waits(self.waiting, progress.store, progress.patience_s if ran_out_of_time else _RACE_S)
        if pairs := find_blocked(waits):
            text = ", ".join(
                f"rank {wait.rank} waits in {wait.label} for rank {late.rank}" for wait, late in pairs[:MOST_SHOWN]
            )
            hint = f"ranks start the exchanges of a group in one order; {ONE_ORDER}"
            return RunError("ranks-differ", f"ranks wait for each other: {text}", hint=hint)
        details = [f"; rank {wait.rank} waited in {wait.label}" for wait in waits.values() if wait.rank != self.members.rank]
        return RunError("collective-failed", message + "".join(details), hint=HINT)


def begin_turn(
    operation: str,
    members: Members,
    label: str,
    channel: str = DEFAULT_CHANNEL,
    num_bytes: int = 0,
    ends: tuple[int, int] | None = None,
) -> Turn:
    """Counts an exchange of `members` on `channel` and returns its turn.

    label: the description of the content, for errors. ends: the coordinates of a message's sender and receiver, which both call
    this; None if all members participate.
    """
    queue, peer = f"{members.axis} {channel}", None
    if ends is not None:
        queue = f"{queue} {ends[0]}>{ends[1]}"
        peer = members.ranks[ends[1] if members.coord == ends[0] else ends[0]]
    turn = Turn(operation, members, label, queue, members.progress.numbers.get(queue, 0) + 1, peer, num_bytes)
    members.progress.add_turn(turn)
    return turn


def run_guarded(call: Callable[[], Any], turn: Turn) -> Any:
    """Returns `call()` and records the wait. Turns torch's RuntimeError into the error of `Turn.wait_error`."""
    progress = turn.members.progress
    progress.begin_wait(turn)
    try:
        result = call()
    except RuntimeError as error:
        reason = first_line(error)
        raise turn.wait_error(f"{turn} failed on rank {turn.members.rank}: {reason}", _TIMED_OUT in reason) from error
    progress.end_wait()
    return result


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's error, without the C++ stack, or the exception's type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


MOST_RANKS = 256
"""The maximum number of ranks to read, since all pairs are compared."""

_POLL_S = 0.02
"""Seconds between two reads of the store."""

_STORE_TIMEOUT_S = 2.0
"""Extra seconds for the store to answer: its host may hang too."""


class RankWait(NamedTuple):
    """Describes the exchange in which a rank waits.

    label: its description. ranks: its participants. queue, number: the exchange is the `number`-th in `queue`. numbers: the
    number of exchanges in each queue that the rank has started.

    A rank whose wait fails writes this record into the run's store. It waits for each participant that has started fewer than
    `number` exchanges of the queue. Ranks that wait for each other in a circle never finish: they have started their exchanges
    in different orders. The last rank of the circle whose wait fails sees the whole circle.

        rank 0   gather 1, gather 2, reduce 1: waits      rank 1 has started no reduce
        rank 1   gather 1, gather 2, gather 3: waits      rank 0 has started two gathers
    """

    rank: int
    label: str
    ranks: tuple[int, ...]
    queue: str
    number: int
    numbers: Mapping[str, int]

    def is_waiting_for(self, other: RankWait) -> bool:
        """Returns whether this rank waits for the rank of `other`, which has not started the exchange."""
        return other.rank in self.ranks and other.numbers.get(self.queue, 0) < self.number


MOST_SHOWN = 8
"""How many blocked ranks an error names."""


def find_blocked(waits: Mapping[int, RankWait]) -> list[tuple[RankWait, RankWait]]:
    """Returns the ranks that can never go on, since each waits for another of them: their waits, by rank, each with that of
    the lowest rank for which it waits. Empty if there are none. waits: by rank.
    """
    blocked = dict(sorted(waits.items()))
    while free := [rank for rank, wait in blocked.items() if not any(map(wait.is_waiting_for, blocked.values()))]:
        for rank in free:
            del blocked[rank]
    return [(wait, next(filter(wait.is_waiting_for, blocked.values()))) for wait in blocked.values()]


def exchange_waits(local: RankWait, store: Store, patience_s: float) -> dict[int, RankWait]:
    """Writes the record `local` into `store`; returns the records of all ranks for which it waits, directly or indirectly.

    The result maps ranks to records and includes `local`; ranks without a record are missing. Returns as soon as ranks
    are blocked or all records are read, at the latest shortly after `patience_s`.
    """
    waits = {local.rank: local}
    deadline = time.monotonic() + patience_s

    def read() -> None:
        # If the store fails, as when its host has ended, the other records stay unknown.
        with contextlib.suppress(Exception):
            store.set(_key(local.rank), json.dumps(local))
            while _read_waits_once(waits, store) and not find_blocked(dict(waits)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    thread = threading.Thread(target=read, name="sley-waits", daemon=True)
    thread.start()
    thread.join(patience_s + _STORE_TIMEOUT_S)
    return dict(waits)


def _read_waits_once(waits: dict[int, RankWait], store: Store) -> bool:
    """Adds the records in `store` to `waits`; returns whether the record of any participant is missing."""
    silent_ranks: set[int] = set()
    while unread := {rank for wait in waits.values() for rank in wait.ranks} - waits.keys() - silent_ranks:
        for rank in sorted(unread)[: MOST_RANKS - len(waits) - len(silent_ranks)]:
            if store.check([_key(rank)]):
                number, label, ranks, *details = json.loads(store.get(_key(rank)))
                waits[rank] = RankWait(number, label, tuple(ranks), *details)
            else:
                silent_ranks.add(rank)
        if len(waits) + len(silent_ranks) >= MOST_RANKS:
            break
    return bool(silent_ranks)


def _key(rank: int) -> str:
    return f"waiting/{rank}"

"""Turns torch's errors of collectives into errors that name operation, group and content, or which ranks wait for each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sley_core.comm.circles import Waiting, circle_in, heard, told
from sley_core.comm.marks import HINT as ONE_ORDER
from sley_core.comm.members import Members
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_LANE

HINT = "another rank of the group stopped, or did not come within [limits] collective_timeout_s"

_RACE_S = 0.1
"""Seconds to wait for a peer's write if a connection was closed: a peer that times out closes its lane's connections shortly
before it writes what it waits in.
"""

_TIMED_OUT = "Timed out"
"""Text in gloo's error of a wait that timed out."""


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
        rank, ranks, numbers = self.members.rank, self.members.ranks, self.members.progress.numbers
        late = tuple(one for one in ranks if one != rank) if self.peer is None else (self.peer,)
        return Waiting(rank, f"the {self}", late, self.queue, self.number, dict(numbers))


def turn_of(operation: str, members: Members, what: str, lane: str = DEFAULT_LANE, num_bytes: int = 0) -> Turn:
    """Counts an exchange of all `members` on `lane`, which starts now; returns its turn. what: what is exchanged, for
    errors.
    """
    queue, progress = f"{members.axis} {lane}", members.progress
    turn = Turn(operation, members, what, queue, progress.numbers.get(queue, 0) + 1, None, num_bytes)
    progress.started(turn)
    return turn


def message_turn(
    operation: str, members: Members, what: str, lane: str, sender: int, receiver: int, num_bytes: int = 0
) -> Turn:
    """Counts a message on `lane` between two coordinates of `members`, at either end; returns its turn."""
    queue, progress = f"{members.axis} {lane} {sender}>{receiver}", members.progress
    peer = members.ranks[receiver if members.rank == members.ranks[sender] else sender]
    turn = Turn(operation, members, what, queue, progress.numbers.get(queue, 0) + 1, peer, num_bytes)
    progress.started(turn)
    return turn


def guarded(call: Callable[[], Any], turn: Turn) -> Any:
    """Returns `call()`, recording the wait; torch's RuntimeError becomes the error of `failed`."""
    progress = turn.members.progress
    progress.waits(turn)
    try:
        found = call()
    except RuntimeError as error:
        why = first_line(error)
        raise failed(turn, f"{turn} failed on rank {turn.members.rank}: {why}", _TIMED_OUT in why) from error
    progress.waited()
    return found


def failed(turn: Turn, message: str, ran_out_of_time: bool, peer: int | None = None) -> RunError:
    """Returns the error of a wait in `turn` that failed: `collective-failed` with `message`, or `ranks-differ`.

    The latter if ranks wait for each other in a circle, and have written so into the store. ran_out_of_time: whether this rank
    timed out; else a peer has ended, or closed its connection. peer: the global rank that did not come, if that is known. May
    block while it waits for the others' writes.
    """
    progress = turn.members.progress
    progress.failed("late" if ran_out_of_time else "closed", peer)
    if progress.store is None:
        return RunError("collective-failed", message, hint=HINT)
    others = heard(turn.waiting, progress.store, progress.patience_s if ran_out_of_time else _RACE_S)
    if circle := circle_in(others):
        hint = f"ranks start the exchanges of a group in one order; {ONE_ORDER}"
        return RunError("ranks-differ", f"ranks wait for each other: {told(circle)}", hint=hint)
    said = [f"; rank {one.rank} waited in {one.what}" for one in others.values() if one.rank != turn.members.rank]
    return RunError("collective-failed", message + "".join(said), hint=HINT)


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's error, without the C++ stack that follows it; the exception's type if it has no
    text.
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""Turns torch's errors in collectives into errors that name the operation and the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sley_core.comm.progress import Members
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL

HINT = (
    "check the other ranks: one of the group stopped, or did not join the collective within [limits] collective_timeout_s; "
    "`train-cli doctor` names the rank, also if ranks start the exchanges of a group in different orders"
)

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

    def wait_error(self, message: str, ran_out_of_time: bool, peer: int | None = None) -> RunError:
        """Returns the error `collective-failed` with `message`, and records the failed wait.

        ran_out_of_time: whether this rank timed out; else a peer has ended or closed its connection. peer: the missing global
        rank, if known.
        """
        self.members.progress.fail_wait("late" if ran_out_of_time else "closed", peer)
        return RunError("collective-failed", message, hint=HINT)


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

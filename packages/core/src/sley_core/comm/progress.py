"""The ranks of one axis, and this rank's progress: its exchanges, waits and position in a step, for failure reports.

Errors of torch in an exchange become errors that name the operation, its content and the group (`run_guarded`).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL

COLLECTIVE_HINT = (
    "check the other ranks of the group: one has stopped, or did not join the collective within [limits] collective_timeout_s; "
    "`train-cli doctor` names that rank, even if the ranks started their exchanges in different orders"
)

NUM_RECENT = 32
"""The number of latest exchanges kept per queue. Ranks that diverge block each other after far fewer."""


BEGINNING = "the beginning of the step"
"""The value of `ActionProgress.pending` before the first entry of the action list."""

REDUCTION, UPDATE, BETWEEN = "the end of the gradients' reduction", "the update", "the time between two steps"
"""The values of `ActionProgress.pending` after the last entry of the action list, in this order."""

EVALUATION = "an evaluation"
"""The value of `ActionProgress.pending` before the first entry of an evaluation's action list."""

DEVICE = "the wait for the device"
"""The value of `ActionProgress.pending` while the host waits for a step's results; on CUDA the next step may have begun."""


@dataclass
class ActionProgress:
    """Records a rank's position in its action list.

    step: the optimizer step, counted from 1; 0 before the first. finished: the last finished entry. pending: the running entry.
    layer: the layer that the step called last; "" if none. follow: called with each entry as it begins.
    """

    step: int = 0
    finished: object = ""
    pending: object = "the start of the run"
    layer: str = ""
    follow: Callable[[object], None] | None = None

    def begin(self, step: int) -> None:
        self.step, self.layer = step, ""
        self.begin_entry(BEGINNING)

    def begin_entry(self, entry: object) -> None:
        self.finished, self.pending = self.pending, entry
        if self.follow is not None:
            self.follow(entry)

    def begin_layer(self, layer: str) -> None:
        self.layer = layer


class Wait(NamedTuple):
    """Describes a wait for other ranks in the exchange `turn`, which has lasted `seconds`.

    end: "" during the wait, "late" after a timeout, "closed" if a peer has ended or closed its connection, and "differs" if a
    peer's exchange differs. peer: the global rank of the missing peer, if known.
    """

    turn: "Turn"
    seconds: float
    end: str = ""
    peer: int | None = None


@dataclass
class Progress:
    """Records the exchanges and waits of one rank in one run, in all its groups.

    A queue is a sequence of exchanges that the members of a group start in the same order: the collectives of one channel, or
    the messages from one rank to another. numbers: the number of started exchanges per queue. recent: the last `NUM_RECENT` of
    each queue. step_progress: the position in the action list. follow_wait: called after each successful wait with the exchange
    and the time of `time.perf_counter` at which the wait began.

    Recording takes less than 1 us per exchange, and an exchange at least 20 us.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    recent: "dict[str, deque[Turn]]" = field(default_factory=dict)
    step_progress: ActionProgress = field(default_factory=ActionProgress)
    follow_wait: "Callable[[Turn, float], None] | None" = None
    _turn: "Turn | None" = None
    _wait_start_s: float = 0.0
    _failure: tuple[float, str, int | None] | None = None

    @property
    def wait(self) -> Wait | None:
        """Returns the current or failed wait, or None if there is neither."""
        turn, failure = self._turn, self._failure
        if turn is None:
            return None
        if failure is None:
            return Wait(turn, time.perf_counter() - self._wait_start_s)
        failed_at, end, peer = failure
        return Wait(turn, failed_at - self._wait_start_s, end, peer)

    def add_turn(self, turn: "Turn") -> None:
        self.numbers[turn.queue] = turn.number
        turns = self.recent.get(turn.queue)
        if turns is None:
            turns = self.recent[turn.queue] = deque(maxlen=NUM_RECENT)
        turns.append(turn)

    def begin_wait(self, turn: "Turn") -> None:
        self._failure = None
        self._wait_start_s = time.perf_counter()
        self._turn = turn

    def end_wait(self) -> None:
        turn, self._turn = self._turn, None
        if self.follow_wait is not None and turn is not None:
            self.follow_wait(turn, self._wait_start_s)

    def fail_wait(self, end: str, peer: int | None = None) -> None:
        """Records a failed wait for this rank's report. end, peer: as in `Wait`."""
        self._failure = (time.perf_counter(), end, peer)


class SentBytes:
    """Counts the bytes that this rank sends in a step. For a collective, this is the minimum for a group of its size.

             begin_step ──> add* ──> end_step ──> begin_step ...
                  ^            │
                  └────────────┘  a step that failed

    The backend's algorithm and overhead are not counted.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._last_num_bytes = 0

    def begin_step(self) -> None:
        """Starts to count a step, and discards the count of an incomplete one."""
        self._num_bytes = 0

    def add(self, tensor: Tensor, group: "Members", *, passes: int) -> None:
        """Counts an exchange of the full tensor `tensor` over `group`: in each pass a rank sends all of it except its own part.
        passes: 1 for an all-gather, a reduce-scatter or an all-to-all, 2 for an all-reduce.
        """
        self._num_bytes += tensor.nbytes * (group.size - 1) * passes // group.size

    def add_message(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def end_step(self) -> None:
        """Ends the step, so that `counts` returns its bytes."""
        self._last_num_bytes = self._num_bytes

    def counts(self) -> dict[str, float]:
        """Returns the bytes of the last complete step as `sent_bytes_per_step`, for `protocols.Counts`."""
        return {"sent_bytes_per_step": self._last_num_bytes}


@dataclass(frozen=True)
class Members:
    """Names this rank and the ranks with which it communicates along one axis.

    ranks: all of their global ranks, ascending. rank: this rank's global rank. progress: this rank's exchanges in all its
    groups.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    progress: Progress = field(default_factory=Progress, compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def coord(self) -> int:
        """Returns this rank's index in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def peers(self) -> list[int]:
        """Returns the coordinates of the other members."""
        coord = self.coord
        return [*range(coord), *range(coord + 1, self.size)]

    def __str__(self) -> str:
        return f"{self.axis}{list(self.ranks)}"


_TIMED_OUT = "Timed out"


class Turn(NamedTuple):
    """Describes an exchange that this rank has started: the `number`-th in `queue`.

    `members` start the exchanges of a queue in the same order. number: counted from 1. label: describes the content. peer: the
    global rank at the other end of a message; None if all members participate. num_bytes: the size of this rank's tensors.
    """

    operation: str
    members: Members
    label: str
    queue: str
    number: int
    peer: int | None = None
    num_bytes: int = 0

    def __str__(self) -> str:
        over = f" over {self.members}"  # some labels already end with it
        return f"{self.operation} of {self.label.removesuffix(over)}{over}"

    def wait_error(self, message: str, ran_out_of_time: bool, peer: int | None = None) -> RunError:
        """Returns the error `collective-failed` with `message`, and records the failed wait.

        ran_out_of_time: whether this rank timed out; if not, a peer has ended or closed its connection. peer: the global rank
        of the missing peer, if known.
        """
        self.members.progress.fail_wait("late" if ran_out_of_time else "closed", peer)
        return RunError("collective-failed", message, hint=COLLECTIVE_HINT)


def begin_turn(
    operation: str,
    members: Members,
    label: str,
    channel: str = DEFAULT_CHANNEL,
    num_bytes: int = 0,
    ends: tuple[int, int] | None = None,
) -> Turn:
    """Counts an exchange of `members` on `channel` and returns its turn.

    label: describes the content in errors. ends: the coordinates of a message's sender and receiver, both of which call this;
    None if all members participate.
    """
    queue, peer = f"{members.axis} {channel}", None
    if ends is not None:
        queue = f"{queue} {ends[0]}>{ends[1]}"
        peer = members.ranks[ends[1] if members.coord == ends[0] else ends[0]]
    turn = Turn(operation, members, label, queue, members.progress.numbers.get(queue, 0) + 1, peer, num_bytes)
    members.progress.add_turn(turn)
    return turn


def run_guarded(call: Callable[[], Any], turn: Turn) -> Any:
    """Returns `call()`, and records the call as a wait for `turn`. Raises RunError `collective-failed` for a RuntimeError."""
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
    """Returns the first line of an error of torch, without the C++ stack, or the name of its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

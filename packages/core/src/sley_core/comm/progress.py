"""The ranks of one axis, and this rank's progress: its exchanges, its waits, and its place in a step, for failure reports."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

    from sley_core.comm.guard import Turn

SHARE_OF_LIMIT, MOST_S = 1 / 8, 5.0
"""How long a rank waits for the others' writes after a timeout: at most this share of the timeout, and this many seconds."""

KEPT = 32
"""How many exchanges of each queue are remembered: ranks that have diverged wait for each other well before as many."""


BEGINNING = "the beginning of the step"
"""The entry before the first one of the list."""

REDUCTION, UPDATE, BETWEEN = "the end of the gradients' reduction", "the update", "the time between two steps"
"""Its entries after the last one of the list, in this order."""

EVALUATION = "an evaluation"
"""Its entry before the first one of an evaluation's list."""

DEVICE = "the wait for the device"
"""Its entry while the host waits for the results of a step; on CUDA the next step may have been started then."""


@dataclass
class ActionProgress:
    """Records where a rank is in its list of actions.

    step: the optimizer step, from 1; 0 before the first. finished, pending: the last entry of the list that is over, and the
    one that is running, as `str` shows them. layer: the one that was called last. follow: called with each entry as it begins.
    follow_layer: called with the name of each layer as its call begins, and with "" when those of a chunk are over.
    follow_output: called with a layer's name and its output, except in recomputations.
    """

    step: int = 0
    finished: object = ""
    pending: object = "the start of the run"
    layer: str = ""
    follow: Callable[[object], None] | None = None
    follow_layer: Callable[[str], None] | None = None
    follow_output: Callable[[str, Any], None] | None = None

    def begin(self, step: int) -> None:
        self.step, self.layer = step, ""
        self.comes(BEGINNING)

    def comes(self, entry: object) -> None:
        """Records that the previous entry is over, and `entry` begins."""
        self.finished, self.pending = self.pending, entry
        if self.follow is not None:
            self.follow(entry)

    def calls(self, layer: str) -> None:
        """Records that the call of `layer` begins."""
        self.layer = layer
        if self.follow_layer is not None:
            self.follow_layer(layer)

    def has_called(self) -> None:
        """Records that a chunk's layer calls are over; `layer` stays the last one."""
        if self.follow_layer is not None:
            self.follow_layer("")


class Wait(NamedTuple):
    """Describes a wait for other ranks, for `seconds` up to now or to its end.

    end: "" while it lasts, else "late" for a timeout, "closed" if a peer has ended or closed its connection, and "differs" if
    the peer exchanges something else. peer: the global rank that did not come, if that is known.
    """

    turn: Turn
    seconds: float
    end: str = ""
    peer: int | None = None


@dataclass
class Progress:
    """Records the exchanges and waits of one rank in one run; all its groups share it.

    A queue is a sequence of exchanges that the members of a group start in one order: those of one lane, or the messages from
    one rank to another. numbers: how many exchanges of each queue this rank has started. recent: the last `KEPT` of each.
    store: through which ranks exchange what they wait in; None until there is one. timeout_s: the limit of waits.
    step_progress: where the rank is in its list. follow_wait: called at the end of each wait, with the exchange and when the
    wait began, by `time.perf_counter`.

    Recording costs under 1 us per exchange (a tuple in a list, and the time); an exchange takes 20 us and more.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    recent: dict[str, deque[Turn]] = field(default_factory=dict)
    store: Store | None = None
    timeout_s: float = 0.0
    step_progress: ActionProgress = field(default_factory=ActionProgress)
    follow_wait: Callable[[Turn, float], None] | None = None
    _turn: Turn | None = None
    _since: float = 0.0
    _failure: tuple[float, str, int | None] | None = None

    @property
    def wait(self) -> Wait | None:
        """The wait in which this rank is, or that has failed; None if there is neither."""
        turn, failure = self._turn, self._failure
        if turn is None:
            return None
        if failure is None:
            return Wait(turn, time.perf_counter() - self._since)
        until, end, peer = failure
        return Wait(turn, until - self._since, end, peer)

    @property
    def patience_s(self) -> float:
        """Seconds to wait for the others' writes after a wait has timed out."""
        return min(SHARE_OF_LIMIT * self.timeout_s, MOST_S)

    def started(self, turn: Turn) -> None:
        self.numbers[turn.queue] = turn.number
        kept = self.recent.get(turn.queue)
        if kept is None:
            kept = self.recent[turn.queue] = deque(maxlen=KEPT)
        kept.append(turn)

    def waits(self, turn: Turn) -> None:
        self._failure = None
        self._since = time.perf_counter()
        self._turn = turn

    def waited(self) -> None:
        """Records that the wait is over, and did not fail."""
        turn, self._turn = self._turn, None
        if self.follow_wait is not None and turn is not None:
            self.follow_wait(turn, self._since)

    def failed(self, end: str, peer: int | None = None) -> None:
        """Records how the wait has failed, for this rank's report. end, peer: as in `Wait`."""
        self._failure = (time.perf_counter(), end, peer)


class SentBytes:
    """Counts the bytes that this rank sends in a step: for a collective, the fewest with which a group of its size can do it.

             begin_step ──> add* ──> end_step ──> begin_step ...
                  ^            │
                  └────────────┘  a step that failed

    The backend's actual algorithm, and what it sends besides the tensors, are not counted.
    """

    def __init__(self) -> None:
        self._now = 0
        self._last = 0

    def begin_step(self) -> None:
        """Starts to count a step, and discards the count of one that did not end."""
        self._now = 0

    def add(self, whole: Tensor, group: Members, *, passes: int) -> None:
        """Counts an exchange of `whole`, the full tensor, over `group`: in each pass a rank sends all of it but its own part.

        passes: 1 for an all-gather, a reduce-scatter or an all-to-all, 2 for an all-reduce.
        """
        self._now += whole.nbytes * (group.size - 1) * passes // group.size

    def add_message(self, num_bytes: int) -> None:
        self._now += num_bytes

    def end_step(self) -> None:
        """Ends the step, whose count `counts` then returns."""
        self._last = self._now

    def counts(self) -> dict[str, float]:
        """Returns the bytes of the last step that ended, as `sent_bytes_per_step`, for `protocols.Counts`."""
        return {"sent_bytes_per_step": self._last}


@dataclass(frozen=True)
class Members:
    """Names the ranks of one axis with which this rank communicates.

    ranks: global, ascending. rank: this one's, among them. progress: what this rank has exchanged in all of its groups.
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
        """This rank's index in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def peers(self) -> list[int]:
        """The coordinates of the other members."""
        coord = self.coord
        return [*range(coord), *range(coord + 1, self.size)]

    def __str__(self) -> str:
        return f"{self.axis}{list(self.ranks)}"

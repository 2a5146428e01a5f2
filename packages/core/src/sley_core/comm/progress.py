"""What this rank has exchanged and what it waits in, so that ranks can say after a failure which of them came to what."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

    from sley_core.comm.guard import Turn
    from sley_core.comm.verbs import Collective

SHARE_OF_LIMIT, MOST_S = 1 / 8, 5.0
"""For how long a rank that has waited in vain waits for what the others say: a share of the limit of its waits, and seconds."""

KEPT = 32
"""How many exchanges of each queue are remembered: ranks that have gone apart wait for each other long before."""


BEGINNING = "the beginning of the step"
"""What a standing says before the first entry of the list."""

REDUCTION, UPDATE, BETWEEN = "the end of the gradients' reduction", "the update", "what comes between two steps"
"""What it says after the last one, in this order."""

EVALUATION = "an evaluation"
"""What it says before the first entry of an evaluation's list."""

DEVICE = "the wait for the device"
"""What it says while the host waits for the results of a step; on CUDA that may be when the next one has been started."""


@dataclass
class Standing:
    """Where a rank is in its list.

    step: the optimizer step, from 1; 0 before the first. finished, pending: the last entry of the list that is over, and the
    one that is under way, as `str` shows them. layer: the one that was called last. follow: called with each entry as it
    begins. follow_layer: called with the name of each layer as its call begins, and with "" when those of a chunk are over.
    follow_output: called with a layer's name and what it has returned, recomputations aside.
    """

    step: int = 0
    finished: object = ""
    pending: object = "the start of the run"
    layer: str = ""
    follow: Callable[[object], None] | None = None
    follow_layer: Callable[[str], None] | None = None
    follow_output: Callable[[str, Any], None] | None = None

    def begin(self, step: int) -> None:
        """Notes that optimizer step `step`, from 1, begins."""
        self.step, self.layer = step, ""
        self.comes(BEGINNING)

    def comes(self, entry: object) -> None:
        """Notes that the entry before is over, and `entry` begins."""
        self.finished, self.pending = self.pending, entry
        if self.follow is not None:
            self.follow(entry)

    def calls(self, layer: str) -> None:
        """Notes that the call of `layer` begins."""
        self.layer = layer
        if self.follow_layer is not None:
            self.follow_layer(layer)

    def has_called(self) -> None:
        """Notes that a chunk's layers are called, and something else begins; the last one stays `layer`."""
        if self.follow_layer is not None:
            self.follow_layer("")


class Listener(Protocol):
    """Is told what a rank of a fake world would exchange, and when it would wait for that."""

    def began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        """Notes that an exchange of `num_bytes` begins; returns what notes that this rank waits for it, at the first call."""
        ...


class Wait(NamedTuple):
    """A wait for other ranks, for `seconds` up to now or to its end.

    end: "" while it lasts, else "late" where it ran out of time, "closed" where a peer has ended or closed its connection, and
    "differs" where that exchanges something else. peer: the global rank that did not come, where that is known.
    """

    turn: Turn
    seconds: float
    end: str = ""
    peer: int | None = None


@dataclass
class Progress:
    """Of one rank in one run; all its groups share it.

    A queue is what the members of a group start in one order: the exchanges of one lane, or the messages from one rank to
    another. numbers: how many exchanges of each queue this rank has started. recent: the last `KEPT` of each. store: in which
    ranks tell each other; None until there is one. timeout_s: the limit of waits. standing: where the rank is in its list.
    listener: in a fake world, who is told what would be exchanged. follow_wait: called at the end of each wait, with the
    exchange and when the wait began, by `time.perf_counter`.

    An exchange takes 20 us and more; what is noted of it here is a tuple in a list and the time, under 1 us.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    recent: dict[str, deque[Turn]] = field(default_factory=dict)
    store: Store | None = None
    timeout_s: float = 0.0
    standing: Standing = field(default_factory=Standing)
    listener: Listener | None = None
    follow_wait: Callable[[Turn, float], None] | None = None
    _turn: Turn | None = None
    _since: float = 0.0
    _failure: tuple[float, str, int | None] | None = None

    @property
    def wait(self) -> Wait | None:
        """The wait that this rank is in, or that has failed; None where neither is so."""
        turn, failure = self._turn, self._failure
        if turn is None:
            return None
        if failure is None:
            return Wait(turn, time.perf_counter() - self._since)
        until, end, peer = failure
        return Wait(turn, until - self._since, end, peer)

    @property
    def patience_s(self) -> float:
        """How long to wait for the others' words after a wait has run out of time."""
        return min(SHARE_OF_LIMIT * self.timeout_s, MOST_S)

    def started(self, turn: Turn) -> None:
        """Notes that this rank has started `turn`, the last of its queue."""
        self.numbers[turn.queue] = turn.number
        kept = self.recent.get(turn.queue)
        if kept is None:
            kept = self.recent[turn.queue] = deque(maxlen=KEPT)
        kept.append(turn)

    def waits(self, turn: Turn) -> None:
        """Notes that a wait in `turn` begins."""
        self._failure = None
        self._since = time.perf_counter()
        self._turn = turn

    def waited(self) -> None:
        """Notes that the wait is over, and did not fail."""
        turn, self._turn = self._turn, None
        if self.follow_wait is not None and turn is not None:
            self.follow_wait(turn, self._since)

    def failed(self, end: str, peer: int | None = None) -> None:
        """Notes how the wait has failed; a rank that reports its error reports it."""
        self._failure = (time.perf_counter(), end, peer)

"""Identifies exchanges (collectives and messages) by their members, turn and mark, and records progress for failure reports.

`run_guarded` turns torch's errors in an exchange into errors that name the operation, its content and the group.
"""

import struct
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch

from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL

COLLECTIVE_HINT = (
    "check the other ranks of the group: one has stopped, or did not join the collective within [limits] collective_timeout_s; "
    "`train-cli doctor` names that rank, even if the ranks started their exchanges in different orders"
)
"""The hint of the errors that a failed exchange or communicator raises."""

NUM_RECENT = 32
"""The number of latest exchanges that `Progress` keeps per queue. Ranks that diverge block each other after fewer exchanges."""

BEGINNING = "the beginning of the step"  # `ActionProgress.current_entry` before the first entry of a step
REDUCTION_END, UPDATE, BETWEEN_STEPS = "the end of the gradients' reduction", "the update", "the time between two steps"
EVALUATION = "an evaluation"  # `ActionProgress.current_entry` before the first entry of an evaluation
DEVICE_WAIT = "the wait for the device"
"""Values of `ActionProgress.current_entry` when no entry of an action list runs. REDUCTION_END, UPDATE and BETWEEN_STEPS follow
the last entry of a step, in this order. DEVICE_WAIT: the host waits for a step's results; on CUDA, the next may run.
"""


@dataclass
class ActionProgress:
    """Records a rank's position in its action list. step: the optimizer step, counted from 1; 0 before the first step.
    current_entry, previous_entry: entries of the action list, or texts such as `BEGINNING`. layer: the layer that the step
    called last; "" if it has called none. on_entry: called with each entry as it begins.
    """

    step: int = 0
    previous_entry: object = ""
    current_entry: object = "the start of the run"
    layer: str = ""
    on_entry: Callable[[object], None] | None = None

    def begin_step(self, step: int) -> None:
        """Records that optimizer step `step` begins, and that it has called no layer yet."""
        self.step, self.layer = step, ""
        self.begin_entry(BEGINNING)

    def begin_entry(self, entry: object) -> None:
        """Makes `entry` the current entry, and calls `on_entry`."""
        self.previous_entry, self.current_entry = self.current_entry, entry
        if self.on_entry is not None:
            self.on_entry(entry)


class Wait(NamedTuple):
    """Describes a wait of `seconds` for other ranks in the exchange `turn`, and whether the wait has failed. failure: "" during
    the wait, "late" after a timeout, "closed" if a peer has ended or closed its connection, and "differs" if a peer's exchange
    differs. peer: the global rank of the peer that caused the failure; None if it is unknown.
    """

    turn: "Turn"
    seconds: float
    failure: str = ""
    peer: int | None = None


@dataclass
class Progress:
    """Records a rank's exchanges and waits in all its groups. A queue is a sequence of exchanges that the members of a group
    start in the same order: the collectives of one channel, or the messages from one rank to another. last_numbers: the number
    of the last exchange of each queue. recent_turns: the last `NUM_RECENT` exchanges of each queue. step_progress: the position
    in the action list. on_wait: called after a successful wait, with the exchange and `time.perf_counter()` at its start.
    """

    last_numbers: dict[str, int] = field(default_factory=dict)
    recent_turns: "dict[str, deque[Turn]]" = field(default_factory=lambda: defaultdict(partial(deque, maxlen=NUM_RECENT)))
    step_progress: ActionProgress = field(default_factory=ActionProgress)
    on_wait: "Callable[[Turn, float], None] | None" = None
    _turn: "Turn | None" = None
    _wait_start_s: float = 0.0
    _failed_wait: Wait | None = None

    @property
    def current_wait(self) -> Wait | None:
        """Returns the wait in progress, or the latest wait if it has failed; None if this rank does not wait."""
        turn, failed_wait = self._turn, self._failed_wait
        if turn is None or failed_wait is not None:
            return failed_wait
        return Wait(turn, time.perf_counter() - self._wait_start_s)

    def add_turn(self, turn: "Turn") -> None:
        """Records that this rank has started the exchange `turn`."""
        self.last_numbers[turn.queue] = turn.number
        self.recent_turns[turn.queue].append(turn)

    def begin_wait(self, turn: "Turn") -> None:
        """Records that a wait for the exchange `turn` begins, and discards a failed wait."""
        self._failed_wait, self._wait_start_s, self._turn = None, time.perf_counter(), turn

    def end_wait(self) -> None:
        """Records that the current wait has succeeded, and calls `on_wait`. Without a current wait, does nothing."""
        turn, self._turn = self._turn, None
        if self.on_wait is not None and turn is not None:
            self.on_wait(turn, self._wait_start_s)

    def fail_wait(self, failure: str, peer: int | None = None) -> None:
        """Records that the current wait, if any, failed. failure: its `Wait.failure`. peer: the rank that caused it or None."""
        if self._turn is not None:
            self._failed_wait = Wait(self._turn, time.perf_counter() - self._wait_start_s, failure, peer)


class SentBytes:
    """Counts the bytes that this rank sends in a step. For a collective, counts the fewest bytes that any algorithm must send.

             begin_step ──> add* ──> end_step ──> begin_step ...
                  ^            │
                  └────────────┘  a step that failed

    The backend's algorithm and overhead are not counted.
    """

    def __init__(self) -> None:
        self._num_bytes = self._last_num_bytes = 0

    def begin_step(self) -> None:
        """Starts to count a step. The count of a step that did not reach `end_step` is discarded."""
        self._num_bytes = 0

    def add(self, tensor: torch.Tensor, group: "Members", *, passes: int) -> None:
        """Counts an exchange of the full tensor `tensor` over `group`. In each pass a rank sends all of it except its own part.
        passes: 1 for an all-gather, a reduce-scatter or an all-to-all; 2 for an all-reduce.
        """
        self._num_bytes += tensor.nbytes * (group.size - 1) * passes // group.size

    def add_message(self, num_bytes: int) -> None:
        """Counts a message of `num_bytes` bytes to another rank."""
        self._num_bytes += num_bytes

    def end_step(self) -> None:
        """Ends the step, so that `counts` returns the number of bytes sent in this step."""
        self._last_num_bytes = self._num_bytes

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes sent in the last complete step as `sent_bytes_per_step`, for `protocols.Counts`."""
        return {"sent_bytes_per_step": self._last_num_bytes}


@dataclass(frozen=True)
class Members:
    """Names the members of a group of ranks, one of which is this rank. axis: the mesh axis along which members communicate.
    ranks: the global ranks of all members, ascending. rank: this rank. progress: this rank's exchanges in all its groups.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    progress: Progress = field(default_factory=Progress, compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        """Returns the number of members."""
        return len(self.ranks)

    @cached_property
    def coord(self) -> int:
        """Returns this rank's index in `ranks`."""
        return self.ranks.index(self.rank)

    @cached_property
    def peers(self) -> list[int]:
        """Returns the coordinates of the other members."""
        return [*range(self.coord), *range(self.coord + 1, self.size)]

    def __str__(self) -> str:
        return f"{self.axis}{list(self.ranks)}"


class Turn(NamedTuple):
    """Describes an exchange that this rank has started, for error messages and failure reports. operation: the kind of
    exchange, such as "all-gather". label: describes the content. queue: the name of the sequence of exchanges that `members`
    start in the same order. number: the place of the exchange in `queue`, from 1. peer: the global rank at the other end of a
    message; None if all members participate. num_bytes: the size of this rank's tensors in bytes.
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

    def wait_error(self, message: str, has_timed_out: bool, peer: int | None = None) -> RunError:
        """Returns the `collective-failed` error with `message`, and records that the current wait has failed. has_timed_out:
        False if a peer has ended or closed its connection. peer: the global rank of this peer; None if unknown.
        """
        self.members.progress.fail_wait("late" if has_timed_out else "closed", peer)
        return RunError("collective-failed", message, hint=COLLECTIVE_HINT)


def begin_turn(
    operation: str,
    members: Members,
    label: str,
    channel: str = DEFAULT_CHANNEL,
    num_bytes: int = 0,
    ends: tuple[int, int] | None = None,
) -> Turn:
    """Records that this rank starts an exchange with `members` on `channel`, and returns its turn. operation: the kind of
    exchange, such as "all-gather". label: describes the content. num_bytes: the size of this rank's tensors in bytes. ends: the
    coordinates of a message's sender and receiver, which both call this; None for a collective.
    """
    queue, peer = f"{members.axis} {channel}", None
    if ends is not None:
        queue = f"{queue} {ends[0]}>{ends[1]}"
        peer = members.ranks[ends[1] if members.coord == ends[0] else ends[0]]
    turn = Turn(operation, members, label, queue, members.progress.last_numbers.get(queue, 0) + 1, peer, num_bytes)
    members.progress.add_turn(turn)
    return turn


def run_guarded(call: Callable[[], Any], turn: Turn) -> Any:
    """Returns `call()`, and records a wait for `turn` meanwhile. Turns a RuntimeError into RunError `collective-failed`."""
    progress = turn.members.progress
    progress.begin_wait(turn)
    try:
        result = call()
    except RuntimeError as error:
        reason = first_line(error)
        raise turn.wait_error(f"{turn} failed on rank {turn.members.rank}: {reason}", "Timed out" in reason) from error
    progress.end_wait()
    return result


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's `error`, without the C++ stack, or the name of the error's type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


HEADER_BYTES = 192
"""The size of the header that encodes a `Mark`, in bytes: two int64 (the mark's checksum and size), and a text."""
_HEADER_FORMAT = struct.Struct(f"<qq{HEADER_BYTES - 16}s")  # checksum, size, text
MISMATCH_HINT = (
    "ranks that share weights must run the same modules in the same order. A forward must not choose "
    "modules by its data or at random (LayerDrop, stochastic depth), because ranks have different data "
    "and random numbers. To skip a layer, multiply its output by 0 or 1, or draw from your own "
    "generator with the same seed on all ranks"
)
"""The hint of the `ranks-differ` error for different exchanges."""


class Mark(NamedTuple):
    """Identifies an exchange, so that its ranks can compare it: a label, a checksum below 2^31, and the size in bytes."""

    label: str
    checksum: int
    num_bytes: int

    @classmethod
    def from_tensors(cls, operation: str, label: str, tensors: Iterable[torch.Tensor], checksum: int = 0) -> "Mark":
        """Returns the mark of `operation` on `tensors`, whose order, sizes and dtypes must be equal on all ranks. label:
        describes the content, and is equal on all ranks. checksum: a further value that must be equal on all ranks.
        """
        pieces = [(tensor.nbytes, str(tensor.dtype)) for tensor in tensors]
        crc = zlib.crc32(f"{operation}\0{label}\0{checksum} {pieces}".encode())
        return cls(label, crc & 0x7FFFFFFF, sum(num_bytes for num_bytes, _ in pieces))

    def mismatch_error(self, rank: int, peer_exchange: str, peer: int) -> RunError:
        """Returns the `ranks-differ` error, which says that `rank` makes this exchange, but `peer` makes `peer_exchange`. rank,
        peer: global ranks. peer_exchange: the peer's `encoded_text`, decoded.
        """
        local_text = self.encoded_text.decode()
        peer_text = "other tensors of this size" if peer_exchange == local_text else peer_exchange or "something else"
        return RunError(
            "ranks-differ", f"rank {rank} exchanges {local_text}, but rank {peer} exchanges {peer_text}", hint=MISMATCH_HINT
        )

    @property
    def encoded_text(self) -> bytes:
        """Returns the label, truncated to fit in a header, and the size, as UTF-8. Peers print this text in error messages."""
        return _encode_text(self.label, self.num_bytes)

    def header(self) -> torch.Tensor:
        """Returns the mark as a header, uint8 [HEADER_BYTES], which `mark_from_header` decodes."""
        header = _HEADER_FORMAT.pack(self.checksum, self.num_bytes, self.encoded_text)
        return torch.frombuffer(bytearray(header), dtype=torch.uint8)


def mark_from_header(header: torch.Tensor) -> Mark:
    """Returns the mark in a peer's `header`, uint8 [HEADER_BYTES]. Its label is the peer's `encoded_text`, decoded."""
    crc, num_bytes, encoded_text = _HEADER_FORMAT.unpack(bytes(header.tolist()))
    return Mark(encoded_text.rstrip(b"\0").decode("utf-8", "replace"), crc, num_bytes)


def checksum(names: Iterable[str]) -> int:
    """Returns a 32-bit checksum of `names` in their order. The checksum is equal in all processes."""
    return zlib.crc32("\0".join(names).encode())


@lru_cache(maxsize=4096)
def _encode_text(label: str, num_bytes: int) -> bytes:
    """Returns `label` and `num_bytes` as UTF-8 text, with `label` truncated so that the text fits in a header."""
    size = f" ({num_bytes} bytes)"
    room = HEADER_BYTES - 16 - len(size)
    return label.encode()[:room].decode("utf-8", "ignore").encode() + size.encode()


class ExchangeSummary(NamedTuple):
    """Summarises a rank's exchanges in one group. ranks: the global ranks of the group. checksum: the checksum of the marks of
    all `num_exchanges` exchanges. last_label: the label of the last exchange.
    """

    ranks: tuple[int, ...]
    num_exchanges: int
    checksum: int
    last_label: str


class ExchangeLog:
    """Records the exchanges of one group since the last `clear` as a checksum of their marks, one per channel. A backend's
    collectives carry no mark, so ranks that exchange different tensors would get wrong numbers. Before a step ends, the ranks
    therefore compare the checksums of the step, and change no weight if they differ.
    """

    def __init__(self) -> None:
        self.clear()

    def add(self, channel: str, mark: Mark) -> None:
        """Adds the exchange that `mark` identifies to the checksum of `channel`, which depends on the order of exchanges."""
        self._checksums[channel] = zlib.crc32(mark.checksum.to_bytes(4, "little"), self._checksums.get(channel, 0))
        self._num_exchanges += 1
        self._last_label = mark.label

    def clear(self) -> None:
        """Forgets all exchanges."""
        self._checksums: dict[str, int] = {}
        self._num_exchanges = 0
        self._last_label = ""

    def summarise(self, ranks: tuple[int, ...]) -> ExchangeSummary | None:
        """Returns a summary of the exchanges in the log; None if it has none. ranks: the global ranks of the group."""
        text = "".join(f"{channel} {value};" for channel, value in sorted(self._checksums.items()))
        return ExchangeSummary(ranks, self._num_exchanges, zlib.crc32(text.encode()), self._last_label) if text else None

"""Defines the transport protocol, which gathers and reduces shards of rows, exchanges rows, and sums tensors.

    all_gather   rank 0: a0      a0 a1    reduce_scatter   rank 0: a0 a1   a0 + b0    all_to_all   rank 0: a0 a1   a0 b0
                 rank 1:    a1   a0 a1                     rank 1: b0 b1   a1 + b1                 rank 1: b0 b1   a1 b1

    MessageTransport     gloo, on the CPU    every rank sends to every other
    CollectiveTransport  NCCL; gloo on CUDA  the backend's own collectives
    CmaTransport         CPUs of one host    ranks read each other's memory (cross-memory attach)
    SingleRankTransport  a group of one      the identity

A group has one transport per channel, chosen when groups are made (`backends`). All ranks call it in the same order, with the
same number of tensors, equal shapes, and an equal `label`, which describes the content. `MessageTransport` and CMA send a mark
first, so different exchanges raise an error on both sides. `CollectiveTransport` logs its exchanges, and ranks compare the logs
before a step ends (`ExchangeLog`). All-reduces of gloo and NCCL are neither marked nor logged.

With `MessageTransport` and CMA, the rank that owns a shard sums it: its own part first, then the others by ascending
coordinate. The result depends neither on timing nor on the transport.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.progress import Members, Turn, run_guarded
from sley_core.errors import RunError

HEADER_BYTES = 192
"""The size of a header: two int64 (a mark's checksum and size), and a text."""
_HEADER_FORMAT = struct.Struct(f"<qq{HEADER_BYTES - 16}s")
_MARK_MASK = 0x7FFFFFFF
MISMATCH_HINT = (
    "ranks that share weights must run the same modules in the same order. Does a forward depend on "
    "its data, or skip layers at random (LayerDrop, stochastic depth)? Random draws are seeded per "
    "microbatch and differ between ranks. To skip a layer, multiply its output by 0 or 1, or draw "
    "from your own generator with the same seed on all ranks"
)


class Mark(NamedTuple):
    """Identifies an exchange by its `label`, a 31-bit checksum and the total size of this rank's tensors."""

    label: str
    number: int
    num_bytes: int

    @classmethod
    def from_tensors(cls, operation: str, label: str, tensors: Iterable[Tensor], contents: int = 0) -> "Mark":
        """Returns the mark of `operation` on `tensors`, whose order, sizes and dtypes must be equal on all ranks. label:
        describes the content, equally on all ranks. contents: a checksum of additional content to compare (`checksum`).
        """
        pieces = [(tensor.nbytes, str(tensor.dtype)) for tensor in tensors]
        number = zlib.crc32(f"{contents} {pieces}".encode(), _checksum_label(operation, label)) & _MARK_MASK
        return cls(label, number, sum(num_bytes for num_bytes, _ in pieces))

    def mismatch_error(self, rank: int, peer_exchange: str, peer: int) -> RunError:
        """Returns the error `ranks-differ`: `rank` makes this exchange, but rank `peer` makes `peer_exchange`."""
        local_text = self.encoded_text.decode()
        peer_text = "other parts of it" if peer_exchange == local_text else peer_exchange or "something else"
        return RunError(
            "ranks-differ", f"rank {rank} exchanges {local_text}, but rank {peer} exchanges {peer_text}", hint=MISMATCH_HINT
        )

    @property
    def encoded_text(self) -> bytes:
        """Returns the encoded label and size, for the peers' error messages."""
        return _encode_text(self.label, self.num_bytes)

    def header(self) -> Tensor:
        """Returns the mark as a header, uint8 [HEADER_BYTES], which `mark_from_header` decodes."""
        header = _HEADER_FORMAT.pack(self.number, self.num_bytes, self.encoded_text)
        return torch.frombuffer(bytearray(header), dtype=torch.uint8)


def mark_from_header(header: Tensor) -> Mark:
    """Returns the mark in a peer's `header`, uint8 [HEADER_BYTES]. Its label is the peer's label with the size."""
    number, num_bytes, encoded_text = _HEADER_FORMAT.unpack(bytes(header.tolist()))
    return Mark(encoded_text.rstrip(b"\0").decode("utf-8", "replace"), number, num_bytes)


def checksum(names: Iterable[str]) -> int:
    """Returns a 32-bit checksum of `names` in their order; the same in all processes."""
    return zlib.crc32("\0".join(names).encode())


@lru_cache(maxsize=4096)
def _checksum_label(operation: str, label: str) -> int:
    return zlib.crc32(f"{operation}\0{label}".encode())


@lru_cache(maxsize=4096)
def _encode_text(label: str, num_bytes: int) -> bytes:
    size = f" ({num_bytes} bytes)"
    room = HEADER_BYTES - 16 - len(size)
    return label.encode()[:room].decode("utf-8", "ignore").encode() + size.encode()


class ExchangeSummary(NamedTuple):
    """Summarises a rank's exchanges with `ranks`. times: how many there were. number: their checksum. last: the last label."""

    ranks: tuple[int, ...]
    times: int
    number: int
    last: str


class ExchangeLog:
    """Logs the exchanges of one group since the last `clear`, in order on each channel.

    A backend's collectives carry no mark, so ranks that exchange different tensors would get wrong numbers. Each rank therefore
    computes one checksum of a step's marks per channel. Ranks compare the checksums before the step ends, and change no weight
    if they differ.
    """

    def __init__(self) -> None:
        self.clear()

    def add(self, channel: str, mark: Mark) -> None:
        self._channels[channel] = zlib.crc32(mark.number.to_bytes(4, "little"), self._channels.get(channel, 0))
        self._count += 1
        self._last = mark.label

    def clear(self) -> None:
        self._channels: dict[str, int] = {}
        self._count = 0
        self._last = ""

    def summary(self, ranks: tuple[int, ...]) -> ExchangeSummary | None:
        """Returns a summary of the log, or None if it is empty. ranks: the ranks of the group."""
        if not self._count:
            return None
        number = 0
        for channel, value in sorted(self._channels.items()):
            number = zlib.crc32(f"{channel} {value}".encode(), number)
        return ExchangeSummary(ranks, self._count, number, self._last)


class Work:
    """The handle of an exchange in progress. This class is the handle of a completed exchange.

        start ──> is_completed* ──> wait ──> release ──> wait_sent

    A call may be left out or repeated: each call does the work of those before it. All but `is_completed` raise RunError
    `collective-failed` after a timeout or if a peer died, naming the operation, the group and the content, and `ranks-differ`
    if a peer's exchange differs.
    """

    def is_completed(self) -> bool:
        """Returns whether `wait` would certainly return at once. Does not block, but may advance the exchange."""
        return True

    def wait(self) -> None:
        """Waits until the result is complete. With NCCL, only later work on the current stream waits, and not the host."""

    def release(self) -> None:
        """Gives up the result: afterwards nothing writes into its memory, and this handle does not refer to it. Waits for the
        exchange, except for a gather that can be abandoned.
        """

    def wait_sent(self) -> None:
        """Waits until the peers have received this rank's inputs. Afterwards, inputs and outputs may be written."""


class Published(Protocol):
    """Shards that do not change until `wait_sent`, and may be gathered any number of times."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Starts to gather the ranks' `shards` [n, ...] into `tensors` [size x n, ...], in the order of the group. A shard may
        be a view of its full tensor, and may not be written until `wait_sent` has returned.
        """

    def wait_sent(self) -> None:
        """Ends the publication. Waits until no peer gathers any more; afterwards the shards may be written."""


class Transport(Published, Protocol):
    """Exchanges tensors with the other members of a group on one channel. All tensors are contiguous. Outputs may be read after
    `wait` of the returned handle; inputs and outputs may be written after its `wait_sent`. label: describes the content.
    contents: a checksum of additional content, compared between ranks.
    """

    def publish(self, shards: Sequence[Tensor], *, label: str) -> Published:
        """Publishes `shards`, which must not change until `wait_sent` of the result. By default, each gather is an ordinary
        exchange. All ranks call this and `wait_sent` in the same order relative to their other exchanges. Only one publication
        may be open at a time.
        """
        return self

    def wait_sent(self) -> None:
        return

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns the number of rows of scratch memory that `reduce_scatter` needs for a shard of `num_rows` rows."""
        return 0

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        """Starts to sum each of `tensors` [size x n, ...] over the group; after `wait` this rank's n rows hold the sum, and may
        be written. The other ranks' rows of `tensors` are undefined then. scratches: [`num_scratch_rows(n)`, ...] of the same
        dtype.
        """

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        """Starts to exchange rows: row i of `sent` [size, ...] goes to member i, and row i of `received` comes from it."""

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        """Starts to sum `tensor` in place. The sum is bitwise equal on all ranks. Only some transports compare marks."""


def copy_shard(shard: Tensor, target: Tensor) -> None:
    """Copies `shard` into `target`, of equal shape, unless both begin at the same address."""
    if shard.data_ptr() != target.data_ptr():
        target.copy_(shard)


_HEADER_TAG = 0
"""The tag of headers. The tags of parts are marks, which equal it with a probability of 2^-31."""


class Headers:
    """The headers of one exchange on `channel`. The constructor starts to send and receive them. works: the receives. sent: the
    sends, for which the caller waits.
    """

    def __init__(self, members: Members, channel: dist.ProcessGroup, mark: Mark) -> None:
        self._members = members
        self._mark = mark
        self._peers = members.peers
        self._received = torch.empty(len(self._peers), HEADER_BYTES, dtype=torch.uint8)
        header = mark.header()
        self.works = [channel.recv([row], peer, _HEADER_TAG) for row, peer in zip(self._received, self._peers, strict=True)]
        self.sent = [channel.send([header], peer, _HEADER_TAG) for peer in self._peers]

    def compare(self) -> None:
        """Raises RunError `ranks-differ` if a peer's mark differs. The receives must be complete."""
        for row, peer in zip(self._received, self._peers, strict=True):
            peer_mark = mark_from_header(row)
            if peer_mark[1:] != self._mark[1:]:
                raise self._mark.mismatch_error(self._members.rank, peer_mark.label, self._members.ranks[peer])


@dataclass(eq=False)
class GroupWork(Work):
    """The handle of an exchange that consists of works of a process group, or of a simulated exchange without works.

    _received, _sent: the works of receives and sends. _turn: the exchange, for errors; None only if there are no works.
    _finish: called once, after the last receive. _headers: the peers' headers, to compare.
    """

    _received: Sequence[Any]
    _sent: Sequence[Any] = ()
    _turn: Turn | None = None
    _finish: Callable[[], object] | None = None
    _headers: Headers | None = None

    def is_completed(self) -> bool:
        headers = [] if self._headers is None else self._headers.works
        return all(work.is_completed() for work in (*headers, *self._received))

    def wait(self) -> None:
        """Compares the peers' headers, then waits until everything is received."""
        if self._headers is not None:
            assert self._turn is not None
            self._await(self._headers.works)
            progress = self._turn.members.progress
            progress.begin_wait(self._turn)
            try:
                self._headers.compare()
            except RunError:
                progress.fail_wait("differs")
                raise
            progress.end_wait()
            self._headers = None
        received, self._received = self._received, ()
        self._await(received)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def release(self) -> None:
        self.wait()

    def wait_sent(self) -> None:
        self.wait()
        sent, self._sent = self._sent, ()
        self._await(sent)

    def _await(self, works: Sequence[Any]) -> None:
        for work in works:
            assert self._turn is not None
            run_guarded(work.wait, self._turn)


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value` in the order of ranks, by default over the default group. Blocks.

    value: serialisable as JSON; tuples return as lists, and keys of mappings as strings. torch's object collectives are not
    used, since they unpickle messages: any user of the host can connect to gloo's ports, and could make a rank run code.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    local = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = _gather_padded(torch.tensor([local.numel()], dtype=torch.int64, device=local.device), 1, group)
    lengths = [int(size) for size in sizes]
    texts = _gather_padded(local, max(lengths), group)  # all members see the same lengths
    return [json.loads(bytes(text[:length].tolist())) for text, length in zip(texts, lengths, strict=True)]


def _gather_padded(local: Tensor, numel: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns every rank's `local`, padded to `numel` elements. A collective over `group`."""
    outputs = [local.new_zeros(numel) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, torch.nn.functional.pad(local, (0, numel - local.numel())), group=group)
    return outputs

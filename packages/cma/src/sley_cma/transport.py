"""Defines exchanges in which ranks of one host read each other's memory. Results are bit-identical to the results of
transports that send messages. Ranks copy data only in `wait`, not in the background.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sley_cma.connection import Connection, MemorySpan
from sley_cma.offers import Offers
from sley_core.api.comm import Mark, Members, Published, Transport, Turn, Work
from sley_core.errors import RunError

RINGS = 4
"""The number of rings of a channel: one for exchanges of rows, one for published shards, and two for sums. Only offers in the
same ring must be in order, so shards may stay published for a whole step without blocking exchanges.
"""


class CmaTransport(Transport):
    """Exchanges CPU tensors over `connection`. name, index: the name and the index of the transport's channel."""

    def __init__(self, connection: Connection, name: str, index: int) -> None:
        self.members = connection.members
        rows, published, inputs, slices = (Offers(connection, name, RINGS * index + ring) for ring in range(RINGS))
        self.rows = rows
        self.published = published
        self.sums = AllReduceQueue(inputs, slices)

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return AllGather(self.rows, outputs, shards, Mark.from_tensors("all-gather", label, shards))

    def publish(self, shards: Sequence[Tensor], *, label: str) -> Published:
        """Offers all `shards` at once, and returns an object that gathers them without additional messages."""
        return PublishedOffer(self.published, shards, Mark.from_tensors("share", label, shards))

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        return ReduceScatter(
            self.rows, tensors, self.members.size, Mark.from_tensors("reduce-scatter", label, tensors, checksum)
        )

    def all_to_all(self, output: Tensor, input: Tensor, *, label: str, checksum: int = 0) -> Work:
        return AllToAll(self.rows, output, input, Mark.from_tensors("all-to-all", label, [input], checksum))

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        return AllReduce(self.sums, tensor, Mark.from_tensors("all-reduce", f"{label} over {self.members}", [tensor], checksum))


def connect(members: Members, channels: Mapping[str, dist.ProcessGroup], timeout_s: float) -> dict[str, Transport]:
    """Connects `members` by cross-memory attach, and returns a transport for CPU tensors for each of `channels`. timeout_s: the
    time limit of every wait, in seconds. Returns {} on all ranks if any rank cannot read a peer's memory. This is a collective
    over `members`.
    """
    # All members of the first channel join. All ranks connect their groups in the same order.
    connection = Connection.open(members, RINGS * len(channels), next(iter(channels.values())), timeout_s)
    if connection is None:
        return {}
    return {name: CmaTransport(connection, name, index) for index, name in enumerate(channels)}


class FirstFailure:
    """A context manager that raises the first error of its block again at each later entry. A read that failed is not repeated:
    some of the peers' values may have been added, and another read would add them again. After an interruption of the block,
    such as KeyboardInterrupt, raises RunError `collective-failed`.
    """

    def __init__(self) -> None:
        self._error: RunError | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._error is None:
            interrupted = RunError("collective-failed", "an earlier read of the memory of other ranks was interrupted")
            self._error = error if isinstance(error, RunError) else interrupted


class AllReduceQueue:
    """Holds the open all-reduces of a group, which all members start in the same order.

    inputs, slices: the offers of each rank's input and of its summed slice. num_reduced: the number of all-reduces whose local
    slice is summed. open_sums: the all-reduces that are not complete, in order.

        offer input ──> sum local slice ──> offer local slice ──> read the peers' slices ──> wait_sent
                          ^ all have offered                       ^ all have summed, and have read this rank's input

    Each slice is summed by one rank, which adds its own values first, and then the values of its peers by ascending coordinate.
    So all ranks get the same bits, whatever the timing.
    """

    def __init__(self, inputs: Offers, slices: Offers) -> None:
        self.inputs = inputs
        self.slices = slices
        self.num_reduced = 0
        self.open_sums: list[AllReduce] = []
        self._failure = FirstFailure()

    def advance(self) -> bool:
        """Advances the first open all-reduce that can advance without waiting. Returns whether one advanced."""
        with self._failure:
            return any(open_sum.advance() for open_sum in self.open_sums)

    def advance_one(self, open_sum: "AllReduce") -> None:
        """Advances `open_sum` as far as possible without waiting."""
        with self._failure:
            open_sum.advance()

    def wait_until(self, condition: Callable[[], bool], late_peer: Callable[[], int | None], turn: Callable[[], Turn]) -> None:
        """Waits until `condition()` is true, and advances all sums meanwhile, since ranks may wait for their sums in different
        orders. late_peer: a function that returns the coordinate of a peer that delays the wait, or None. turn: a function that
        returns the description of the wait. The time limit restarts when a sum advances.
        """
        while not condition():
            try:
                self.inputs.connection.wait_until(lambda: self.advance() or condition(), late_peer, turn())
            except RunError as error:
                with self._failure:
                    raise error


class AllReduce(Work):
    """A sum of the contiguous host `tensor` over the group of `queue`, in place. Each rank offers its summed slices in the
    order in which the all-reduces start, so that offers have the same numbers on all ranks. If the marks of ranks differ,
    `wait` raises RunError `ranks-differ` on all ranks before any data are read.
    """

    def __init__(self, queue: AllReduceQueue, tensor: Tensor, mark: Mark) -> None:
        self._queue = queue
        self._mark = mark
        self._label = mark.label
        members = queue.inputs.members
        flat = tensor.view(-1)
        length = -(-flat.numel() // members.size)
        self._slices = [flat[index * length : (index + 1) * length] for index in range(members.size)]
        self._slice_offset = length * members.coord * flat.element_size()
        self._is_reduced = False
        self._is_complete = False
        self._number = queue.inputs.offer([tensor], mark, self.wait_sent)
        queue.open_sums.append(self)

    def advance(self) -> bool:
        """Advances this sum as far as possible without waiting. Returns whether it has advanced."""
        is_next = self._number == self._queue.num_reduced + 1  # this rank has summed its slices of all earlier sums
        can_reduce = not self._is_reduced and is_next and self._queue.inputs.late_offerer(self._number) is None
        if can_reduce:
            self._reduce()
        can_gather = self._is_reduced and not self._is_complete and self._late_peer() is None
        if can_gather:
            self._gather()
        return can_reduce or can_gather

    def is_completed(self) -> bool:
        if not self._is_complete:
            self._queue.advance_one(self)
        return self._is_complete

    def wait(self) -> None:
        self._queue.wait_until(lambda: self._is_reduced, lambda: self._queue.inputs.late_offerer(self._number), self._turn)
        self._queue.wait_until(lambda: self._is_complete, self._late_peer, self._turn)

    def wait_sent(self) -> None:
        """Waits until the sum is complete and the peers have read this rank's data. Advances other sums meanwhile."""
        self.wait()
        self._wait_read(self._queue.inputs)
        self._wait_read(self._queue.slices)

    def _wait_read(self, offers: Offers) -> None:
        """Waits until all peers have read this rank's offer in `offers`, and advances other sums meanwhile."""
        late_reader = partial(offers.late_reader, self._number)
        turn = partial(offers.turn, self._number, self._label, is_read=True)
        self._queue.wait_until(lambda: late_reader() is None, late_reader, turn)
        offers.wait_read(self._number, self._label)

    def _turn(self) -> Turn:
        """Returns the description of the present wait, which is for the peers' inputs or for the peers' slices."""
        queue = self._queue
        offers = queue.slices if queue.inputs.late_offerer(self._number) is None else queue.inputs
        return offers.turn(self._number, self._label)

    def _late_peer(self) -> int | None:
        """Returns the coordinate of a peer that has not read this rank's input, which the peers' slices overwrite, or that has
        not summed its own slice. Returns None if there is no such peer.
        """
        peer = self._queue.inputs.late_reader(self._number)
        return self._queue.slices.late_offerer(self._number) if peer is None else peer

    def _reduce(self) -> None:
        """Adds this rank's slice of every peer's input to this rank's slice in place, and offers the sum to the peers."""
        inputs = self._queue.inputs
        local_slice = self._slices[inputs.coord]
        addresses = [inputs.wait_addresses(peer, self._number, self._label)[0] + self._slice_offset for peer in inputs.peers]
        add_peer_tensors(inputs, local_slice, addresses, self._label)
        self._is_reduced = True
        self._queue.num_reduced += 1
        # The ring is not full, since the offer of this input completed the oldest sum. The slice is offered with the mark of
        # the input, since the last slice may be shorter, so that its own mark would differ.
        number = self._queue.slices.offer([local_slice], self._mark)
        assert number == self._number, f"offer {number} of slices for sum {self._number}"
        for peer in inputs.peers:
            inputs.finish_read(peer, self._number, self._label)

    def _gather(self) -> None:
        """Reads the summed slices of all peers, and completes the sum."""
        slices = self._queue.slices
        for peer in slices.peers:
            local = memory_span(self._slices[peer])
            (address,) = slices.wait_addresses(peer, self._number, self._label)
            slices.connection.read(peer, [local], [MemorySpan(address, local.num_bytes)], self._label)
            slices.finish_read(peer, self._number, self._label)
        self._is_complete = True
        self._queue.open_sums.remove(self)


BLOCK_BYTES = 1 << 18
"""The size, in bytes, of the blocks of a tensor that are read and added one at a time, so that each stays in the cache."""


class _PeerRead(Work):
    """The handle of an exchange whose first `wait` reads the peers' data. Subclasses implement the reads."""

    def __init__(self) -> None:
        self._is_open = True
        self._failure = FirstFailure()

    def wait(self) -> None:
        with self._failure:
            if self._is_open:
                self._read_peers()
                self._is_open = False

    def _read_peers(self) -> None:
        """Reads the data of all peers."""
        raise NotImplementedError


class _Exchange(_PeerRead):
    """An exchange in which each rank offers `tensors` once. `_read_peers` also tells each peer when its data are read."""

    def __init__(self, offers: Offers, tensors: Sequence[Tensor], mark: Mark) -> None:
        super().__init__()
        self._offers = offers
        self._label = mark.label
        self._tensors = tensors  # keeps them alive, since peers may read them
        self._number = offers.offer(tensors, mark, self._complete)

    def is_completed(self) -> bool:
        return not self._is_open or self._offers.late_offerer(self._number) is None

    def wait_sent(self) -> None:
        self.release()
        self._offers.wait_read(self._number, self._label)

    def _complete(self) -> None:
        """Completes the exchange, waits for the peers' reads, and keeps the result, to make room in a full ring."""
        self.wait()
        self._offers.wait_read(self._number, self._label)


class AllGather(_Exchange):
    """An all-gather of the ranks' `shards` into `outputs`."""

    def __init__(self, offers: Offers, outputs: Sequence[Tensor], shards: Sequence[Tensor], mark: Mark) -> None:
        super().__init__(offers, shards, mark)
        self._rows = copy_local_rows(outputs, shards, offers)

    def release(self) -> None:
        """Drops the result, and confirms to the peers that this rank no longer needs their data."""
        with self._failure:
            if self._is_open:
                for peer in self._offers.peers:
                    self._offers.finish_read(peer, self._number, self._label)
                self._is_open = False
        self._rows = []  # frees the memory before `wait_sent`

    def _read_peers(self) -> None:
        for peer in self._offers.peers:
            addresses = self._offers.wait_addresses(peer, self._number, self._label)
            local = [memory_span(rows[peer]) for rows in self._rows]
            remote = [MemorySpan(address, span.num_bytes) for address, span in zip(addresses, local, strict=True)]
            self._offers.connection.read(peer, local, remote, self._label)
            self._offers.finish_read(peer, self._number, self._label)


class ReduceScatter(_Exchange):
    """A reduce-scatter, which adds the peers' rows of each of `inputs` to this rank's rows."""

    def __init__(self, offers: Offers, inputs: Sequence[Tensor], size: int, mark: Mark) -> None:
        self._local_rows = [tensor.view(size, -1)[offers.coord] for tensor in inputs]
        super().__init__(offers, inputs, mark)

    def _read_peers(self) -> None:
        """Waits for the offers of all peers, and adds their rows in ascending order of coordinates."""
        offers = self._offers
        tables = [offers.wait_addresses(peer, self._number, self._label) for peer in offers.peers]
        for index, rows in enumerate(self._local_rows):
            addresses = [table[index] + offers.coord * rows.nbytes for table in tables]
            add_peer_tensors(offers, rows, addresses, self._label)
        for peer in offers.peers:
            offers.finish_read(peer, self._number, self._label)


class AllToAll(_Exchange):
    """An all-to-all: row i of `output` gets the row of rank i's `input` that is for this rank."""

    def __init__(self, offers: Offers, output: Tensor, input: Tensor, mark: Mark) -> None:
        super().__init__(offers, [input], mark)
        self._output = output
        output[offers.coord].copy_(input[offers.coord])

    def _read_peers(self) -> None:
        offers = self._offers
        for peer in offers.peers:
            (address,) = offers.wait_addresses(peer, self._number, self._label)
            local = memory_span(self._output[peer])
            remote = MemorySpan(address + offers.coord * local.num_bytes, local.num_bytes)
            offers.connection.read(peer, [local], [remote], self._label)
            offers.finish_read(peer, self._number, self._label)


class PublishedOffer(Published):
    """A single offer of `shards`, which peers may read until `wait_sent`. Its gathers wait for each peer only once."""

    def __init__(self, offers: Offers, shards: Sequence[Tensor], mark: Mark) -> None:
        self.offers = offers
        self._label = mark.label
        self._shards = shards  # keeps them alive, since peers may read them
        self.number = offers.offer(shards, mark)  # no other offer is open in this ring
        self._indices = {shard.data_ptr(): index for index, shard in enumerate(shards)}
        self._tables: dict[int, Sequence[int]] = {}

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Returns a gather of `shards`, which must be among the published shards, into `outputs`."""
        return _PublishedGather(self, outputs, shards, [self._indices[shard.data_ptr()] for shard in shards])

    def read(self, peer: int, indices: Sequence[int], local: Sequence[MemorySpan]) -> None:
        """Copies the peer's published shards at `indices` to `local`. The first call waits until the peer has published."""
        if peer not in self._tables:
            self._tables[peer] = self.offers.wait_addresses(peer, self.number, self._label)
        table = self._tables[peer]
        remote = [MemorySpan(table[index], span.num_bytes) for index, span in zip(indices, local, strict=True)]
        self.offers.connection.read(peer, local, remote, self._label)

    def wait_sent(self) -> None:
        for peer in self.offers.peers:
            self.offers.finish_read(peer, self.number, self._label)
        self.offers.wait_read(self.number, self._label)


class _PublishedGather(_PeerRead):
    """A gather of published shards, whose start and end need no message to peers."""

    def __init__(
        self, published: PublishedOffer, outputs: Sequence[Tensor], shards: Sequence[Tensor], indices: Sequence[int]
    ) -> None:
        super().__init__()
        self._published = published
        self._indices = indices
        self._rows = copy_local_rows(outputs, shards, published.offers)

    def is_completed(self) -> bool:
        return not self._is_open or self._published.offers.late_offerer(self._published.number) is None

    def _read_peers(self) -> None:
        for peer in self._published.offers.peers:
            self._published.read(peer, self._indices, [memory_span(rows[peer]) for rows in self._rows])

    def release(self) -> None:
        """Drops the result, and reads no more data. Raises the error of a failed `wait` again."""
        self._rows = []
        with self._failure:
            self._is_open = False

    def wait_sent(self) -> None:
        """Does not wait, since peers may read the shards until `PublishedOffer.wait_sent`. Raises as `release` does."""
        self.release()


def copy_local_rows(outputs: Sequence[Tensor], shards: Sequence[Tensor], offers: Offers) -> list[Tensor]:
    """Copies each of this rank's `shards` to this rank's row of an output, and returns views of `outputs` with the shape
    [size, *shard's shape]. Does not copy a shard that already is a view of this row.
    """
    size = offers.members.size
    views = [output.view(size, *shard.shape) for output, shard in zip(outputs, shards, strict=True)]
    for view, shard in zip(views, shards, strict=True):
        rows = view[offers.coord]
        if shard.data_ptr() != rows.data_ptr():
            rows.copy_(shard)
    return views


def add_peer_tensors(offers: Offers, total: Tensor, addresses: Sequence[int], label: str) -> None:
    """Adds a tensor of each peer to `total` in place, block by block, in ascending order of the peers' coordinates. addresses:
    the address of the tensor in each peer's memory. The caller must have waited for the peers' offers.
    """
    length = BLOCK_BYTES // total.element_size()
    memory = allocate_scratch(total)
    for start in range(0, total.numel(), length):
        target = total[start : start + length]
        block = memory[: target.numel()]
        for peer, address in zip(offers.peers, addresses, strict=True):
            remote = MemorySpan(address + start * total.element_size(), target.nbytes)
            offers.connection.read(peer, [memory_span(block)], [remote], label)
            target.add_(block)


def allocate_scratch(total: Tensor) -> Tensor:
    """Returns new memory for one block of a peer's tensor: at most 256 KiB, in the dtype of `total`."""
    return torch.empty(min(BLOCK_BYTES // total.element_size(), total.numel()), dtype=total.dtype)


def memory_span(tensor: Tensor) -> MemorySpan:
    """Returns the memory span of a contiguous tensor."""
    assert tensor.is_contiguous(), tensor.stride()
    return MemorySpan(tensor.data_ptr(), tensor.nbytes)

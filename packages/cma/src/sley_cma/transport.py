"""Exchanges between ranks of one host that read each other's memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from sley_cma.connection import Connection
from sley_cma.offers import Offers
from sley_cma.process_vm import MemorySpan
from sley_cma.rows import AllToAll, Gather, PublishedOffer, ReduceScatter, add_peer_tensors, memory_span
from sley_core.api.comm import Mark, Members, Published, Transport, Turn, Work

RINGS = 4
"""The number of rings of a channel: one for exchanges of rows, one for published shards, and two for sums. Only offers in the
same ring must be in order, so shards may stay published for a whole step without blocking exchanges.
"""


class CmaTransport(Transport):
    """Exchanges host tensors over `connection`. name, index: the channel's name and index."""

    def __init__(self, connection: Connection, name: str, index: int) -> None:
        self.members = connection.members
        rows, published, inputs, slices = (Offers(connection, name, RINGS * index + ring) for ring in range(RINGS))
        self.rows = rows
        self.published = published
        self.sums = SumQueue(inputs, slices)

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Offers `shards`, and returns a handle that reads those of peers into `outputs` in its `wait`."""
        return Gather(self.rows, outputs, shards, Mark.from_tensors("all-gather", label, shards))

    def publish(self, shards: Sequence[Tensor], *, label: str) -> Published:
        """Offers all `shards` at once, and returns an object that gathers them without additional messages."""
        return PublishedOffer(self.published, shards, Mark.from_tensors("share", label, shards))

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        return ReduceScatter(
            self.rows, tensors, self.members.size, Mark.from_tensors("reduce-scatter", label, tensors, contents)
        )

    def all_to_all(self, output: Tensor, input: Tensor, *, label: str, contents: int = 0) -> Work:
        return AllToAll(self.rows, output, input, Mark.from_tensors("all-to-all", label, [input], contents))

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        return Sum(self.sums, tensor, Mark.from_tensors("all-reduce", f"{label} over {self.members}", [tensor], contents))


def connect(members: Members, channels: Mapping[str, dist.ProcessGroup], timeout_s: float) -> dict[str, Transport]:
    """Connects `members` by cross-memory attach, and returns a transport of host tensors for each of `channels`.

    timeout_s: the time limit of every wait. Returns {} on all ranks if any rank cannot read a peer's memory. This is a
    collective over `members`.
    """
    # All members of the first channel join, and each rank connects its groups in the order of the table of groups.
    connection = Connection.open(members, RINGS * len(channels), next(iter(channels.values())), timeout_s)
    if connection is None:
        return {}
    return {name: CmaTransport(connection, name, index) for index, name in enumerate(channels)}


class SumQueue:
    """Holds the sums of a group, which all members start in the same order.

    inputs, slices: the offers of each rank's input and of its summed slice. num_reduced: the number of sums whose local slice
    is complete. open_sums: the sums that are not complete, in order.

        offer input ──> sum local slice ──> offer local slice ──> read the peers' slices ──> wait_sent
                          ^ all have offered                       ^ all have summed, and have read this rank's input

    Each slice is summed by one rank, which adds its own values first and then those of its peers, by ascending coordinate. So
    all ranks get the same bits, whatever the timing.
    """

    def __init__(self, inputs: Offers, slices: Offers) -> None:
        self.inputs = inputs
        self.slices = slices
        self.num_reduced = 0
        self.open_sums: list[Sum] = []

    def advance(self) -> bool:
        """Advances the first sum that can advance without waiting. Returns whether a sum advanced."""
        return any(open_sum.advance() for open_sum in self.open_sums)


class Sum(Work):
    """A sum of the contiguous host `tensor` over the group of `queue`, in place.

    A rank sums its slices in the order of the sums, so that their offers have the same numbers on all ranks. If the marks of
    ranks differ, `wait` raises RunError `ranks-differ` on all ranks before any data are read.
    """

    def __init__(self, queue: SumQueue, tensor: Tensor, mark: Mark) -> None:
        self._queue = queue
        self._mark = mark
        self._label = mark.label
        members = queue.inputs.connection.members
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
        can_reduce = not self._is_reduced and self._is_next and self._queue.inputs.late_offerer(self._number) is None
        if can_reduce:
            self._reduce()
        can_gather = self._is_reduced and not self._is_complete and self._late_peer() is None
        if can_gather:
            self._gather()
        return can_reduce or can_gather

    def is_completed(self) -> bool:
        self.advance()
        return self._is_complete

    def wait(self) -> None:
        self._wait_until(lambda: self._is_reduced, lambda: self._queue.inputs.late_offerer(self._number), self._turn)
        self._wait_until(lambda: self._is_complete, self._late_peer, self._turn)

    def release(self) -> None:
        """Completes the sum, since peers need this rank's slice."""
        self.wait()

    def wait_sent(self) -> None:
        """Waits until the sum is complete and the peers have read this rank's data. Advances other sums meanwhile."""
        self.wait()
        self._wait_read(self._queue.inputs)
        self._wait_read(self._queue.slices)

    def _wait_read(self, offers: Offers) -> None:
        """Waits until the peers have read this rank's offer in `offers`."""
        late_reader = partial(offers.late_reader, self._number)
        turn = partial(offers.turn, self._number, self._label, is_read=True)
        self._wait_until(lambda: late_reader() is None, late_reader, turn)
        offers.wait_read(self._number, self._label)

    @property
    def _is_next(self) -> bool:
        """Whether this rank has summed its slices of all earlier sums."""
        return self._number == self._queue.num_reduced + 1

    def _turn(self) -> Turn:
        """Returns the description of the current wait: for the peers' inputs, or for their slices once all have offered."""
        queue = self._queue
        offers = queue.slices if queue.inputs.late_offerer(self._number) is None else queue.inputs
        return offers.turn(self._number, self._label)

    def _wait_until(self, condition: Callable[[], bool], late_peer: Callable[[], int | None], turn: Callable[[], Turn]) -> None:
        """Waits until `condition()`, and advances all sums meanwhile, since ranks may wait for their sums in different orders.

        late_peer: a function that returns a peer that delays the wait, or None. turn: a function that returns the description
        of the wait. The time limit restarts when a sum advances.
        """
        while not condition():
            self._queue.inputs.connection.wait_until(lambda: self._queue.advance() or condition(), late_peer, turn())

    def _late_peer(self) -> int | None:
        """Returns a peer that has not read this rank's input, which the slices overwrite, or has not summed its slice."""
        peer = self._queue.inputs.late_reader(self._number)
        return self._queue.slices.late_offerer(self._number) if peer is None else peer

    def _reduce(self) -> None:
        """Sums this rank's slice of all peers' inputs in place, and offers it to the peers."""
        inputs = self._queue.inputs
        local_slice = self._slices[inputs.coord]
        addresses = [inputs.wait_table(peer, self._number, self._label)[0] + self._slice_offset for peer in inputs.peers]
        add_peer_tensors(inputs, local_slice, addresses, self._label)
        self._is_reduced = True
        self._queue.num_reduced += 1
        # The ring is not full, since the offer of this input completed the oldest sum. The mark is that of the input, since the
        # last slice may be shorter.
        number = self._queue.slices.offer([local_slice], self._mark)
        assert number == self._number, f"offer {number} of slices for sum {self._number}"
        for peer in inputs.peers:
            inputs.finish_read(peer, self._number, self._label)

    def _gather(self) -> None:
        """Reads the peers' summed slices, which completes the sum."""
        slices = self._queue.slices
        for peer in slices.peers:
            local = memory_span(self._slices[peer])
            (address,) = slices.wait_table(peer, self._number, self._label)
            slices.connection.read(peer, [local], [MemorySpan(address, local.num_bytes)], self._label)
            slices.finish_read(peer, self._number, self._label)
        self._is_complete = True
        self._queue.open_sums.remove(self)

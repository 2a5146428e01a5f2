"""Gathers, reductions and all-to-alls of rows by ranks that read each other's memory. Results have the same bits as
those of transports that send messages.

Ranks copy data only in `wait`, not in the background.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sley_cma.offers import Offers
from sley_cma.process_vm import MemorySpan
from sley_core.api.comm import Mark, Published, Work

BLOCK_BYTES = 1 << 18
"""The size, in bytes, of the blocks of a tensor that are read and added one at a time, so that each stays in the cache."""


class _Exchange(Work):
    """An exchange in which each rank offers `tensors` once. Subclasses read the peers' tensors."""

    def __init__(self, offers: Offers, tensors: Sequence[Tensor], mark: Mark) -> None:
        self._offers = offers
        self._label = mark.label
        self._tensors = tensors  # keeps them alive, since peers may read them
        self._is_open = True
        self._number = offers.offer(tensors, mark, self._complete)

    def is_completed(self) -> bool:
        return not self._is_open or self._offers.late_offerer(self._number) is None

    def wait(self) -> None:
        if self._is_open:
            self._is_open = False
            self._read_peers()

    def release(self) -> None:
        """Gives up the result. This completes the exchange, since peers wait until this rank has read their tensors."""
        self.wait()

    def wait_sent(self) -> None:
        self.release()
        self._offers.wait_read(self._number, self._label)

    def _complete(self) -> None:
        """Completes the exchange, waits for the peers' reads, and keeps the result. Called if the ring is full."""
        self.wait()
        self._offers.wait_read(self._number, self._label)

    def _read_peers(self) -> None:
        """Reads the data of all peers, and tells them so."""
        raise NotImplementedError


class Gather(_Exchange):
    """An all-gather of the ranks' `shards` into `outputs`."""

    def __init__(self, offers: Offers, outputs: Sequence[Tensor], shards: Sequence[Tensor], mark: Mark) -> None:
        super().__init__(offers, shards, mark)
        self._rows = copy_local_rows(outputs, shards, offers)

    def release(self) -> None:
        """Drops the result, and confirms to the peers that this rank no longer needs their data."""
        if self._is_open:
            self._is_open = False
            for peer in self._offers.peers:
                self._offers.finish_read(peer, self._number, self._label)
        self._rows = []  # frees the memory before `wait_sent`

    def _read_peers(self) -> None:
        for peer in self._offers.peers:
            addresses = self._offers.wait_table(peer, self._number, self._label)
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
        """Waits for all peers, and adds their rows in ascending order of coordinates."""
        offers = self._offers
        tables = [offers.wait_table(peer, self._number, self._label) for peer in offers.peers]
        for index, rows in enumerate(self._local_rows):
            addresses = [table[index] + offers.coord * rows.nbytes for table in tables]
            add_peer_tensors(offers, rows, addresses, self._label)
        for peer in offers.peers:
            offers.finish_read(peer, self._number, self._label)


class AllToAll(_Exchange):
    """An all-to-all, which reads this rank's row of the i-th rank's `input` into row i of `output`."""

    def __init__(self, offers: Offers, output: Tensor, input: Tensor, mark: Mark) -> None:
        super().__init__(offers, [input], mark)
        self._output = output
        output[offers.coord].copy_(input[offers.coord])

    def _read_peers(self) -> None:
        offers = self._offers
        for peer in offers.peers:
            (address,) = offers.wait_table(peer, self._number, self._label)
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
        self._number = offers.offer(shards, mark)  # no other offer is open in its ring
        self._indices = {shard.data_ptr(): index for index, shard in enumerate(shards)}
        self._tables: dict[int, Sequence[int]] = {}

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Gathers `shards`, which must be among the published shards."""
        return _PublishedGather(self, outputs, shards, [self._indices[shard.data_ptr()] for shard in shards])

    def read(self, peer: int, indices: Sequence[int], local: Sequence[MemorySpan]) -> None:
        """Copies the peer's published shards at `indices` to `local`. The first call waits until the peer has published."""
        if peer not in self._tables:
            self._tables[peer] = self.offers.wait_table(peer, self._number, self._label)
        table = self._tables[peer]
        remote = [MemorySpan(table[index], span.num_bytes) for index, span in zip(indices, local, strict=True)]
        self.offers.connection.read(peer, local, remote, self._label)

    def is_offered(self) -> bool:
        """Returns whether every peer has published its shards. Never blocks."""
        return self.offers.late_offerer(self._number) is None

    def wait_sent(self) -> None:
        for peer in self.offers.peers:
            self.offers.finish_read(peer, self._number, self._label)
        self.offers.wait_read(self._number, self._label)


class _PublishedGather(Work):
    """A gather of published shards, whose start and end need no message to peers."""

    def __init__(
        self, published: PublishedOffer, outputs: Sequence[Tensor], shards: Sequence[Tensor], indices: Sequence[int]
    ) -> None:
        self._published = published
        self._indices = indices
        self._is_open = True
        self._rows = copy_local_rows(outputs, shards, published.offers)

    def is_completed(self) -> bool:
        return not self._is_open or self._published.is_offered()

    def wait(self) -> None:
        """Reads the shards of all peers into their rows. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            for peer in self._published.offers.peers:
                self._published.read(peer, self._indices, [memory_span(rows[peer]) for rows in self._rows])

    def release(self) -> None:
        """Drops the result, and reads no more data."""
        self._is_open = False
        self._rows = []

    def wait_sent(self) -> None:
        """Returns at once, since peers may read the shards until `PublishedOffer.wait_sent`."""
        self.release()


def copy_local_rows(outputs: Sequence[Tensor], shards: Sequence[Tensor], offers: Offers) -> list[Tensor]:
    """Copies this rank's shards to their rows of `outputs`, and returns the outputs as views [size, *shard's shape].

    A shard that is already a view of its rows is not copied.
    """
    size = offers.connection.members.size
    views = [output.view(size, *shard.shape) for output, shard in zip(outputs, shards, strict=True)]
    for view, shard in zip(views, shards, strict=True):
        rows = view[offers.coord]
        if shard.data_ptr() != rows.data_ptr():
            rows.copy_(shard)
    return views


def add_peer_tensors(offers: Offers, total: Tensor, addresses: Sequence[int], label: str) -> None:
    """Adds a tensor of each peer to `total`, in the order of peers, block by block.

    addresses: the address of the tensor in each peer's memory. The caller must have waited for the peers' offers.
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
    """Allocates memory for a block of a peer's tensor that is added to `total`, at most 256 KiB. Memory estimates call this."""
    return torch.empty(min(BLOCK_BYTES // total.element_size(), total.numel()), dtype=total.dtype)


def memory_span(tensor: Tensor) -> MemorySpan:
    """Returns the memory span of a contiguous tensor."""
    return MemorySpan(tensor.data_ptr(), tensor.nbytes)

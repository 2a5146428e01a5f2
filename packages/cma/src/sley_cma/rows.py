"""Gathers, reductions and swaps of rows by ranks that read each other's memory; the same bits as by messages.

What comes is read when it is awaited: nothing else moves it, so a wait costs the copy, and no core is taken before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sley_cma.offers import Offers
from sley_cma.process_vm import MemorySpan
from sley_core.api.comm import Mark, Published, Work

PIECE_BYTES = 1 << 18
"""How much of a gradient is read before it is added: it stays in the cache in between."""


class _OneOffer(Work):
    """An exchange for which each rank offers `tensors`, once. Subclasses say what of the peers' is taken, and how."""

    def __init__(self, offers: Offers, tensors: Sequence[Tensor], mark: Mark) -> None:
        self._offers = offers
        self._what = mark.what
        self._tensors = tensors  # alive while others may read them
        self._is_open = True
        self._number = offers.offer(tensors, mark, self._complete)

    def test(self) -> bool:
        return not self._is_open or self._offers.is_offered(self._number)

    def wait(self) -> None:
        if self._is_open:
            self._is_open = False
            self._take()

    def release(self) -> None:
        """Takes what has not been taken: of most exchanges nothing may be left out."""
        self.wait()

    def wait_sent(self) -> None:
        self.release()
        self._offers.wait_read(self._number, self._what)

    def _complete(self) -> None:
        """Waits as `wait_sent` does, but keeps the result, which may still be wanted; called where the ring
        of offers is full.
        """
        self.wait()
        self._offers.wait_read(self._number, self._what)

    def _take(self) -> None:
        """Reads what comes from the peers, and tells them so."""
        raise NotImplementedError


class Gather(_OneOffer):
    """Fills each of `wholes` with the ranks' `shards`."""

    def __init__(self, offers: Offers, wholes: Sequence[Tensor], shards: Sequence[Tensor], mark: Mark) -> None:
        super().__init__(offers, shards, mark)
        self._rows = rows_of(wholes, shards, offers)

    def release(self) -> None:
        """Gives up the result, and tells the peers that what was not awaited will never be read."""
        if self._is_open:
            self._is_open = False
            for peer in self._offers.peers:
                self._offers.done(peer, self._number, self._what)
        self._rows = []  # the memory may be let go, long before `wait_sent`

    def _take(self) -> None:
        """Reads every peer's shards into their rows as each comes, and tells it so."""
        for peer in self._offers.peers:
            addresses = self._offers.wait_table(peer, self._number, self._what)
            here = [span(rows[peer]) for rows in self._rows]
            there = [MemorySpan(address, part.num_bytes) for address, part in zip(addresses, here, strict=True)]
            self._offers.read(peer, here, there, self._what)
            self._offers.done(peer, self._number, self._what)


class ReduceScatter(_OneOffer):
    """Adds the peers' part of each of `wholes` to this rank's rows of it."""

    def __init__(self, offers: Offers, wholes: Sequence[Tensor], size: int, mark: Mark) -> None:
        self._own = [whole.view(size, -1)[offers.coord] for whole in wholes]
        super().__init__(offers, wholes, mark)

    def _take(self) -> None:
        """Waits for all peers, adds their part of each whole to this rank's rows in the order of coordinates, and tells them
        so.
        """
        offers = self._offers
        tables = [offers.wait_table(peer, self._number, self._what) for peer in offers.peers]
        for at, own in enumerate(self._own):
            addresses = [table[at] + offers.coord * own.nbytes for table in tables]
            add_from(offers, own, addresses, self._what)
        for peer in offers.peers:
            offers.done(peer, self._number, self._what)


class AllToAll(_OneOffer):
    """Row i of `received` is this rank's row of the i-th rank's `sent`."""

    def __init__(self, offers: Offers, received: Tensor, sent: Tensor, mark: Mark) -> None:
        super().__init__(offers, [sent], mark)
        self._received = received
        received[offers.coord].copy_(sent[offers.coord])

    def _take(self) -> None:
        """Reads this rank's row of every peer's `sent` as each comes, and tells it so."""
        offers = self._offers
        for peer in offers.peers:
            (address,) = offers.wait_table(peer, self._number, self._what)
            here = span(self._received[peer])
            there = MemorySpan(address + offers.coord * here.num_bytes, here.num_bytes)
            offers.read(peer, [here], [there], self._what)
            offers.done(peer, self._number, self._what)


class Shared(Published):
    """Lets the peers read `shards` without asking for each: one offer for as long as nobody writes them.

    Gathers from it wait for the peers once, however many they are.
    """

    def __init__(self, offers: Offers, shards: Sequence[Tensor], mark: Mark) -> None:
        self.offers = offers
        self._what = mark.what
        self._shards = shards  # alive while others may read them
        self._number = offers.offer(shards, mark)  # one is open at a time, in a row of offers of its own
        self._places = {shard.data_ptr(): place for place, shard in enumerate(shards)}
        self._tables: dict[int, Sequence[int]] = {}

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        """Gathers `shards`, which are among those that are shared."""
        return _SharedGather(self, wholes, shards, [self._places[shard.data_ptr()] for shard in shards])

    def read(self, peer: int, places: Sequence[int], here: Sequence[MemorySpan]) -> None:
        """Copies the peer's shards at `places`, numbers in the order in which they are shared, into `here`; the first time,
        waits until the peer shares its own.
        """
        if peer not in self._tables:
            self._tables[peer] = self.offers.wait_table(peer, self._number, self._what)
        table = self._tables[peer]
        there = [MemorySpan(table[place], part.num_bytes) for place, part in zip(places, here, strict=True)]
        self.offers.read(peer, here, there, self._what)

    def is_offered(self) -> bool:
        """Returns whether every peer has begun to share its own; never blocks."""
        return self.offers.is_offered(self._number)

    def wait_sent(self) -> None:
        for peer in self.offers.peers:
            self.offers.done(peer, self._number, self._what)
        self.offers.wait_read(self._number, self._what)


class _SharedGather(Work):
    """A gather of what is shared: it asks for nothing, so nobody has to be told of its end."""

    def __init__(self, shared: Shared, wholes: Sequence[Tensor], shards: Sequence[Tensor], places: Sequence[int]) -> None:
        self._shared = shared
        self._places = places
        self._is_open = True
        self._rows = rows_of(wholes, shards, shared.offers)

    def test(self) -> bool:
        return not self._is_open or self._shared.is_offered()

    def wait(self) -> None:
        """Reads every peer's shards into their rows, if that was not done yet."""
        if self._is_open:
            self._is_open = False
            for peer in self._shared.offers.peers:
                self._shared.read(peer, self._places, [span(rows[peer]) for rows in self._rows])

    def release(self) -> None:
        """Gives up the result; what was not awaited is never read, and nobody need be told."""
        self._is_open = False
        self._rows = []

    def wait_sent(self) -> None:
        """Returns at once: the peers read until what is shared ends."""
        self.release()


def rows_of(wholes: Sequence[Tensor], shards: Sequence[Tensor], offers: Offers) -> list[Tensor]:
    """Copies this rank's shard into its place in each of `wholes`, unless it lies there; returns them as [size, *shard's
    shape].
    """
    size = offers.connection.members.size
    views = [whole.view(size, *shard.shape) for whole, shard in zip(wholes, shards, strict=True)]
    for rows, shard in zip(views, shards, strict=True):
        own = rows[offers.coord]
        if shard.data_ptr() != own.data_ptr():
            own.copy_(shard)
    return views


def add_from(offers: Offers, own: Tensor, addresses: Sequence[int], what: str) -> None:
    """Adds to `own` what lies at `addresses`, one of each peer in their order, piece by piece. The ranks' offers must have been
    waited for.
    """
    length = PIECE_BYTES // own.element_size()
    piece = scratch(own)
    for first in range(0, own.numel(), length):
        target = own[first : first + length]
        came = piece[: target.numel()]
        for peer, address in zip(offers.peers, addresses, strict=True):
            there = MemorySpan(address + first * own.element_size(), target.nbytes)
            offers.read(peer, [span(came)], [there], what)
            target.add_(came)


def scratch(own: Tensor) -> Tensor:
    """Returns memory into which a peer's part of `own` is read piece by piece: at most 256 KiB."""
    return torch.empty(min(PIECE_BYTES // own.element_size(), own.numel()), dtype=own.dtype)


def span(tensor: Tensor) -> MemorySpan:
    """Returns where `tensor`, which is contiguous, lies."""
    return MemorySpan(tensor.data_ptr(), tensor.nbytes)

"""Gathers, reductions and swaps of rows by ranks that read each other's memory; the same bits as by messages.

What comes is read when it is awaited: nothing else moves it, so a wait costs the copy, and no core is taken before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sley_core.comm.host_memory import HostMemory
from sley_core.comm.marks import Mark
from sley_core.comm.system_memory import Span

PIECE_BYTES = 1 << 18
"""How much of a gradient is read before it is added: it stays in the cache in between."""


class HostGather:
    """Fills each of `wholes` with the ranks' `shards`."""

    def __init__(self, memory: HostMemory, wholes: Sequence[Tensor], shards: Sequence[Tensor], mark: Mark) -> None:
        self._memory = memory
        self._what = mark.what
        self._shards = shards  # alive while others may read them
        self._number = memory.offer(shards, mark, self._complete)
        self._rows = [whole.view(len(memory.ranks), *shard.shape) for whole, shard in zip(wholes, shards, strict=True)]
        self._is_open = True
        for rows, shard in zip(self._rows, shards, strict=True):
            rows[memory.coord].copy_(shard)

    def wait(self) -> None:
        """Reads what comes from the others, once."""
        if not self._is_open:
            return
        self._is_open = False
        for peer in self._memory.peers:
            addresses = self._memory.table(peer, self._number, self._what)
            here = [span(rows[peer]) for rows in self._rows]
            there = [Span(address, part.num_bytes) for address, part in zip(addresses, here, strict=True)]
            self._memory.read(peer, here, there, self._what)
            self._memory.done(peer, self._number, self._what)

    def free(self) -> None:
        """What was not awaited is never read."""
        if self._is_open:
            self._is_open = False
            for peer in self._memory.peers:
                self._memory.done(peer, self._number, self._what)
        self._rows = []  # the memory may be let go, long before `end`

    def end(self) -> None:
        """Waits until the others have read the shards."""
        self.free()
        self._memory.is_read(self._number, self._what)

    def _complete(self) -> None:
        """As `end`, of one that may still be awaited."""
        self.wait()
        self._memory.is_read(self._number, self._what)


class HostShare:
    """Lets the peers read `shards` without asking for each: one offer for as long as nobody writes them.

    Gathers from it wait for the peers once, however many they are.
    """

    def __init__(self, memory: HostMemory, shards: Sequence[Tensor], mark: Mark) -> None:
        self._memory = memory
        self._what = mark.what
        self._shards = shards  # alive while others may read them
        self._number = memory.offer(shards, mark)  # one is open at a time, in a row of offers of its own
        self._places = {shard.data_ptr(): place for place, shard in enumerate(shards)}
        self._tables: dict[int, Sequence[int]] = {}

    def gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> SharedGather:
        """Fills each of `wholes` with the ranks' `shards`, which are among those that are shared."""
        return SharedGather(self, wholes, [(self._places[shard.data_ptr()], shard) for shard in shards])

    def read(self, peer: int, places: Sequence[int], here: Sequence[Span]) -> None:
        """Copies the peer's shards at `places` into `here`."""
        if peer not in self._tables:
            self._tables[peer] = self._memory.table(peer, self._number, self._what)
        table = self._tables[peer]
        there = [Span(table[place], part.num_bytes) for place, part in zip(places, here, strict=True)]
        self._memory.read(peer, here, there, self._what)

    @property
    def memory(self) -> HostMemory:
        return self._memory

    def end(self) -> None:
        """This rank reads no more. Returns when no peer does: the shards may be written."""
        for peer in self._memory.peers:
            self._memory.done(peer, self._number, self._what)
        self._memory.is_read(self._number, self._what)


class SharedGather:
    """A gather of what is shared: it asks for nothing, so it needs no end."""

    def __init__(self, share: HostShare, wholes: Sequence[Tensor], shards: Sequence[tuple[int, Tensor]]) -> None:
        self._share = share
        self._places = [place for place, _ in shards]
        memory = share.memory
        self._rows = [whole.view(len(memory.ranks), *one.shape) for whole, (_, one) in zip(wholes, shards, strict=True)]
        self._is_open = True
        for rows, (_, shard) in zip(self._rows, shards, strict=True):
            rows[memory.coord].copy_(shard)

    def wait(self) -> None:
        """Reads what comes from the others, once."""
        if self._is_open:
            self._is_open = False
            for peer in self._share.memory.peers:
                self._share.read(peer, self._places, [span(rows[peer]) for rows in self._rows])

    def free(self) -> None:
        """What was not awaited is never read."""
        self._is_open = False
        self._rows = []

    def end(self) -> None:
        self.free()


class HostReduce:
    """Adds the others' part of each of `wholes` to this rank's rows of it."""

    def __init__(self, memory: HostMemory, wholes: Sequence[Tensor], mark: Mark) -> None:
        self._memory = memory
        self._what = mark.what
        self._wholes = wholes  # alive while others may read them
        self._number = memory.offer(wholes, mark, self.end)
        self._own = [whole.view(len(memory.ranks), -1)[memory.coord] for whole in wholes]
        self._is_open = True

    def is_here(self) -> bool:
        """Whether all others have offered theirs."""
        return self._memory.is_offered(self._number)

    def wait(self) -> None:
        """Reads and adds, once."""
        if not self._is_open:
            return
        self._is_open = False
        memory = self._memory
        tables = [memory.table(peer, self._number, self._what) for peer in memory.peers]
        for at, own in enumerate(self._own):
            addresses = [table[at] + memory.coord * own.nbytes for table in tables]
            add_from(memory, own, addresses, self._what)
        for peer in memory.peers:
            memory.done(peer, self._number, self._what)

    def free(self) -> None:
        """Reads what has not been read: a sum has no part that may be left out."""
        self.wait()

    def end(self) -> None:
        """Waits until the others have read."""
        self.wait()
        self._memory.is_read(self._number, self._what)


class HostSwap:
    """Row i of `received` is this rank's row of the i-th rank's `sent`."""

    def __init__(self, memory: HostMemory, received: Tensor, sent: Tensor, mark: Mark) -> None:
        self._memory = memory
        self._what = mark.what
        self._sent = sent  # alive while others may read it
        self._number = memory.offer([sent], mark, self.end)
        self._received = received
        self._is_open = True
        received[memory.coord].copy_(sent[memory.coord])

    def wait(self) -> None:
        """Reads what comes from the others, once."""
        if not self._is_open:
            return
        self._is_open = False
        memory = self._memory
        for peer in memory.peers:
            (address,) = memory.table(peer, self._number, self._what)
            here = span(self._received[peer])
            there = Span(address + memory.coord * here.num_bytes, here.num_bytes)
            memory.read(peer, [here], [there], self._what)
            memory.done(peer, self._number, self._what)

    def free(self) -> None:
        """Reads what has not been read."""
        self.wait()

    def end(self) -> None:
        """Waits until the others have read."""
        self.wait()
        self._memory.is_read(self._number, self._what)


def add_from(memory: HostMemory, own: Tensor, addresses: Sequence[int], what: str) -> None:
    """Adds to `own` what lies at `addresses` of the peers, one for each, in their order."""
    length = PIECE_BYTES // own.element_size()
    piece = torch.empty(min(length, own.numel()), dtype=own.dtype)
    for first in range(0, own.numel(), length):
        target = own[first : first + length]
        came = piece[: target.numel()]
        for peer, address in zip(memory.peers, addresses, strict=True):
            there = Span(address + first * own.element_size(), target.nbytes)
            memory.read(peer, [span(came)], [there], what)
            target.add_(came)


def span(tensor: Tensor) -> Span:
    """Where `tensor`, which is contiguous, lies."""
    return Span(tensor.data_ptr(), tensor.nbytes)

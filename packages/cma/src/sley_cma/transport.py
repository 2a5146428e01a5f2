"""Exchanges between ranks of one host that read each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from sley_cma.connection import Connection
from sley_cma.offers import Offers
from sley_cma.process_vm import MemorySpan
from sley_cma.rows import AllToAll, Gather, ReduceScatter, Shared, add_from, span
from sley_core.api.comm import Mark, Members, Published, Transport, Turn, Work

RINGS = 4
"""Rows of offers of one lane: exchanges of rows, what is published, and the two of sums. Each is in one order by itself, so
what is published may stay for a whole step: however many exchanges come in between, none waits for its place to be free."""


class Cma(Transport):
    """Reads and writes by `connection`; lane `name`, at `at` of those that share it, each with RINGS rings.

    Tensors are on the host.
    """

    def __init__(self, connection: Connection, name: str, at: int) -> None:
        self.members = connection.members
        rows, published, wholes, slices = (Offers(connection, name, RINGS * at + ring) for ring in range(RINGS))
        self.rows = rows
        self.published = published
        self.sums = CmaSums(wholes, slices)

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return Gather(self.rows, wholes, shards, Mark.of("all-gather", what, shards))

    def publish(self, shards: Sequence[Tensor], *, what: str) -> Published:
        """Offers all `shards` at once, so that no gather of them waits for a peer to come to it; returns what gathers them."""
        return Shared(self.published, shards, Mark.of("share", what, shards))

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        return ReduceScatter(self.rows, wholes, self.members.size, Mark.of("reduce-scatter", what, wholes, contents))

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return AllToAll(self.rows, received, sent, Mark.of("all-to-all", what, [sent], contents))

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return Sum(self.sums, tensor, Mark.of("all-reduce", f"{what} over {self.members}", [tensor], contents))


def connect(members: Members, lanes: Mapping[str, dist.ProcessGroup], timeout_s: float) -> dict[str, Transport]:
    """Connects `members` by cross-memory attach; returns a transport by it for each of `lanes`, or {} on all ranks, where one
    cannot read a peer's memory. For tensors on the host. All members call it.

    timeout_s: of every wait.
    """
    # The first lane's members, in the order of the table of groups.
    connection = Connection.open(members, RINGS * len(lanes), next(iter(lanes.values())), timeout_s)
    return {name: Cma(connection, name, at) for at, name in enumerate(lanes)} if connection is not None else {}


class CmaSums:
    """What a group needs for sums, which all members start in one order: a row of offers for either half of a sum.

    num_summed: sums whose slice of this rank is summed. unfinished: those whose whole is not there yet, in their order.

        offer whole ──> sum own slice ──> offer own slice ──> read the others' slices ──> wait_sent
                          ^ all have offered                    ^ all have summed, and nobody needs what is overwritten

    A slice is summed on one rank, own part first, then by ascending coordinate: all ranks hold the same bits, whoever was late.
    """

    def __init__(self, wholes: Offers, slices: Offers) -> None:
        self.wholes = wholes
        self.slices = slices
        self.num_summed = 0
        self.unfinished: list[Sum] = []

    def advance(self) -> bool:
        """Moves on the first sum that can go on without waiting; returns whether there was one."""
        return any(exchange.advance() for exchange in self.unfinished)


class Sum(Work):
    """The sum of `whole` (contiguous, on the host) over the group of `sums`, in place.

    A slice is summed when those of all sums before are, so that its offer has the same number on all ranks. Where a rank sums
    something else, or of another length, `mark` says so, `wait` raises RunError `ranks-differ` on all, and nothing is read.
    """

    def __init__(self, sums: CmaSums, whole: Tensor, mark: Mark) -> None:
        self._sums = sums
        self._mark = mark
        self._what = mark.what
        members = sums.wholes.connection.members
        flat = whole.view(-1)
        length = -(-flat.numel() // members.size)
        self._slices = [flat[at * length : (at + 1) * length] for at in range(members.size)]
        self._first = length * members.coord * flat.element_size()
        self._is_summed = False
        self._is_whole = False
        self._number = sums.wholes.offer([whole], mark, self.wait_sent)
        sums.unfinished.append(self)

    def advance(self) -> bool:
        """Moves this sum on as far as that needs no waiting; returns whether it has moved."""
        sums_now = not self._is_summed and self._is_next and self._sums.wholes.is_offered(self._number)
        if sums_now:
            self._sum()
        gathers_now = self._is_summed and not self._is_whole and self._may_gather()
        if gathers_now:
            self._gather()
        return sums_now or gathers_now

    def test(self) -> bool:
        self.advance()
        return self._is_whole

    def wait(self) -> None:
        self._wait_until(lambda: self._is_summed, lambda: self._sums.wholes.late_offerer(self._number), self._turn)
        self._wait_until(lambda: self._is_whole, self._late_summer, self._turn)

    def release(self) -> None:
        """Ends the sum: no part of it may be left out."""
        self.wait()

    def wait_sent(self) -> None:
        """Waits until this rank has the whole sum and the peers have read its part of it, moving other sums on meanwhile."""
        self.wait()
        for offers in (self._sums.wholes, self._sums.slices):
            turn = partial(offers.read_turn, self._number, self._what)
            self._wait_until(partial(offers.is_read, self._number), partial(offers.late_reader, self._number), turn)
            offers.wait_read(self._number, self._what)

    @property
    def _is_next(self) -> bool:
        """Returns whether all sums before this one have had this rank's slice summed."""
        return self._number == self._sums.num_summed + 1

    def _turn(self) -> Turn:
        """Returns the description of what this sum waits for: the peers' wholes, then their summed slices."""
        sums = self._sums
        offers = sums.slices if sums.wholes.is_offered(self._number) else sums.wholes
        return offers.turn(self._number, self._what)

    def _wait_until(self, is_true: Callable[[], bool], late: Callable[[], int], turn: Callable[[], Turn]) -> None:
        """Waits for `is_true()`, and moves all sums on meanwhile, so that peers need not wait until this rank comes to theirs.

        late: returns a peer for which that waits. turn: describes the wait. Ranks may wait for their sums in different orders.
        The time limit is that of a wait in which none of them moves.
        """
        while not is_true():
            self._sums.wholes.connection.wait_until(lambda: self._sums.advance() or is_true(), late, turn())

    def _may_gather(self) -> bool:
        """Returns whether the peers have read this rank's whole, which may then be overwritten, and have
        summed their slices.
        """
        return self._sums.wholes.is_read(self._number) and self._sums.slices.is_offered(self._number)

    def _late_summer(self) -> int:
        """Returns a peer that has not read its slice of this rank's whole; where all have, one whose sum is not offered."""
        if not self._sums.wholes.is_read(self._number):
            return self._sums.wholes.late_reader(self._number)
        return self._sums.slices.late_offerer(self._number)

    def _sum(self) -> None:
        """Sums this rank's slice from all peers' memory in place, offers the sum, and tells the peers that theirs was read."""
        wholes = self._sums.wholes
        own = self._slices[wholes.coord]
        starts = [wholes.wait_table(peer, self._number, self._what)[0] + self._first for peer in wholes.peers]
        add_from(wholes, own, starts, self._what)
        self._is_summed = True
        self._sums.num_summed += 1
        # There is room: the sum of RING before ended when this one's whole was offered.
        # The mark of the whole: slices are cut alike, but the last may be shorter.
        number = self._sums.slices.offer([own], self._mark)
        assert number == self._number, f"offer {number} of slices for sum {self._number}"
        for peer in wholes.peers:
            wholes.done(peer, self._number, self._what)

    def _gather(self) -> None:
        """Reads the peers' summed slices into place; this rank then holds the full sum."""
        slices = self._sums.slices
        for peer in slices.peers:
            here = span(self._slices[peer])
            (address,) = slices.wait_table(peer, self._number, self._what)
            slices.read(peer, [here], [MemorySpan(address, here.num_bytes)], self._what)
            slices.done(peer, self._number, self._what)
        self._is_whole = True
        self._sums.unfinished.remove(self)

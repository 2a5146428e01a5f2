"""Says what every transport does: gathers and reduces shards of rows, swaps rows, sums tensors.

    all_gather   rank 0: a0      a0 a1    reduce_scatter   rank 0: a0 a1   a0 + b0    all_to_all   rank 0: a0 a1   a0 b0
                 rank 1:    a1   a0 a1                     rank 1: b0 b1   a1 + b1                 rank 1: b0 b1   a1 b1

    Direct    gloo, on the CPU    every rank sends to every other
    Backend   NCCL; gloo on CUDA  the backend's own collectives
    CMA       CPUs of one host    ranks read each other's memory (cross-memory attach)
    Alone     a group of one      the identity

A group has one transport per lane, chosen when groups are made (`backends`). All its ranks call it in one order, with as many
tensors of the same shapes, and say by `what`, in the same words, what is exchanged. `Direct` and CMA send a mark ahead, so
something else is an error on both sides; `Backend` notes what is exchanged, and ranks compare that before a step ends
(`marks`). An all-reduce of gloo or NCCL does neither.

A shard is summed on its own rank by `Direct` and CMA, own part first, then by ascending coordinate: the result depends
neither on who is late nor on which of the two carried it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.guard import Turn, guarded, turn_of
from sley_core.comm.marks import HEADER_BYTES, Mark, of_header
from sley_core.comm.progress import Members
from sley_core.errors import RunError


class Work(Protocol):
    """The handle of an exchange in progress.

        start ──> test* ──> wait ──> release ──> wait_sent

    Each may be left out, come again, or come late: `wait_sent` includes what is needed of those before it.
    """

    def test(self) -> bool:
        """Returns whether `wait` would return at once, as far as that is known. Never blocks.

        If only the ranks' own calls move the exchange, this call moves it on as far as it can without waiting.
        """

    def wait(self) -> None:
        """Returns when the result is complete (on CUDA: when this stream will see it); a second call does nothing.

        Raises RunError `collective-failed`, naming operation, group and tensors, when time ran out or a peer died, and
        `ranks-differ` where a peer exchanges something else, or ranks wait for each other.
        """

    def release(self) -> None:
        """Gives up the result: nothing writes into its memory any more, and this handle does not hold it.

        A gather that was not awaited may be left unread; any other exchange is awaited. Raises as `wait` does.
        """

    def wait_sent(self) -> None:
        """Returns when the peers have what this rank gave: inputs and outputs may be written. Raises as `wait` does."""


class Gathers(Protocol):
    """What fills whole tensors from shards: a transport, or what it has published."""

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        """Starts to fill each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...], in the order of the group.

        All are contiguous; `shards` stay as they are until `wait_sent` has returned. A shard may lie in its place already.
        """


class Published(Gathers, Protocol):
    """Tensors that stay as they are for a while, and are gathered from meanwhile, each any number of times."""

    def wait_sent(self) -> None:
        """Ends it: this rank gathers no more. Returns when no peer does either: the tensors may be written."""


class Transport(Gathers, Protocol):
    """Exchanges tensors with the other members of a group on one lane."""

    def publish(self, shards: Sequence[Tensor], *, what: str) -> Published:
        """Says that `shards`, contiguous, stay as they are from now on; returns what gathers them until its `wait_sent`.

        All ranks of the group call it, and `wait_sent`, in one order with what else runs here; one is open at a time. A
        transport for which that changes nothing gathers each time anew.
        """
        return Unpublished(self)

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns how many rows of scratch memory `reduce_scatter` needs for a shard of `num_rows`."""
        return 0

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        """Starts to sum each of `wholes` [size x n, ...] over the group; after `wait` of the result this rank's n rows hold the
        sum.

        scratches: [`num_scratch_rows(n)`, ...] of the same dtype. All are contiguous and the exchange's until `wait_sent` has
        returned, but for this rank's rows, which may be written after `wait`; the other ranks' rows of `wholes` are undefined
        then. contents: a checksum of what `what` leaves open, compared between ranks.
        """

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        """Starts an exchange: row i of `sent` [size, ...] goes to the i-th rank, row i of `received` comes from it.

        Both are contiguous, of one shape and dtype, and the exchange's until `wait_sent` has returned. contents: a checksum of
        what `what` leaves open, compared between ranks.
        """

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        """Starts to sum `tensor`, contiguous, in place over the group; it is the exchange's until `wait_sent` has returned.

        All ranks hold the same bits afterwards. contents: a checksum of what `what` leaves open, which only some transports
        compare between ranks.
        """


def put(shard: Tensor, place: Tensor) -> None:
    """Copies `shard` into `place`, of equal shape, unless it begins at the same address."""
    if shard.data_ptr() != place.data_ptr():
        place.copy_(shard)


class Unpublished(Published):
    """Gathers each time anew, where saying beforehand what stays as it is changes nothing."""

    def __init__(self, transport: Gathers) -> None:
        self._transport = transport

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return self._transport.all_gather(wholes, shards, what=what)

    def wait_sent(self) -> None:
        """Returns at once: each gather has been ended by itself."""


_HEADER_TAG = 0
"""No part has it: their tags are marks, the odds of a mark of 0 are one in 2^31."""


class Headers:
    """The headers of one exchange on `lane`, in flight since this was made; `sent` must be awaited."""

    def __init__(self, members: Members, lane: dist.ProcessGroup, mark: Mark) -> None:
        self._members = members
        self._mark = mark
        self._peers = members.peers
        self._received = torch.empty(len(self._peers), HEADER_BYTES, dtype=torch.uint8)
        own = mark.header()
        self.works = [lane.recv([row], peer, _HEADER_TAG) for row, peer in zip(self._received, self._peers, strict=True)]
        self.sent = [lane.send([own], peer, _HEADER_TAG) for peer in self._peers]

    def compare(self) -> None:
        """Raises RunError `ranks-differ` where a peer exchanges something else, or of another length."""
        for row, peer in zip(self._received, self._peers, strict=True):
            theirs = of_header(row)
            if theirs[1:] != self._mark[1:]:
                raise self._mark.differs(self._members.rank, theirs.what, self._members.ranks[peer])


class Works(Work):
    """An exchange carried by works of a process group.

    received, sent: their works. turn: what it is, for errors. finish: called once, when all was received. headers: what the
    peers say that it is.
    """

    def __init__(
        self,
        received: Sequence[Any],
        sent: Sequence[Any],
        turn: Turn,
        finish: Callable[[], None] | None = None,
        headers: Headers | None = None,
    ) -> None:
        self._received = received
        self._sent = sent
        self._turn = turn
        self._finish = finish
        self._headers = headers

    def test(self) -> bool:
        headers = [] if self._headers is None else self._headers.works
        return all(work.is_completed() for work in (*headers, *self._received))

    def wait(self) -> None:
        """Waits until everything is in its place. Compares the peers' headers first: a different exchange is an error."""
        if self._headers is not None:
            self._await(self._headers.works)
            progress = self._turn.members.progress
            progress.waits(self._turn)
            try:
                self._headers.compare()
            except RunError:
                progress.failed("differs")
                raise
            progress.waited()
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
            guarded(work.wait, self._turn)


def all_reduced(tensor: Tensor, members: Members, name: str, lane: dist.ProcessGroup, what: str) -> Work:
    """Starts the backend's all-reduce of `tensor`, in place, on `lane`, named `name`. Nothing checks what the ranks sum."""
    turn = turn_of("all-reduce", members, what, name, tensor.nbytes)
    return Works([guarded(lambda: dist.all_reduce(tensor, group=lane, async_op=True), turn)], [], turn)

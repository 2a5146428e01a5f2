"""Defines the transport protocol, which gathers and reduces shards of rows, exchanges rows, and sums tensors.

    all_gather   rank 0: a0      a0 a1    reduce_scatter   rank 0: a0 a1   a0 + b0    all_to_all   rank 0: a0 a1   a0 b0
                 rank 1:    a1   a0 a1                     rank 1: b0 b1   a1 + b1                 rank 1: b0 b1   a1 b1

    MessageTransport     gloo, on the CPU    every rank sends to every other
    CollectiveTransport  NCCL; gloo on CUDA  the backend's own collectives
    CmaTransport         CPUs of one host    ranks read each other's memory (cross-memory attach)
    SingleRankTransport  a group of one      the identity

A group has one transport per channel, chosen when groups are made (`backends`). All ranks call it in one order, with equal
numbers and shapes of tensors, and equal descriptions `label`. `MessageTransport` and CMA send a mark first, so different
exchanges raise an error on both sides. `CollectiveTransport` logs its exchanges, and ranks compare the logs before a step ends
(`marks`). An all-reduce of gloo or NCCL does neither.

`MessageTransport` and CMA sum a shard on the rank that owns it: its own part first, then the others by ascending coordinate.
The result depends neither on timing nor on the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.guard import Turn, begin_turn, run_guarded
from sley_core.comm.marks import HEADER_BYTES, Mark, mark_from_header
from sley_core.comm.progress import Members
from sley_core.errors import RunError


class Work:
    """The handle of an exchange in progress; this class is that of a completed one.

        start ──> test* ──> wait ──> release ──> wait_sent

    Each call may be left out, repeated or late: `wait_sent` includes the calls before it. All but `is_completed` raise RunError
    `collective-failed`, naming operation, group and tensors, after a timeout or if a peer died, and `ranks-differ` if a peer's
    exchange differs.
    """

    def is_completed(self) -> bool:
        """Returns whether `wait` is known to return at once, without blocking; progresses the exchange if only calls do."""
        return True

    def wait(self) -> None:
        """Waits until the result is complete, on CUDA for later work on this stream; a second call does nothing."""

    def release(self) -> None:
        """Drops the result: afterwards nothing writes into its memory, and this handle does not refer to it. Waits for the
        exchange, except for a gather that can be left unread.
        """

    def wait_sent(self) -> None:
        """Waits until the peers have this rank's inputs, so that inputs and outputs may be written."""


class Published(Protocol):
    """Shards that are constant until `wait_sent`, and can be gathered any number of times."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Starts to gather the ranks' `shards` [n, ...] into `tensors` [size x n, ...], in the order of the group. A shard may
        be a view of its full tensor, and may not be written until `wait_sent` has returned.
        """

    def wait_sent(self) -> None:
        """Ends the publication; waits until no peer gathers any more, so that the shards may be written."""


class Transport(Published, Protocol):
    """Exchanges tensors with the other members of a group on one channel. All tensors are contiguous, and may not be used until
    `wait_sent` has returned. contents: a checksum of additional content, compared between ranks.
    """

    def publish(self, shards: Sequence[Tensor], *, label: str) -> Published:
        """Publishes `shards`, which are constant until `wait_sent` of the result; by default, each gather is an ordinary
        exchange. All ranks call this and `wait_sent` in one order with their other exchanges; one publication is open at a
        time.
        """
        return self

    def wait_sent(self) -> None:
        """Returns at once: each gather has its own handle."""
        return

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns how many rows of scratch memory `reduce_scatter` needs for a shard of `num_rows`."""
        return 0

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        """Starts to sum each of `tensors` [size x n, ...] over the group; after `wait` this rank's n rows hold the sum, and may
        be written. The other ranks' rows of `tensors` are undefined then. scratches: [`num_scratch_rows(n)`, ...] of the same
        dtype.
        """

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        """Starts to exchange rows: row i of `sent` [size, ...] goes to the i-th rank, row i of `received` comes from it."""

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        """Starts to sum `tensor` over the group in place, to the same bits on all ranks; only some transports compare marks."""


def copy_shard(shard: Tensor, target: Tensor) -> None:
    """Copies `shard` into `target`, of equal shape, unless both begin at the same address."""
    if shard.data_ptr() != target.data_ptr():
        target.copy_(shard)


_HEADER_TAG = 0
"""The tag of headers. The tags of parts are marks, which equal it with a probability of 2^-31."""


class Headers:
    """The headers of one exchange on `channel`, in flight from the construction on. The caller waits for `sent`."""

    def __init__(self, members: Members, channel: dist.ProcessGroup, mark: Mark) -> None:
        self._members = members
        self._mark = mark
        self._peers = members.peers
        self._received = torch.empty(len(self._peers), HEADER_BYTES, dtype=torch.uint8)
        header = mark.header()
        self.works = [channel.recv([row], peer, _HEADER_TAG) for row, peer in zip(self._received, self._peers, strict=True)]
        self.sent = [channel.send([header], peer, _HEADER_TAG) for peer in self._peers]

    def compare(self) -> None:
        """Raises RunError `ranks-differ` if a peer's mark differs."""
        for row, peer in zip(self._received, self._peers, strict=True):
            peer_mark = mark_from_header(row)
            if peer_mark[1:] != self._mark[1:]:
                raise self._mark.mismatch_error(self._members.rank, peer_mark.label, self._members.ranks[peer])


@dataclass(eq=False)
class GroupWork(Work):
    """An exchange carried by works of a process group, or a simulated one without works.

    _received, _sent: the works of receives and sends. _turn: the exchange, for errors. _finish: called once, after the last
    receive. _headers: the peers' headers, to compare.
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


def start_all_reduce(tensor: Tensor, members: Members, name: str, channel: dist.ProcessGroup, label: str) -> Work:
    """Starts the backend's all-reduce of `tensor`, in place, on `channel`, named `name`. The ranks' marks are not compared."""
    turn = begin_turn("all-reduce", members, label, name, tensor.nbytes)
    return GroupWork([run_guarded(lambda: dist.all_reduce(tensor, group=channel, async_op=True), turn)], [], turn)

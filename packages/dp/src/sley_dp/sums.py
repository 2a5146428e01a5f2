"""Sums buckets of gradients over their reduce group: exactly, in bf16, or so that each rank keeps a part.

    Exact       all-reduce in place
    Narrow      all-to-all of bf16 slices ──added in fp32──> bf16 ──> all-gather of the sums
    ShardSums   reduce-scatter over the ranks that share a copy ──> all-reduce over those that hold the same part

An all-reduce of bf16 tensors, which gloo and NCCL also offer, adds in bf16: every rank rounds once more, and a sum stops
growing after 256 equal terms. `Narrow` rounds each term once and the sum once, however many ranks there are, for the same bytes
sent, and all ranks hold the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Pending, all_gather, all_to_all
from sley_core.api.parts import Sums, round_up
from sley_dp.config import SUMS, copies_axis

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Groups, SentBytes, Transport, Work
    from sley_core.api.parts import GradientBuffer

WIRE = torch.bfloat16
MAX_ACTIVE = 2
"""Sums in flight at a time if they need scratch memory: while one is gathered, the next is exchanged."""


class Exact(Sums):
    """All-reduces in place, in the gradients' dtype, by the transport of the group."""

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._works: list[Work] = []
        self._moving: list[Work] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        # Over the bucket's reduce group, whose ranks start their buckets in one order.
        work = group.transport().all_reduce(buffer.data, what=described(buffer), contents=buffer.contents)
        self.sent.add(buffer.data, group, passes=2)
        self._works.append(work)
        self._moving = [other for other in (*self._moving, work) if not other.test()]

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for work in self._works:
            work.wait_sent()
        self._works.clear()
        self._moving.clear()

    def forget(self) -> None:
        self.finish()


class Narrow(Sums):
    """Sums in bf16 on the wire; advances earlier sums in an order that is equal on all ranks of their groups."""

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._active: deque[_NarrowSum] = deque()
        self._scratches = [torch.empty(0, dtype=WIRE)] * MAX_ACTIVE
        self._num_started = 0

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Copies `buffer` to bf16 and starts its exchange; first waits for the oldest sum if MAX_ACTIVE are in flight."""
        if len(self._active) == MAX_ACTIVE:
            self._active.popleft().finish()
        for earlier in self._active:
            earlier.gather()
        started = _NarrowSum(buffer, group, self._wire(buffer, group))
        self.sent.add(started.sent, group, passes=2)  # an all-to-all and an all-gather
        self._active.append(started)

    def finish(self) -> None:
        for active in self._active:
            active.gather()
        while self._active:
            self._active.popleft().finish()

    def forget(self) -> None:
        while self._active:
            self._active.popleft().pending.wait()

    def trim(self) -> int:
        num_bytes = sum(scratch.nbytes for scratch in self._scratches)
        self._scratches = [torch.empty(0, dtype=WIRE)] * MAX_ACTIVE
        return num_bytes

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of the send and receive buffers."""
        yield from ((f"wire.{at}", scratch) for at, scratch in enumerate(self._scratches))

    def _wire(self, buffer: GradientBuffer, group: Group) -> Tensor:
        """Returns rows to send and to receive, in memory that is used in turn, with room for one even slice per rank."""
        at = self._num_started % MAX_ACTIVE
        self._num_started += 1
        num_columns = round_up(buffer.data.numel(), group.size)
        if self._scratches[at].numel() < 2 * num_columns:
            self._scratches[at] = torch.zeros(2 * num_columns, dtype=WIRE, device=buffer.data.device)
        return self._scratches[at][: 2 * num_columns].view(2, num_columns)


class _NarrowSum:
    """Sums one bucket: the exchange starts when it is made; `gather` and `finish` follow. wire: bf16 [2, columns]."""

    def __init__(self, buffer: GradientBuffer, group: Group, wire: Tensor) -> None:
        self.buffer = buffer
        self.group = group
        self.sent, self.received = wire
        self.sent[: buffer.data.numel()].copy_(buffer.data)
        self._is_gathered = False
        # Over the bucket's reduce group, whose ranks start their buckets in one order.
        self.pending: Pending = all_to_all(self.received, self.sent, group, what=described(buffer))

    def gather(self) -> None:
        """Waits for the exchange, adds this rank's slice in fp32 and starts the all-gather; a second call does nothing."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self.pending.wait()
        wide = torch.promote_types(self.buffer.data.dtype, torch.float32)
        own = self.received.view(self.group.size, -1).sum(0, dtype=wide).to(WIRE)  # [columns / ranks]
        # Over the same group; all its ranks get here between the same two starts, or after the last start.
        self.pending = all_gather(self.sent, own, self.group, what=described(self.buffer))

    def finish(self) -> None:
        """Waits for the all-gather and writes the sum into the buffer."""
        self.pending.wait()
        self.buffer.data.copy_(self.sent[: self.buffer.data.numel()])


class ShardSums(Sums):
    """Sums cut buffers over the ranks that share a copy, each into this rank's part of it.

    is_async: whether the device runs ahead of the host. Then second halves start in `finish`, at one place on all ranks.
    """

    def __init__(self, groups: Groups, *, is_async: bool) -> None:
        self._groups = groups
        self._is_async = is_async
        self._sums: list[_ShardSum] = []
        self._scratches: list[tuple[Tensor, _ShardSum]] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`; from now on only this rank's part of it is defined. group: the ranks that share a copy."""
        transport = group.transport(SUMS)
        copies = self._groups.get(copies_axis(buffer.reduce_group))
        scratch = self._scratch(buffer, transport.num_scratch_rows(buffer.own.numel()))
        # Over the ranks that share a copy, on a separate lane; they start their buckets in one order.
        work = transport.reduce_scatter([buffer.data], [scratch], what=described(buffer), contents=buffer.contents)
        self._sums.append(_ShardSum(buffer, work, copies.transport if copies else None))
        if scratch.numel():
            self._scratches.append((scratch, self._sums[-1]))
        if not self._is_async:
            # The oldest first, up to one whose second half may not start yet: these start in one order on all ranks.
            all(active.advance() for active in self._sums)

    def finish(self) -> None:
        """Blocks until this rank's part of every started buffer holds the sum, and its padding zeros."""
        for active in self._sums:
            active.reduce_copies()
        for active in self._sums:
            active.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for active in self._sums:
            active.wait_sent()
        self._sums.clear()
        self._scratches.clear()

    def forget(self) -> None:
        self.finish()

    def _scratch(self, like: GradientBuffer, numel: int) -> Tensor:
        """Returns `numel` elements of the dtype of `like`, for data from peers. If MAX_ACTIVE sums in flight have some, waits
        for the oldest of these and takes over its memory if that is large enough.
        """
        if numel and len(self._scratches) == MAX_ACTIVE:
            scratch, oldest = self._scratches.pop(0)
            for active in self._sums[: self._sums.index(oldest) + 1]:
                active.reduce_copies()
            oldest.scatter.wait_sent()
            if scratch.numel() >= numel:
                return scratch[:numel]
        return torch.empty(numel, dtype=like.data.dtype, device=like.data.device)


class _ShardSum:
    """Sums one bucket: a reduce-scatter, then an all-reduce over `copies`, the ranks that hold the same part, if there are
    others.
    """

    def __init__(self, buffer: GradientBuffer, scatter: Work, copies: Callable[[], Transport] | None) -> None:
        self.buffer = buffer
        self.scatter = scatter
        self._copies = copies
        self._reduction: Work | None = None
        self._is_scattered = False

    def advance(self) -> bool:
        """Advances without waiting; returns whether the second half has begun, so that the next sum's may."""
        if not self._is_scattered and self.scatter.test():
            self.reduce_copies()
        if self._reduction is not None:
            self._reduction.test()
        return self._is_scattered

    def reduce_copies(self) -> None:
        """Waits for the reduce-scatter and starts the all-reduce of this rank's part, if one is needed."""
        if self._is_scattered:
            return
        self._is_scattered = True
        self.scatter.wait()
        if self._copies is not None:
            buffer = self.buffer
            # Over the ranks that hold the same part; they get here in the order in which the buckets were started.
            self._reduction = self._copies().all_reduce(buffer.own, what=described(buffer), contents=buffer.contents)

    def wait(self) -> None:
        """Blocks until this rank's part holds the sum."""
        if self._reduction is not None:
            self._reduction.wait()
        self.buffer.zero_padding()

    def wait_sent(self) -> None:
        """Blocks until peers have read this rank's data."""
        self.scatter.wait_sent()
        if self._reduction is not None:
            self._reduction.wait_sent()


def described(buffer: GradientBuffer) -> str:
    """Returns the name of a bucket for the error of a failed collective."""
    return f"the bucket of {buffer.params[0].name}"

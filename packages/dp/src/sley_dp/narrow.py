"""Sums that are sent as bf16 and added in fp32.

    my slices ──all-to-all──> every rank's share of my slice ──added in fp32──> bf16 ──all-gather──> the full sum

An all-reduce of bf16 tensors, which gloo and NCCL also offer, adds in bf16: every rank rounds once more, and a sum stops
growing after 256 equal terms. Here each term is rounded once and the sum once, however many ranks there are, for the same bytes
sent; and all ranks hold the same bits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Pending, all_gather, all_to_all
from sley_core.api.parts import Sums
from sley_dp.bucketed import described

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sley_core.api.comm import Group, SentBytes
    from sley_core.api.parts import GradientBuffer

WIRE = torch.bfloat16
MAX_UNDER_WAY = 2
"""Sums in flight at a time: while one is gathered, the next is exchanged. This bounds the copies of gradients."""


class Narrow(Sums):
    """Sums in bf16 on the wire.

    Each start advances the earlier sums, in an order that is equal on all ranks of their groups.
    """

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._under_way: deque[_NarrowSum] = deque()
        self._slots = [torch.empty(0, dtype=WIRE)] * MAX_UNDER_WAY
        self._num_started = 0

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Copies `buffer` to bf16 and starts its exchange; waits for the oldest sum if MAX_UNDER_WAY are in flight."""
        if len(self._under_way) == MAX_UNDER_WAY:
            self._under_way.popleft().finish()
        for one in self._under_way:
            one.gather()
        started = _NarrowSum(buffer, group, self._wire(buffer, group))
        self.sent.add(started.sent, group, passes=2)  # an all-to-all and an all-gather
        self._under_way.append(started)

    def finish(self) -> None:
        """Blocks until every started buffer holds its sum."""
        for one in self._under_way:
            one.gather()
        while self._under_way:
            self._under_way.popleft().finish()

    def forget(self) -> None:
        """Waits for the collectives in flight and discards their results."""
        while self._under_way:
            self._under_way.popleft().pending.wait()

    def trim(self) -> int:
        """Frees the send and receive buffers; returns their bytes."""
        num_bytes = sum(slot.nbytes for slot in self._slots)
        self._slots = [torch.empty(0, dtype=WIRE)] * MAX_UNDER_WAY
        return num_bytes

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the send and receive buffers."""
        yield from ((f"wire.{at}", slot) for at, slot in enumerate(self._slots))

    def _wire(self, buffer: GradientBuffer, group: Group) -> Tensor:
        """Returns bf16 [2, columns]: rows to send and to receive, with room for one even slice per rank.

        Reuses slots in turn.
        """
        slot = self._num_started % MAX_UNDER_WAY
        self._num_started += 1
        num_columns = -(-buffer.data.numel() // group.size) * group.size
        if self._slots[slot].numel() < 2 * num_columns:
            self._slots[slot] = torch.zeros(2 * num_columns, dtype=WIRE, device=buffer.data.device)
        return self._slots[slot][: 2 * num_columns].view(2, num_columns)


class _NarrowSum:
    """Sums one bucket: the exchange starts when it is made; `gather` and `finish` follow."""

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
        own = self.received.view(self.group.size, -1).sum(0, dtype=wide).to(WIRE)
        # Over the same group; all its ranks get here between the same two starts, or after the last start.
        self.pending = all_gather(self.sent, own, self.group, what=described(self.buffer))

    def finish(self) -> None:
        """Waits for the all-gather and writes the sum into the buffer."""
        self.pending.wait()
        self.buffer.data.copy_(self.sent[: self.buffer.data.numel()])

"""Sums gradients over ranks in the order of the tree over microbatches.

    rows of each rank ──all-to-all──> all ranks' rows of my part ──added──> the sum of my part ──all-gather──> the whole sum

An all-reduce cannot be used, since the order in which a backend adds depends on the number of ranks and on the position in the
buffer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.engine.canonical.tree import CanonicalReduction, Node, PartialSums, sum_uses
from sley_core.engine.reduction import Sums

if TYPE_CHECKING:
    from sley_core.comm.group import Group
    from sley_core.comm.progress import SentBytes
    from sley_core.comm.transport import Work
    from sley_core.engine.buffers import GradientBuffer
    from sley_core.engine.gradients import GradientStore

MAX_IN_FLIGHT = 2
"""The number of sums in flight at a time: while one is gathered, the next is exchanged. It bounds the copies of gradients."""


class TreeSums(Sums):
    """Sums buffers of `store` over their groups, or this rank's part of a sharded buffer. Each start advances the earlier sums,
    in the same order on all ranks of their groups. sent: the counter of sent bytes. channel: the channel of the groups.
    """

    def __init__(self, reduction: CanonicalReduction, store: GradientStore, sent: SentBytes, channel: str) -> None:
        self._reduction = reduction
        self._store = store
        self._sent = sent
        self._channel = channel
        self._in_flight: deque[_TreeSum] = deque()

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, not to be used until `finish`. Ends the oldest sum if MAX_IN_FLIGHT are in flight."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._in_flight.popleft().finish()
        for exchange in self._in_flight:
            exchange.sum_rows()
        self._in_flight.append(_TreeSum(self._reduction, self._store, buffer, group, self._sent, self._channel))

    def finish(self) -> None:
        for exchange in self._in_flight:
            exchange.sum_rows()
        while self._in_flight:
            self._in_flight.popleft().finish()

    def discard(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().work.wait_sent()


class _TreeSum:
    """Sums one buffer. The constructor starts the exchange; `sum_rows` and `finish` follow."""

    def __init__(
        self,
        reduction: CanonicalReduction,
        store: GradientStore,
        buffer: GradientBuffer,
        group: Group,
        sent: SentBytes,
        channel: str,
    ) -> None:
        self.buffer = buffer
        self.group = group
        self._sent = sent
        self._channel = channel
        self._num_leaves = reduction.num_leaves
        self._nodes = [reduction.nodes(buffer.reduce_group, coord) for coord in range(group.size)]
        self._num_uses = buffer.params[0].num_sums
        self._outgoing_rows = _pack_sums(store, buffer, self._num_uses, max(map(len, self._nodes)), group.size)
        self._incoming_rows = self._outgoing_rows.new_empty(self._outgoing_rows.shape)
        self._gathered: Tensor | None = None
        self._is_summed = False
        # The buffer's reduce group; its ranks start their buckets in one order.
        self.work: Work = group.transport(channel).all_to_all(
            self._incoming_rows, self._outgoing_rows, label=f"the sums of {buffer.params[0].name}", contents=buffer.contents
        )
        sent.add(self._outgoing_rows, group, passes=1)

    def sum_rows(self) -> None:
        """Waits for the exchange, adds the rows in the tree's order, and starts to gather the sum of an unsharded buffer."""
        if self._is_summed:
            return
        self._is_summed = True
        self.work.wait()
        num_rows = self._incoming_rows.shape[1] // self._num_uses
        sums = PartialSums(self._num_leaves)
        for coord, nodes in enumerate(self._nodes):
            for use in range(self._num_uses):
                for row, node in enumerate(nodes):
                    sums.put(use, node, self._incoming_rows[coord, use * num_rows + row])
        root = Node(0, self._num_leaves)
        local_sum = sum_uses([sums.pop(use, root, self._incoming_rows[0, 0]) for use in range(self._num_uses)])
        if self.buffer.shard is not None:
            self.buffer.local_part.copy_(local_sum)
            self.buffer.zero_padding()
            return
        self.work.wait_sent()
        self._gathered = self._outgoing_rows.view(-1)[: self.group.size * local_sum.numel()]
        # Over the same group; all its ranks start it between the same two starts, or after the last start.
        self.work = self.group.transport(self._channel).all_gather(
            [self._gathered], [local_sum], label=f"the sum of {self.buffer.params[0].name}"
        )
        self._sent.add(self._gathered, self.group, passes=1)

    def finish(self) -> None:
        """Waits for the all-gather and writes the sum into the buffer."""
        self.sum_rows()
        self.work.wait()
        if self._gathered is not None and self._gathered.data_ptr() != self.buffer.data.data_ptr():
            self.buffer.data.copy_(self._gathered[: self.buffer.data.numel()])
        self.work.wait_sent()


def _pack_sums(store: GradientStore, buffer: GradientBuffer, num_uses: int, num_rows: int, size: int) -> Tensor:
    """Returns each rank's part of this rank's sums: [size, uses x rows, columns]. Rows of other ranks' nodes are zeros.

    Drops the sums' memory. Returns a view of the buffer itself if each rank has one row and the buffer divides; then the other
    ranks' parts of it may only be read until the exchange is done.
    """
    numel = buffer.data.numel()
    if num_uses * num_rows == 1 and numel % size == 0:
        return buffer.data.view(size, 1, -1)
    num_columns = -(-numel // size)
    packed = buffer.data.new_zeros(size, num_uses * num_rows, num_columns)
    flat = buffer.data.new_zeros(size * num_columns)
    partial = [store.partial_sums(param) for param in buffer.params]
    num_per_use = len(partial[0]) // num_uses
    for index in range(len(partial[0])):
        if index == 0:
            flat[:numel].copy_(buffer.data)
        else:
            for rows, start in zip(partial, buffer.offsets, strict=True):
                flat[start : start + rows[index].numel()].copy_(rows[index].reshape(-1))
        packed[:, index // num_per_use * num_rows + index % num_per_use].copy_(flat.view(size, num_columns))
    for rows in partial:
        del rows[1:]
    return packed

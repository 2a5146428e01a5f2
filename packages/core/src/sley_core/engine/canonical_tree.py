"""Sums microbatches in a fixed tree over their numbers in the global batch.

    [0,7)                                       A node of two leaves or more is split at the largest power of two below its
     ├── [0,4)                                  length: for 2^n leaves the perfect tree, else perfect trees side by side,
     │    ├── [0,2) ── 0, 1                     the largest first, joined from the right.
     │    └── [2,4) ── 2, 3
     └── [4,7)                                  rank 0 of 2 has 0 to 3:  [0,4)
          ├── [4,6) ── 4, 5                     rank 1 has 4 to 6:       [4,7)
          └── 6                                 three ranks with 0-2, 3-4, 5-6:      [0,2) 2 | 3 4 | 5 6

Any division of the leaves into runs gives nodes that add up to the same root. The maximal nodes of a run are nodes inside it
whose parents are not. They are disjoint and cover the run. Adding siblings until one node is left performs exactly the
additions of the tree, whatever the order of the nodes: the operands of each addition are fixed, and a + b equals b + a bit for
bit. A run has at most 2 log2(n) + 1 maximal nodes: each of its borders splits one node per level, which has at most one child
inside the run. If leaves come in order, at most one sum per level is stored at a time, like the digits of a binary counter.

An accumulator sums each microbatch of a gradient separately:

    contributions of a microbatch ──> leaf ──> partial sums, added ──> settle ──> rows, one per node of this rank's run
                                        └ closed when another begins                 └ a reducer adds up all ranks' rows

The rows of all ranks are added in the order of the same tree:

    rows of each rank ──all-to-all──> all ranks' rows of my part ──added──> the sum of my part ──all-gather──> the whole sum

An all-reduce cannot be used, since the order in which a backend adds depends on the number of ranks and on the position in the
buffer.
"""

from __future__ import annotations

from collections import deque
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sley_core.engine.reduction import Sums

if TYPE_CHECKING:
    from sley_core.comm.exchanges import SentBytes
    from sley_core.comm.transport import Work
    from sley_core.comm.world import Group
    from sley_core.engine.buffers import GradientBuffer
    from sley_core.engine.canonical import CanonicalReduction
    from sley_core.engine.gradients import GradientStore


class SumNode(NamedTuple):
    """A node of the tree: the sum of the microbatches from `first` up to, but not including, `last`."""

    first: int
    last: int

    @property
    def children(self) -> tuple[SumNode, SumNode]:
        """Returns the two nodes whose sum is this node, which must not be a leaf."""
        length = self.last - self.first
        assert length > 1, f"{self} is a leaf"
        middle = self.first + (1 << ((length - 1).bit_length() - 1))
        return SumNode(self.first, middle), SumNode(middle, self.last)


def sibling(node: SumNode, num_leaves: int) -> SumNode | None:
    """Returns the node that is added to `node` in the tree with `num_leaves` leaves, or None for the root."""
    first, last = node
    length = last - first
    if last < num_leaves and not first & length:
        return SumNode(last, min(last + length, num_leaves))
    return SumNode(first - (first & -first), first) if first else None


def parent(node: SumNode, other: SumNode) -> SumNode:
    """Returns the parent of the siblings `node` and `other`, which may be passed in any order."""
    return SumNode(min(node.first, other.first), max(node.last, other.last))


def covering_nodes(first: int, last: int, num_leaves: int) -> list[SumNode]:
    """Returns the shortest ordered list of nodes that covers the leaves from `first` up to, but not including, `last`."""
    nodes: list[SumNode] = []
    while first < last:
        node = SumNode(first, first + 1)
        while (other := sibling(node, num_leaves)) is not None and node.last == other.first and other.last <= last:
            node = parent(node, other)
        nodes.append(node)
        first = node.last
    return nodes


def leaf_range(coord: int, size: int, num_leaves: int) -> tuple[int, int]:
    """Returns the half-open range of the leaves of rank `coord` in a group of `size` ranks that divide all leaves equally."""
    assert num_leaves % size == 0, f"{num_leaves} microbatches over {size} ranks"
    size_per_rank = num_leaves // size
    return coord * size_per_rank, (coord + 1) * size_per_rank


class SumMemory:
    """Allocates and reuses the memory of partial sums within one step. created: all tensors allocated since the last `clear`.
    unused: the tensors that may be reused, by shape and dtype.
    """

    def __init__(self) -> None:
        self.unused: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.created: list[Tensor] = []

    def allocate(self, like: Tensor) -> Tensor:
        """Returns memory for one more sum, of the shape and dtype of `like`, with arbitrary contents."""
        if unused := self.unused.get((like.shape, like.dtype)):
            return unused.pop()
        memory = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.created.append(memory)
        return memory

    def clear(self) -> None:
        """Drops all tensors, so that the next step allocates new ones."""
        self.unused.clear()
        self.created.clear()


class PartialSums:
    """Adds up the contributions to one gradient, as far as the tree with `num_leaves` leaves permits, separately for each use
    of the parameter. sum_memory: receives the memory of operands that are no longer needed; None drops it. target: if this
    tensor is an operand of an addition, it receives the sum.
    """

    def __init__(self, num_leaves: int, sum_memory: SumMemory | None = None, target: Tensor | None = None) -> None:
        self.num_leaves = num_leaves
        self.sum_memory = sum_memory
        self.target = target
        self._sums_by_node: dict[tuple[int, SumNode], Tensor] = {}

    @property
    def nodes(self) -> list[tuple[int, SumNode]]:
        """Returns the (parameter use, node) pairs of the stored sums."""
        return sorted(self._sums_by_node)

    def put(self, use: int, node: SumNode, value: Tensor) -> None:
        """Stores `value`, the sum of `node`, and takes over its memory. Adds up siblings as soon as both sums are stored."""
        while (other := sibling(node, self.num_leaves)) is not None and (use, other) in self._sums_by_node:
            value = self._add_pair(self._sums_by_node.pop((use, other)), value)
            node = parent(node, other)
        assert (use, node) not in self._sums_by_node, f"{node} came twice"
        self._sums_by_node[use, node] = value

    def pop(self, use: int, node: SumNode, like: Tensor) -> Tensor:
        """Removes and returns the sum of `node`. Counts microbatches without contributions as zeros of the shape of `like`."""
        if (use, node) in self._sums_by_node:
            return self._sums_by_node.pop((use, node))
        stored_nodes = [stored for stored_use, stored in self._sums_by_node if stored_use == use]
        if not any(node.first <= stored.first and stored.last <= node.last for stored in stored_nodes):
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        left, right = node.children
        return self._add_pair(self.pop(use, left, like), self.pop(use, right, like))

    def _add_pair(self, total: Tensor, other: Tensor) -> Tensor:
        """Adds one tensor to the other in place, to `target` if it is one of them, and returns the sum. `sum_memory` gets the
        memory of the other tensor.
        """
        if other is self.target:
            total, other = other, total
        total.add_(other)
        if self.sum_memory is not None:
            self.sum_memory.unused.setdefault((other.shape, other.dtype), []).append(other)
        return total


def sum_uses(sums: list[Tensor]) -> Tensor:
    """Adds the sums of a parameter's uses, in layer order, into the first sum, and returns the first sum."""
    return reduce(Tensor.add_, sums)


MAX_IN_FLIGHT = 2
"""The maximum number of buffers summed at a time. While one sum is gathered, the next buffer's rows are exchanged."""


class TreeSums(Sums):
    """Sums buffers of `store` over their groups. If a buffer is sharded, sums only this rank's part. Each `start` advances the
    earlier sums, in the same order on all ranks of their groups.
    """

    def __init__(self, reduction: CanonicalReduction, store: GradientStore, sent: SentBytes, channel: str) -> None:
        self.reduction, self.store, self.sent, self.channel = reduction, store, sent, channel
        self._in_flight: deque[_TreeSum] = deque()

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, which must not be used until `finish`. May first end the oldest sum in flight."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._in_flight.popleft().finish()
        for exchange in self._in_flight:
            exchange.sum_rows()
        self._in_flight.append(_TreeSum(self, buffer, group))

    def finish(self) -> None:
        for exchange in self._in_flight:
            exchange.sum_rows()
        while self._in_flight:
            self._in_flight.popleft().finish()

    def discard(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().work.wait_sent()


class _TreeSum:
    """Sums one buffer over its group. The constructor starts the exchange of rows; call `sum_rows` and `finish` afterwards."""

    def __init__(self, sums: TreeSums, buffer: GradientBuffer, group: Group) -> None:
        self.buffer = buffer
        self._sent = sums.sent
        self._transport = group.transport(sums.channel)
        self._group = group
        self._num_leaves = sums.reduction.num_leaves
        self._nodes = [sums.reduction.nodes(buffer.reduce_group, coord) for coord in range(group.size)]
        self._num_uses = buffer.params[0].num_sums
        self._outgoing_rows = _pack_sums(sums.store, buffer, self._num_uses, max(map(len, self._nodes)), group.size)
        self._incoming_rows = self._outgoing_rows.new_empty(self._outgoing_rows.shape)
        self._gathered: Tensor | None = None
        self._is_summed = False
        # All ranks of the buffer's reduce group start this collective, in the same order of buffers.
        rows, label = (self._incoming_rows, self._outgoing_rows), f"the sums of {buffer.params[0].name}"
        self.work: Work = self._transport.all_to_all(*rows, label=label, checksum=buffer.checksum)
        self._sent.add(self._outgoing_rows, group, passes=1)

    def sum_rows(self) -> None:
        """Waits for the exchange, and adds rows in the order of the tree. Gathers the sum if the buffer is not sharded."""
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
        root = SumNode(0, self._num_leaves)
        local_sum = sum_uses([sums.pop(use, root, self._incoming_rows[0, 0]) for use in range(self._num_uses)])
        if self.buffer.shard is not None:
            self.buffer.local_part.copy_(local_sum)
            self.buffer.zero_padding()
            return
        self.work.wait_sent()
        self._gathered = self._outgoing_rows.view(-1)[: self._group.size * local_sum.numel()]
        # All ranks of this group start this collective between the same two calls of `start`, or after the last call.
        label = f"the sum of {self.buffer.params[0].name}"
        self.work = self._transport.all_gather([self._gathered], [local_sum], label=label)
        self._sent.add(self._gathered, self._group, passes=1)

    def finish(self) -> None:
        """Waits for the gather, if any, and writes the sum into the buffer."""
        self.sum_rows()
        self.work.wait()
        if self._gathered is not None and self._gathered.data_ptr() != self.buffer.data.data_ptr():
            self.buffer.data.copy_(self._gathered[: self.buffer.data.numel()])
        self.work.wait_sent()


def _pack_sums(store: GradientStore, buffer: GradientBuffer, num_uses: int, num_rows: int, size: int) -> Tensor:
    """Returns this rank's partial sums, divided into a part for each rank: [size, num_uses x num_rows, columns]. Unused rows
    are zeros. Removes all partial sums from `store` except the first ones, which are in the buffer. If each rank has one row
    and the buffer divides evenly, returns a view of the buffer, which must not be written until the exchange is done.
    """
    numel = buffer.data.numel()
    if num_uses * num_rows == 1 and numel % size == 0:
        return buffer.data.view(size, 1, -1)
    num_columns = -(-numel // size)
    packed = buffer.data.new_zeros(size, num_uses * num_rows, num_columns)
    flat = buffer.data.new_zeros(size * num_columns)
    flat[:numel].copy_(buffer.data)  # the first sums
    sums = [store.partial_sums(param) for param in buffer.params]
    num_per_use = len(sums[0]) // num_uses
    for index in range(len(sums[0])):
        for rows, start in zip(sums if index else (), buffer.offsets, strict=False):
            flat[start : start + rows[index].numel()].copy_(rows[index].reshape(-1))
        packed[:, index // num_per_use * num_rows + index % num_per_use].copy_(flat.view(size, num_columns))
    for rows in sums:
        del rows[1:]
    return packed

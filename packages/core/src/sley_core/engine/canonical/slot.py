"""The gradient of one entry, summed in a fixed tree over micro-batches.

contributions of a micro-batch ──> leaf ──> partial sums, added ──> settle ──> rows, one per node of this rank's run
                                    └ closed when another begins                 └ a reducer adds up those of all ranks
"""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.engine.book import Entry
from sley_core.engine.canonical.order import Arrival, CanonicalOrder
from sley_core.engine.canonical.partial_sums import PartialSums
from sley_core.engine.canonical.tree import Node
from sley_core.engine.canonical.tree import leaf as leaf_node
from sley_core.engine.slot import Autograd, Habit, Slot, State, add_at
from sley_core.errors import RunError


class CanonicalSlot(Slot):
    """Sums the contributions of each micro-batch separately, and then adds the sums in the order of the tree; otherwise as
    `Slot`.

    The view holds the sum of the rank's first micro-batches; the others have memory of their own until they are added. rows:
    once settled, the sums for the reducer: of each use of the parameter, of each node of this rank's run; the first is the
    view. If this rank has the whole tree, the view is the complete sum.
    """

    __slots__ = ("_closed", "_fresh", "_leaf", "_sum", "_sums", "order", "rows")

    def __init__(self, entry: Entry, view: Tensor, habit: Habit, autograd: Autograd, order: CanonicalOrder) -> None:
        self.order = order
        super().__init__(entry, view, habit, autograd)

    def reset(self) -> None:
        """Begins a step: discards all partial sums."""
        super().reset()
        self._leaf: Arrival | None = None
        self._fresh = True
        self._sum = self.view
        self._sums: PartialSums | None = None
        self._closed: set[Arrival] = set()
        self.rows: list[Tensor] = []

    def enter(self, leaf: Arrival) -> None:
        """Opens the leaf of the next contribution, and closes the last. Raises RunError `canonical-again` if `leaf` was closed
        before.
        """
        if leaf == self._leaf:
            return
        self.leave()
        if leaf in self._closed:
            raise RunError(
                "canonical-again",
                f"the gradient of {self.entry.name!r} comes in pieces from micro-batch {leaf.micro}, others between them: "
                "their sum has no fixed order",
                hint='use [parallel] reduction = "fast"; or torch.utils.checkpoint with `use_reentrant=False`, and of a weight '
                'communicator `unit = "layer"` and `fused = true`',
            )
        self._leaf, self._fresh = leaf, True
        self._sum = self.view

    def take(self, gradient: Tensor) -> None:
        if self._fresh:
            self._begin().copy_(gradient)
        else:
            self._sum.add_(gradient)

    def take_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, multiplied in the factors' dtype and then added: `addmm` would round differently from `mm`."""
        if self._fresh and left.dtype == self.view.dtype:
            torch.mm(left.t(), right, out=self._begin())
        else:
            self.take(left.t() @ right)

    def take_rows(self, indices: Tensor, rows: Tensor) -> None:
        if self._fresh:
            self._begin().zero_()
        add_at(self._sum, indices, rows.to(self.view.dtype))

    def complete(self) -> None:
        """Marks the gradient complete; `settle` sums it later, since a backward within the backward may open it again."""
        self.state = State.COMPLETE

    def settle(self) -> None:
        """Makes `rows` from the partial sums. No contribution may follow."""
        self.leave()
        sums = self._new() if self._sums is None else self._sums
        order = self.order
        is_alone = order.is_alone(self.entry)
        nodes = [Node(0, order.num_leaves)] if is_alone else order.nodes(self.entry.reduce_group)
        uses = range(self.entry.num_sums)
        rows = [sums.take(use, node, self.view) for use in uses for node in nodes]
        assert not len(sums), f"{self.entry.name}: micro-batches of other ranks, {sums.nodes}"
        if rows[0] is not self.view:
            self.view.copy_(rows[0])
            rows[0] = self.view
        if is_alone:
            add_uses(rows)
            del rows[1:]
        self.rows = rows
        self._sums = None

    @property
    def _is_first(self) -> bool:
        """Whether the open leaf is this rank's first, whose sum the view holds."""
        return self._leaf is None or self._leaf == (0, self.order.first(self.entry.reduce_group))

    def _begin(self) -> Tensor:
        """Returns the memory of a new leaf, with arbitrary contents."""
        self._fresh = False
        self._sum = self.view if self._is_first else self.order.spares.lend(self.view)
        return self._sum

    def leave(self) -> None:
        """Closes the open leaf, if any, and adds it to the partial sums: no contribution to it may follow."""
        leaf, self._leaf = self._leaf, None
        if leaf is None or self._fresh:
            return
        self._closed.add(leaf)
        if self._sums is None:
            self._sums = self._new()
        self._sums.put(leaf.use, leaf_node(leaf.micro), self._sum)

    def _new(self) -> PartialSums:
        return PartialSums(self.order.num_leaves, self.order.spares, self.view)


def add_uses(sums: list[Tensor]) -> Tensor:
    """Adds the sums of a parameter's uses, in the order of the layers, into the first, and returns that."""
    first, *others = sums
    for other in others:
        first.add_(other)
    return first

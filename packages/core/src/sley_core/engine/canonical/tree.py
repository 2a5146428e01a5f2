"""The fixed tree in which micro-batches are summed, over their numbers in the global batch, and the sums of a gradient in it.

    [0,7)                                       A node of two leaves or more is split at the largest power of two below its
     ├── [0,4)                                  length: for 2^n leaves the perfect tree, else perfect trees side by side,
     │    ├── [0,2) ── 0, 1                     the largest first, joined from the right.
     │    └── [2,4) ── 2, 3
     └── [4,7)                                  rank 0 of 2 has 0 to 3:  [0,4)
          ├── [4,6) ── 4, 5                     rank 1 has 4 to 6:       [4,7)
          └── 6                                 ranks of three cuts, 0-2, 3-4, 5-6:  [0,2) 2 | 3 4 | 5 6

Any division of the leaves into runs gives nodes from which the same root is made. Each node is either inside a run, or disjoint
from it, or split by its border. Take the maximal nodes of a run: those inside it whose parent is not. They are disjoint, and
they cover the run (a leaf is a node inside it). A parent whose two children lie in different runs finds these, or the nodes
that they are made of, among the runs' nodes. So adding siblings until one node is left performs each addition of the tree once
and no other, in whatever order nodes come: the operands of an addition are fixed, and a + b is b + a bit for bit.

A run has at most 2 log2(n) + 1 maximal nodes: each border of it splits one node per level, which leaves at most one child
inside. Leaves that come in order leave one node per level open at a time, as the digits of a binary counter: log2(n) of them.

A slot sums each micro-batch of a gradient separately:

    contributions of a micro-batch ──> leaf ──> partial sums, added ──> settle ──> rows, one per node of this rank's run
                                        └ closed when another begins                 └ a reducer adds up those of all ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sley_core.engine.registry import Param
from sley_core.engine.slot import Autograd, Habit, Slot, State, add_at
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.progress import Members
    from sley_core.engine.step_state import StepState


class Node(NamedTuple):
    """Names the micro-batches from `first` to before `last`, summed by one addition of the tree, or one leaf."""

    first: int
    last: int

    @property
    def children(self) -> tuple[Node, Node]:
        """The two nodes whose sum it is; must not be a leaf."""
        length = self.last - self.first
        assert length > 1, f"{self} is a leaf"
        middle = self.first + (1 << ((length - 1).bit_length() - 1))
        return Node(self.first, middle), Node(middle, self.last)


def leaf(index: int) -> Node:
    """Returns the node of one micro-batch."""
    return Node(index, index + 1)


def sibling(node: Node, num_leaves: int) -> Node | None:
    """Returns the node to which `node` is added in the tree of `num_leaves`; None for the root."""
    first, last = node
    length = last - first
    if last < num_leaves and not first & length:
        return Node(last, min(last + length, num_leaves))
    return Node(first - (first & -first), first) if first else None


def parent(node: Node, other: Node) -> Node:
    """Returns the node that is the sum of two siblings."""
    return Node(min(node.first, other.first), max(node.last, other.last))


def cover(first: int, last: int, num_leaves: int) -> list[Node]:
    """Returns the fewest nodes, in order, that make up the leaves from `first` to before `last`."""
    found: list[Node] = []
    while first < last:
        node = leaf(first)
        while (other := sibling(node, num_leaves)) is not None and node.last == other.first and other.last <= last:
            node = parent(node, other)
        found.append(node)
        first = node.last
    return found


def run_of(coord: int, size: int, num_leaves: int) -> tuple[int, int]:
    """Returns the first leaf, and the one after the last, of member `coord` of a group of `size` ranks that has all leaves."""
    assert num_leaves % size == 0, f"{num_leaves} micro-batches over {size} ranks"
    each = num_leaves // size
    return coord * each, (coord + 1) * each


class Spares:
    """Lends memory for partial sums, and reuses it; shared by all gradients of a run, within one step. made: all tensors
    allocated since `clear`, of num_bytes. max_bytes: the most since the run began.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.made: list[Tensor] = []
        self.num_bytes = 0
        self.max_bytes = 0

    def lend(self, like: Tensor) -> Tensor:
        """Returns memory for one more sum, of the shape and dtype of `like`, with arbitrary contents."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.made.append(made)
        self.num_bytes += made.nbytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        return made

    def take_back(self, tensor: Tensor) -> None:
        """Takes back the memory of a sum that is no longer needed."""
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)

    def clear(self) -> None:
        """Frees all memory, at the end of a step."""
        self._free.clear()
        self.made.clear()
        self.num_bytes = 0


class PartialSums:
    """Holds the contributions to one gradient, added up as far as the tree of `num_leaves` allows, per use of the parameter.
    home: the tensor that should hold the last sum, if it is one of the operands. spares: takes the memory of added sums.
    """

    def __init__(self, num_leaves: int, spares: Spares | None = None, home: Tensor | None = None) -> None:
        self.num_leaves = num_leaves
        self.spares = spares
        self.home = home
        self._held: dict[tuple[int, Node], Tensor] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nodes(self) -> list[tuple[int, Node]]:
        """The sums that are held, as (use of the parameter, node)."""
        return sorted(self._held)

    def put(self, use: int, node: Node, value: Tensor) -> None:
        """Takes over the sum of `node`, and its memory, and adds it to its sibling if that is there, and so on up the tree."""
        while True:
            other = sibling(node, self.num_leaves)
            there = self._held.pop((use, other), None) if other is not None else None
            if other is None or there is None:
                break
            value = self._added(there, value)
            node = parent(node, other)
        assert (use, node) not in self._held, f"{node} came twice"
        self._held[use, node] = value

    def take(self, use: int, node: Node, like: Tensor) -> Tensor:
        """Removes and returns the sum of `node`. A micro-batch without a contribution counts as zeros, shaped `like`."""
        known = self._held.pop((use, node), None)
        if known is not None:
            return known
        inside = any(of == use and node.first <= one.first and one.last <= node.last for of, one in self._held)
        if not inside:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        left, right = node.children
        return self._added(self.take(use, left, like), self.take(use, right, like))

    def _added(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the sum, in the memory of either (of `home`, if it is one of them): a + b is b + a, bit for bit."""
        if other is self.home:
            one, other = other, one
        one.add_(other)
        if self.spares is not None:
            self.spares.take_back(other)
        return one


class Arrival(NamedTuple):
    """Names a contribution: the index of the layer that used the parameter, among this rank's, and the global micro-batch."""

    use: int
    micro: int


class CanonicalOrder:
    """Numbers the micro-batches of `state`'s step, by the ranks of `groups`.

    spares: memory of partial sums, of all gradients of the run. The data gives each `dp` rank a contiguous run of the global
    batch, in the order of the ranks, and `wp` ranks are neighbours: so the ranks of every reduce group have contiguous runs.
    """

    def __init__(self, state: StepState, groups: Mapping[str, Members]) -> None:
        self.state = state
        self.groups = groups
        self.spares = Spares()

    @property
    def num_leaves(self) -> int:
        """Number of micro-batches of the global batch."""
        return self.groups["dp"].size * max(1, self.state.num_micros)

    @property
    def micro(self) -> int:
        """Global number of the running micro-batch; this rank's first, for a backward between two steps."""
        action = self.state.action
        return self.state.first_micro + (0 if action is None else action.micro)

    def arrival(self, param: Param, layer: str = "") -> Arrival:
        """Returns the arrival of the present contribution of `param`, used in `layer`; without a layer, in the only one."""
        assert layer or len(param.layers) == 1, f"{param.name} is used by {param.layers}: which of them?"
        return Arrival(param.layers.index(layer) if layer else 0, self.micro)

    def micros_beside(self, group: Members) -> range:
        """Returns the micro-batch that each rank of `group`, neighbours along `dp` that take the same actions, runs now."""
        step = max(1, self.state.num_micros)
        begin = self.micro - group.coord * step
        return range(begin, begin + group.size * step, step)

    def first(self, reduce_group: str) -> int:
        """Returns the first micro-batch whose gradients this rank contributes to a reduction over the group."""
        group = self.groups[reduce_group]
        return run_of(group.coord, group.size, self.num_leaves)[0]

    def is_alone(self, param: Param) -> bool:
        return self.groups[param.reduce_group].size == 1

    def nodes(self, reduce_group: str, coord: int | None = None) -> list[Node]:
        """Returns the nodes whose sums rank `coord` of the group (default: this one) contributes for each gradient."""
        group = self.groups[reduce_group]
        first, last = run_of(group.coord if coord is None else coord, group.size, self.num_leaves)
        return cover(first, last, self.num_leaves)


class CanonicalSlot(Slot):
    """Sums the contributions of each micro-batch separately, and then adds the sums in the order of the tree; otherwise as
    `Slot`.

    The view holds the sum of the rank's first micro-batches; the others have memory of their own until they are added. rows:
    once settled, the sums for the reducer: of each use of the parameter, of each node of this rank's run; the first is the
    view. If this rank has the whole tree, the view is the complete sum.
    """

    __slots__ = ("_closed", "_fresh", "_leaf", "_sum", "_sums", "order", "rows")

    def __init__(self, param: Param, view: Tensor, habit: Habit, autograd: Autograd, order: CanonicalOrder) -> None:
        self.order = order
        super().__init__(param, view, habit, autograd)

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
        """Opens the leaf of the next contribution, and closes the last. Raises RunError `canonical-again` for a closed leaf."""
        if leaf == self._leaf:
            return
        self.leave()
        if leaf in self._closed:
            raise RunError(
                "canonical-again",
                f"the gradient of {self.param.name!r} comes in pieces from micro-batch {leaf.micro}, others between them: "
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
        is_alone = order.is_alone(self.param)
        nodes = [Node(0, order.num_leaves)] if is_alone else order.nodes(self.param.reduce_group)
        uses = range(self.param.num_sums)
        rows = [sums.take(use, node, self.view) for use in uses for node in nodes]
        assert not len(sums), f"{self.param.name}: micro-batches of other ranks, {sums.nodes}"
        if rows[0] is not self.view:
            self.view.copy_(rows[0])
            rows[0] = self.view
        if is_alone:
            add_uses(rows)
            del rows[1:]
        self.rows = rows
        self._sums = None

    def _begin(self) -> Tensor:
        """Returns the memory of a new leaf, with arbitrary contents."""
        self._fresh = False
        # The view holds the sum of this rank's first leaf.
        is_first = self._leaf is None or self._leaf == (0, self.order.first(self.param.reduce_group))
        self._sum = self.view if is_first else self.order.spares.lend(self.view)
        return self._sum

    def leave(self) -> None:
        """Closes the open leaf, if any, and adds it to the partial sums: no contribution to it may follow."""
        leaf, self._leaf = self._leaf, None
        if leaf is None or self._fresh:
            return
        self._closed.add(leaf)
        if self._sums is None:
            self._sums = self._new()
        self._sums.put(leaf.use, Node(leaf.micro, leaf.micro + 1), self._sum)

    def _new(self) -> PartialSums:
        return PartialSums(self.order.num_leaves, self.order.spares, self.view)


def add_uses(sums: list[Tensor]) -> Tensor:
    """Adds the sums of a parameter's uses, in the order of the layers, into the first, and returns that."""
    first, *others = sums
    for other in others:
        first.add_(other)
    return first

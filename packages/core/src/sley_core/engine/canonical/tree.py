"""The fixed tree in which micro-batches are summed, over their numbers in the global batch. Pure; does not import torch.

    [0,7)                                       A node of two leaves or more is split at the largest power of two below its
     ├── [0,4)                                  length: for 2^n leaves the perfect tree, else perfect trees side by side,
     │    ├── [0,2) ── 0, 1                     the largest first, joined from the right.
     │    └── [2,4) ── 2, 3
     └── [4,7)                                  rank 0 of 2 has 0 to 3:  [0,4)
          ├── [4,6) ── 4, 5                     rank 1 has 4 to 6:       [4,7)
          └── 6                                 ranks of three cuts, 0-2, 3-4, 5-6:  [0,2) 2 | 3 4 | 5 6

Any division of the leaves into runs gives nodes from which the same root is made. Each node is either inside a run, or disjoint
from it, or split by its border. Of a run, take the maximal nodes: those inside it whose parent is not. They are disjoint, and
they cover the run (a leaf is a node inside it). A parent whose two children lie in different runs finds these, or the nodes
that they are made of, among the runs' nodes. So adding siblings until one node is left performs each addition of the tree once
and no other, in whatever order nodes come: the operands of an addition are fixed, and a + b is b + a bit for bit.

A run has at most 2 log2(n) + 1 maximal nodes: each border of it splits one node per level, which leaves at most one child
inside. Leaves that come in order leave one node per level open at a time, as the digits of a binary counter: log2(n) of them.
"""

from __future__ import annotations

from typing import NamedTuple


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

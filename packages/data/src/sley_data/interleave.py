"""Chooses the source of each mixture sample from the sample's number, without state or tables; torch-free.

The sources are the leaves of a binary tree. Among the first n numbers of a node with shares a and b, the left branch has
round(n a / (a + b)) and the right branch has the remainder. Each node adds an error of at most half a sample, so the count of a
source in any range of numbers differs from its share by about two samples. All arithmetic is in integers.

                 0 1 2 3 4 5 6 7 8 9
    code, 3      .   x   .   x   x        3 of 10, spread evenly
    chats, 7     x       x       x ...
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm


@dataclass(frozen=True)
class _Node:
    """A tree node with two branches, each a node or a source index. share: the share of `left` in `total`."""

    left: _Node | int
    right: _Node | int
    share: int
    total: int

    def num_left(self, count: int) -> int:
        """Returns the number of the node's first `count` numbers that belong to the left branch."""
        return (2 * count * self.share + self.total) // (2 * self.total)


class Interleave:
    """Interleaves sources: `order[n]` is the source of number n, and the index of n among the numbers of this source.

    shares: the share of each source, an integer of at least 1. The first sum(shares) numbers have exactly these counts.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.total = sum(shares)
        branches: list[tuple[int, int, _Node | int]] = [(share, source, source) for source, share in enumerate(shares)]
        heapify(branches)
        for number in range(len(shares), 2 * len(shares) - 1):  # joins the two smallest branches, as in a Huffman tree
            right, left = heappop(branches), heappop(branches)
            total = left[0] + right[0]
            heappush(branches, (total, number, _Node(left[2], right[2], left[0], total)))
        self._root = branches[0][2]
        self._paths = [list(self._path(self._root, source) or ()) for source in range(len(shares))]

    def __getitem__(self, number: int) -> tuple[int, int]:
        node = self._root
        while isinstance(node, _Node):
            before = node.num_left(number)
            if node.num_left(number + 1) > before:
                node, number = node.left, before
            else:
                node, number = node.right, number - before
        return node, number

    def count(self, source: int, num: int) -> int:
        """Returns the number of the first `num` numbers that belong to `source`."""
        for node, is_left in self._paths[source]:
            num_left = node.num_left(num)
            num = num_left if is_left else num - num_left
        return num

    def first_with(self, source: int, count: int) -> int:
        """Returns the smallest n such that the first n numbers have `count` numbers of `source`."""
        return bisect_left(range(self._search_limit(source, count)), count, key=lambda num: self.count(source, num))

    def last_with(self, source: int, count: int) -> int:
        """Returns the largest n such that the first n numbers have at most `count` numbers of `source`."""
        return bisect_right(range(self._search_limit(source, count)), count, key=lambda num: self.count(source, num)) - 1

    def _search_limit(self, source: int, count: int) -> int:
        return (count + len(self.shares) + 1) * self.total // self.shares[source] + 1

    def _path(self, node: _Node | int, source: int) -> Sequence[tuple[_Node, bool]] | None:
        """Returns the nodes from `node` to `source`, each with whether the path goes left; None without a path."""
        if not isinstance(node, _Node):
            return () if node == source else None
        for branch, is_left in ((node.left, True), (node.right, False)):
            if (subpath := self._path(branch, source)) is not None:
                return ((node, is_left), *subpath)
        return None


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Returns integers in the exact decimal proportion of `weights`: 3 and 7 for 0.3 and 0.7."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]

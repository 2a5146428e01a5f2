"""Chooses the source of each sample of a mixture, by its number alone: no state, no table; torch-free.

A binary tree of the sources halves the choice: of the first n numbers of a node with shares a and b, the left branch has
round(n a / (a + b)), the right one the others. Each node adds at most half a sample of error, so that the count of a source
within any numbers in a row differs from its share by about two samples, however many numbers there are. All is in integers.

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
    """Two branches, each a node or the index of a source. share: of `left`, out of `total`."""

    left: _Node | int
    right: _Node | int
    share: int
    total: int

    def num_left(self, count: int) -> int:
        """Returns how many of the node's first `count` numbers are the left branch's."""
        return (2 * count * self.share + self.total) // (2 * self.total)


class Interleave:
    """Interleaves sources: `order[n]` is the source of number n, and which of its own numbers that is.

    shares: of each source, an integer of at least 1; the first sum(shares) numbers have exactly these counts.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.total = sum(shares)
        branches: list[tuple[int, int, _Node | int]] = [(share, source, source) for source, share in enumerate(shares)]
        heapify(branches)
        for number in range(len(shares), 2 * len(shares) - 1):  # joins the two smallest, as Huffman did
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
        """Returns how many of the first `num` numbers are of `source`."""
        for node, is_left in self._paths[source]:
            num_left = node.num_left(num)
            num = num_left if is_left else num - num_left
        return num

    def first_with(self, source: int, count: int) -> int:
        """Returns the least n so that the first n numbers have `count` of `source`."""
        return bisect_left(range(self._most(source, count)), count, key=lambda num: self.count(source, num))

    def last_with(self, source: int, count: int) -> int:
        """Returns the largest n so that the first n numbers have no more than `count` of `source`."""
        return bisect_right(range(self._most(source, count)), count, key=lambda num: self.count(source, num)) - 1

    def _most(self, source: int, count: int) -> int:
        return (count + len(self.shares) + 1) * self.total // self.shares[source] + 1

    def _path(self, node: _Node | int, source: int) -> Sequence[tuple[_Node, bool]] | None:
        """Returns the way from `node` to `source`, each node with whether it goes left; None if it is not there."""
        if not isinstance(node, _Node):
            return () if node == source else None
        for branch, is_left in ((node.left, True), (node.right, False)):
            if (rest := self._path(branch, source)) is not None:
                return ((node, is_left), *rest)
        return None


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Returns integers in the proportion of `weights` exactly, as they are written: 0.3 and 0.7 are 3 and 7."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(each.denominator for each in fractions))
    return [int(each * common) for each in fractions]

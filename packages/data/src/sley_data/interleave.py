"""Computes the source of each mixture sample from the number of the sample, without state or tables; torch-free.

The sources are the leaves of a binary tree. Of the first n numbers of a node whose branches have shares a and b, the left
branch has round(n a / (a + b)), and the right branch has the remainder. Each node adds an error of at most half a sample, so
the count of a source in any range of numbers differs from its share by about two samples. All arithmetic is in integers.

                 0 1 2 3 4 5 6 7 8 9
    code, 3      .   x   .   x   x        3 of 10, spread evenly
    chats, 7     x       x       x ...
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import lcm

from sley_core.api.data import DataContext, Order
from sley_core.errors import PlanError
from sley_data.config import MixtureConfig, SourceTable


@dataclass(frozen=True)
class _Node:
    """A tree node. left, right: its branches, each a node or a source index. share: the share of `left` in `total`."""

    left: _Node | int
    right: _Node | int
    share: int
    total: int

    def num_left(self, count: int) -> int:
        """Returns how many of the node's first `count` numbers belong to the left branch."""
        return (2 * count * self.share + self.total) // (2 * self.total)


class Interleave:
    """Interleaves sources: `order[n]` is the source of number n, and the index of n among the numbers of this source.

    shares: the share of each source, an integer of at least 1. The first sum(shares) numbers contain each source that often.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.total = sum(shares)
        self._paths: list[list[tuple[_Node, bool]]] = [[] for _ in shares]  # the nodes from the root, and whether to go left
        branches: list[tuple[int, int, _Node | int, list[int]]] = [(share, i, i, [i]) for i, share in enumerate(shares)]
        heapify(branches)
        for number in range(len(shares), 2 * len(shares) - 1):  # joins the two smallest branches, as in a Huffman tree
            right, left = heappop(branches), heappop(branches)
            node = _Node(left[2], right[2], left[0], left[0] + right[0])
            for source in (*left[3], *right[3]):
                self._paths[source].insert(0, (node, source in left[3]))
            heappush(branches, (node.total, number, node, left[3] + right[3]))
        self._root = branches[0][2]

    def __getitem__(self, number: int) -> tuple[int, int]:
        node = self._root
        while isinstance(node, _Node):
            num_left = node.num_left(number)
            if node.num_left(number + 1) > num_left:
                node, number = node.left, num_left
            else:
                node, number = node.right, number - num_left
        return node, number

    def count(self, source: int, length: int) -> int:
        """Returns how many of the first `length` numbers belong to `source`."""
        for node, is_left in self._paths[source]:
            num_left = node.num_left(length)
            length = num_left if is_left else length - num_left
        return length

    def shortest_prefix(self, source: int, count: int) -> int:
        """Returns the smallest n such that `count` of the first n numbers belong to `source`."""
        return bisect_left(range(self._search_limit(source, count)), count, key=lambda length: self.count(source, length))

    def longest_prefix(self, source: int, count: int) -> int:
        """Returns the largest n such that at most `count` of the first n numbers belong to `source`."""
        return bisect_right(range(self._search_limit(source, count)), count, key=lambda length: self.count(source, length)) - 1

    def _search_limit(self, source: int, count: int) -> int:
        return (count + len(self.shares) + 1) * self.total // self.shares[source] + 1


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns integers in the exact proportion of the decimal `weights`, such as 3 and 7 for 0.3 and 0.7."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


def source_seed(context: DataContext, source: SourceTable) -> int:
    """Returns the seed of a source, which depends only on the run's seed and the source's name."""
    return int.from_bytes(blake2b(f"{context.seed}/{source.name}".encode(), digest_size=7).digest())


class MixtureOrder:
    """Maps the samples of a mixture to the samples of its sources.

    sources: the sources that have the split. lengths: their numbers of samples. Sample n of the whole run is number c of one
    source, which is position c % length in epoch c // length of the source's own order.

    Raises PlanError "data-exhausted" if the run needs more samples than a source with `exhausted = "refuse"` has.
    """

    def __init__(
        self, config: MixtureConfig, context: DataContext, sources: Sequence[SourceTable], lengths: Sequence[int]
    ) -> None:
        self._config = config
        self._context = context
        self._lengths = lengths
        self._sources = sources
        self._starts_over = context.split == "train" and config.exhausted != "repeat"
        self._order = lru_cache(maxsize=2 * len(lengths))(self._source_order)
        if config.by_epochs:
            counts = [(source.epochs or 0) * length for source, length in zip(sources, lengths, strict=True)]
            self._interleave = Interleave([max(1, round(count)) for count in counts])
            self._length = self._interleave.total
        else:
            self._interleave = Interleave(integer_shares([source.weight or 0 for source in sources]))
            self._length = self._epoch_length()

    def _epoch_length(self) -> int:
        find_end = self._interleave.longest_prefix if self._starts_over else self._interleave.shortest_prefix
        ends = [find_end(source, length) for source, length in enumerate(self._lengths)]
        length = min(ends) if self._starts_over else max(ends)
        num_needed = self._context.num_samples
        if self._config.exhausted == "refuse" and self._starts_over and num_needed is not None and num_needed > length:
            name = self._sources[ends.index(length)].name
            message = f"the run needs {num_needed} samples, but the source `{name}` is exhausted after {length}"
            hint = 'use fewer steps, a smaller weight for it, or `exhausted = "repeat"`'
            raise PlanError("data-exhausted", message, path=("data", "exhausted"), hint=hint)
        return length

    def _source_order(self, number: int, epoch: int) -> Order:
        source = self._sources[number]
        is_shuffled = self._config.shuffle and getattr(source.component.config, "shuffle", True)
        return Order(self._lengths[number], seed=source_seed(self._context, source), epoch=epoch, shuffle=is_shuffled)

    def __len__(self) -> int:
        return self._length

    def locate(self, epoch: int, index: int) -> tuple[int, int, int]:
        """Returns the source of sample `index` of an epoch, the source's epoch, and the sample's index in the source."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._starts_over:
            number, position = self._interleave[index]
        else:
            number, count = self._interleave[epoch * len(self) + index]
            epoch, position = divmod(count, self._lengths[number])
        return number, epoch, self._order(number, epoch)[position]

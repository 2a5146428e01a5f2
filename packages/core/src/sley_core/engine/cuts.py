"""Buffers of which each rank of a group keeps one part (ZeRO's partitions): where parts begin, and which elements of an entry
are in one.

    buffer   | a a a a a . | b b b . . . | c c . . . . |      . padding, zeros
    parts    | rank 0          | rank 1            |          rank 0: all of a, the first elements of b

A part may begin anywhere within an entry, so only element-wise operations can work on parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

ALIGNMENT = 128
"""Alignment, in elements, of the entries of a buffer that is cut. Gradients, working weights and masters have the same offsets,
at multiples of 256 bytes in every format of two bytes or more.
"""


class Span(NamedTuple):
    """Names the elements `first` to `last` (exclusive) of an entry's flattened parameter, as this rank holds it."""

    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    def shape_in(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape in which the elements are stepped: the `whole` shape if these are all of its elements, else flat
        with leading dims of size 1. So the number of dims stays: an optimizer may treat matrices otherwise than vectors.
        """
        if self.numel == prod(whole):
            return tuple(whole)
        return (*(1 for _ in whole[1:]), self.numel)


@dataclass(frozen=True)
class Cut:
    """Names this rank's part of a buffer: number `index` of `count` equal ones, over the ranks of the group `axis`.

    If that group is only a part of the reduce group, the ranks of other such groups have copies of the part.
    """

    axis: str
    count: int
    index: int

    def bounds(self, numel: int) -> tuple[int, int]:
        """Returns the first element of the part and the one after its last, in a buffer of `numel` elements, which `count`
        divides.
        """
        size, rest = divmod(numel, self.count)
        assert rest == 0, f"{numel} elements over {self.count} ranks"
        return size * self.index, size * (self.index + 1)

    def span(self, start: int, numel: int, total: int) -> Span:
        """Returns which of the `numel` elements of an entry that begins at `start` lie in this part, counted from `start`;
        maybe none.

        total: the number of elements of the buffer.
        """
        begin, end = self.bounds(total)
        first = min(max(begin - start, 0), numel)
        return Span(first, max(first, min(end - start, numel)))


WHOLE = Cut("", 1, 0)
"""The cut of a buffer that is not divided: one part, the whole."""

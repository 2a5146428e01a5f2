"""Buffers of which each rank of a group keeps one part: where the parts begin, and what of an entry is in one.

    buffer   | a a a a a . | b b b . . . | c c . . . . |      . padding, zeros
    parts    | rank 0          | rank 1            |          rank 0: all of a, the first elements of b

A part begins anywhere in an entry, so only what works element by element can work on parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 128
"""Of the views of a buffer that is cut, in elements: gradients, working weights and masters lie at the same places, and begin
at multiples of 256 bytes in every format of two bytes or more."""


class Span(NamedTuple):
    """The elements from `first` to before `last` of an entry's flattened parameter, as this rank holds it."""

    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Cut:
    """This rank's part of a buffer: number `index` of `count` equal ones, over the ranks of the group `axis`.

    Where the group is a part of the reduce group, ranks of other groups have copies of the part.
    """

    axis: str
    count: int
    index: int

    def bounds(self, numel: int) -> tuple[int, int]:
        """Returns where the part begins and ends in a buffer of `numel` elements, which `count` divides."""
        size, rest = divmod(numel, self.count)
        assert rest == 0, f"{numel} elements over {self.count} ranks"
        return size * self.index, size * (self.index + 1)

    def span(self, start: int, numel: int, total: int) -> Span:
        """Returns what the part of a buffer of `total` elements has of the `numel` from `start` on, counted from there; it may
        be empty.
        """
        begin, end = self.bounds(total)
        first = min(max(begin - start, 0), numel)
        return Span(first, max(first, min(end - start, numel)))


WHOLE = Cut("", 1, 0)
"""The part that is all of a buffer, of a group of nobody else."""

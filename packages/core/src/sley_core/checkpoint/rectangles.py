"""Rectangles of a tensor: what a file has of it, what a rank holds of it, and their intersection.

    elements 2 to 9 of a [3, 4]     . . a a      three rectangles, each a run of the flattened tensor
                                    b b b b
                                    c c . .

Pure; does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Rectangle(NamedTuple):
    """Names the elements from `offsets` on, `sizes` along each dim; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def common(self, other: Rectangle) -> Rectangle | None:
        """Returns the intersection; None if it is empty. The intersection of scalars is the scalar."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        lasts = map(min, self.ends, other.ends)
        sizes = tuple(last - first for first, last in zip(firsts, lasts, strict=True))
        return Rectangle(firsts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices_in(self, outer: Rectangle) -> tuple[slice, ...]:
        """Returns the slices that take this rectangle out of a tensor that covers `outer`."""
        pairs = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(own - start, own - start + size) for own, start, size in pairs)

    def moved(self, dim: int, by: int, size: int) -> Rectangle:
        """Returns this rectangle moved by `by` elements along `dim`, with another `size` there."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += by
        sizes[dim] = size
        return Rectangle(tuple(offsets), tuple(sizes))


def all_of(shape: Sequence[int]) -> Rectangle:
    """Returns the rectangle that covers a whole tensor of this shape."""
    return Rectangle((0,) * len(shape), tuple(shape))


def rectangles(shape: Sequence[int], first: int, last: int) -> Iterator[Rectangle]:
    """Yields the rectangles that make up the elements from `first` to before `last` of a flattened tensor of `shape`.

    Each is a run of the flattened tensor, and they come in its order; for n dims there are at most 2n - 1.
    """
    if first >= last:
        return
    if not shape:
        yield Rectangle((), ())
        return
    inner = prod(shape[1:])
    (row, begin), (end_row, end) = divmod(first, inner), divmod(last, inner)
    if row == end_row:
        yield from _in_row(row, shape, begin, end)
        return
    if begin:
        yield from _in_row(row, shape, begin, inner)
        row += 1
    if row < end_row:
        yield Rectangle((row, *(0 for _ in shape[1:])), (end_row - row, *shape[1:]))
    yield from _in_row(end_row, shape, 0, end)


def _in_row(row: int, shape: Sequence[int], first: int, last: int) -> Iterator[Rectangle]:
    for inside in rectangles(shape[1:], first, last):
        yield Rectangle((row, *inside.offsets), (1, *inside.sizes))

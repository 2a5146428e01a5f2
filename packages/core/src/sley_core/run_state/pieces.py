"""Parts of a tensor: that in a file, that of a rank, and their intersection.

elements 2 to 9 of a [3, 4]     . . a a      three rectangles, each a run of the flattened tensor
                                b b b b
                                c c . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from sley_core.engine.buffers import Span
    from sley_core.engine.registry import Param
    from sley_core.engine.shards import Shard


WEIGHTS, OPTIMIZER, BUFFERS = "weights/", "optimizer/", "buffers/"
"""How the names of tensors begin: `weights/norm.weight`, `optimizer/norm.weight/exp_avg`, `buffers/norm.running_mean`."""


class Rectangle(NamedTuple):
    """Names the elements from `offsets` on, `sizes` along each dim; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Rectangle:
        """Returns the rectangle that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

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

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that take this part out of the whole tensor."""
        return tuple(slice(offset, end) for offset, end in zip(self.offsets, self.ends, strict=True))

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


@dataclass(frozen=True)
class TensorPiece:
    """Describes the part `rectangle` of the tensor `name`, whose full shape is `shape`; the name is the same in every layout.

    tensor: of the rectangle's sizes, on the host or the device; often a view of live memory.
    """

    name: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_stepped(self) -> bool:
        """Whether the tensor changes in updates alone, as weights and optimizer states do; others may change at any time."""
        return self.name.startswith((WEIGHTS, OPTIMIZER))


class Region(NamedTuple):
    """Describes a rank's part of a tensor of the full `shape`. shard: the part of it, padded, that this rank has. span: the
    elements of the flattened shard (or whole) that this rank has of that.
    """

    shape: tuple[int, ...]
    shard: Shard | None = None
    span: Span | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor, padding included."""
        shape = self.shape if self.shard is None else self.shard.own_shape
        return shape if self.span is None else self.span.shape_in(shape)

    def cut(self, own: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yields rectangles of the whole tensor, each with the view of the rank's `own` tensor that it is; without padding."""
        assert tuple(own.shape) == self.own_shape, f"a tensor of {list(own.shape)} for {self}"
        for rectangle, view in self._runs(own):
            if self.shard is None:
                yield rectangle, view
                continue
            dim = self.shard.dim
            size = min(rectangle.sizes[dim], self.shard.own_size - rectangle.offsets[dim])
            if size > 0:
                by = self.shard.index * self.shard.size
                yield rectangle.moved(dim, by, size), view.narrow(dim, 0, size)

    def _runs(self, own: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yields rectangles of the shard, padding included, each with a view of its sizes."""
        shape = self.shape if self.shard is None else self.shard.own_shape
        if self.span is None:
            yield Rectangle.all_of(shape), own
            return
        start = 0
        for rectangle in rectangles(shape, self.span.first, self.span.last):
            yield rectangle, own.view(-1)[start : start + rectangle.numel].view(rectangle.sizes)
            start += rectangle.numel


def region_of(param: Param, span: Span | None = None) -> Region:
    """Returns the region of the parameter of `param`, or of the elements `span` of it, in the whole parameter."""
    return Region(param.shape, param.shard, span)

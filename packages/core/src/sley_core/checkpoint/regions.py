"""The part of a whole tensor that a rank's own tensor is: all of it, a shard, or a run of the elements of either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.checkpoint.rectangles import Rectangle, all_of, rectangles

if TYPE_CHECKING:
    from sley_core.engine.book import Entry
    from sley_core.engine.buffers import Span
    from sley_core.engine.shards import Shard


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
            yield all_of(shape), own
            return
        start = 0
        for rectangle in rectangles(shape, self.span.first, self.span.last):
            yield rectangle, own.view(-1)[start : start + rectangle.numel].view(rectangle.sizes)
            start += rectangle.numel


def region_of(entry: Entry, span: Span | None = None) -> Region:
    """Returns the region of the parameter of `entry`, or of the elements `span` of it, in the whole parameter."""
    return Region(entry.shape, entry.shard, span)

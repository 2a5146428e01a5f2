"""The parts of tensors in a checkpoint, and its description of the run.

elements 2 to 9 of a [3, 4]     . . a a      three rectangles, each a run of the flattened tensor
                                b b b b
                                c c . .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from torch import Tensor

from sley_core.attempt import Lineage, parse_lineage
from sley_core.errors import RunError
from sley_core.weight_files.read import TensorKind, TensorReader
from sley_core.weight_files.write import DTYPES

if TYPE_CHECKING:
    from sley_core.engine.buffers import ElementRange
    from sley_core.engine.registry import Param
    from sley_core.engine.shards import Shard

WEIGHTS, OPTIMIZER, BUFFERS = "weights/", "optimizer/", "buffers/"
"""How the names of tensors begin: `weights/norm.weight`, `optimizer/norm.weight/exp_avg`, `buffers/norm.running_mean`."""


class Rectangle(NamedTuple):
    """The elements from `offsets` on, `sizes` along each dim; () and () for a scalar."""

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
    """The part `rectangle` of the tensor `name` of the full `shape`. tensor: often a view of live memory."""

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
    """A rank's part of a tensor of `shape`. shard: its padded part. elements: its elements of the flat shard, or whole."""

    shape: tuple[int, ...]
    shard: Shard | None = None
    elements: ElementRange | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor, padding included."""
        shape = self.shape if self.shard is None else self.shard.own_shape
        return shape if self.elements is None else self.elements.stepped_shape(shape)

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
        if self.elements is None:
            yield Rectangle.all_of(shape), own
            return
        start = 0
        for rectangle in rectangles(shape, self.elements.first, self.elements.last):
            yield rectangle, own.view(-1)[start : start + rectangle.numel].view(rectangle.sizes)
            start += rectangle.numel


def region_of(param: Param, elements: ElementRange | None = None) -> Region:
    """Returns the region of the parameter of `param`, or of the elements `elements` of it, in the whole parameter."""
    return Region(param.shape, param.shard, elements)


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The description of a saved run: all of a checkpoint but its tensors. All fields are JSON.

    run, step: identify it, with lineage: the attempts that took its steps. plan: resolved, as TOML. versions: of torch and of
    plugins. layout: ranks along each axis, and `world`. optimizer: its name in the plan. state: steps done, loss scale,
    position in the data and the like. From all ranks, by `with_ranks`: values: of the optimizer besides tensors, by name;
    paths: of tensors in the nested state of their parameter; ranks: the state of each rank for itself.
    """

    run: str
    step: int
    lineage: Lineage
    plan: str
    versions: dict[str, str]
    layout: dict[str, int]
    optimizer: str
    state: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lineage", parse_lineage(self.lineage))  # JSON has lists in place of tuples

    @property
    def is_best(self) -> bool:
        """Whether no evaluation before it was better, by `[evaluation] keep_best`."""
        best = self.state.get("best")
        return best is not None and bool(best["step"] == self.step)

    def with_ranks(self, own: Sequence[Mapping[str, Any]]) -> Self:
        """Returns the description with every rank's `rank_values()`. Raises RunError "checkpoint-ranks" if they differ."""
        values, paths = (_union([one[part] for one in own]) for part in ("values", "paths"))
        return replace(self, values=values, paths=paths, ranks=[one["rank"] for one in own])


def _union(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for rank, one in enumerate(every):
        for name, value in one.items():
            if union.setdefault(name, value) != value:
                message = f"rank {rank} keeps {value!r} as {name!r}, and another rank {union[name]!r}"
                raise RunError("checkpoint-ranks", message)
    return union


class CheckpointReader(TensorReader, Protocol):
    """A checkpoint that can be read: its description, and tensors under the names of `TrainingState.pieces`."""

    @property
    def description(self) -> SavedRun: ...

    @property
    def place(self) -> str:
        """Its path or URL, for messages."""
        ...

    def read_into(self, name: str, part: Rectangle, target: Tensor) -> None:
        """Reads the part `wanted` of the tensor `name` into `target`, which has its sizes and may have another dtype."""


class WholeTensors:
    """A checkpoint whose tensors are all in memory, for a checkpointer that reads whole files."""

    def __init__(self, about: SavedRun, tensors: Mapping[str, Tensor], place: str = "the checkpoint") -> None:
        self.description = about
        self.place = place
        self._tensors = tensors

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def kind(self, name: str) -> TensorKind:
        return TensorKind(DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, wanted: Rectangle, target: Tensor) -> None:
        target.copy_(self._tensors[name][wanted.slices])

"""The objects that a run and its checkpointer exchange: pieces of tensors, the description of the run, and the run's state.

elements 2 to 9 of a [3, 4]     . . a a      three rectangles, each contiguous in the flattened tensor
                                b b b b
                                c c . .
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from sley_core.attempt import Lineage, RunAttempt, parse_lineage
from sley_core.engine.buffers import ElementRange
from sley_core.engine.parts import Parts
from sley_core.engine.registry import Param
from sley_core.engine.shards import Shard
from sley_core.errors import RunError
from sley_core.plan.plan import Plan
from sley_core.weight_files.read import TensorKind, TensorReader
from sley_core.weight_files.write import DTYPES

T = TypeVar("T")

WEIGHTS, AVERAGES, OPTIMIZER, BUFFERS = "weights/", "averages/", "optimizer/", "buffers/"
"""The prefixes of tensor names: `weights/norm.weight`, `optimizer/norm.weight/exp_avg`, `buffers/norm.running_mean`."""


class Rectangle(NamedTuple):
    """A rectangular part of a tensor. Along each dim, it has `sizes` elements from `offsets` on; both are () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Rectangle":
        """Returns the rectangle that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersection(self, other: "Rectangle") -> "Rectangle | None":
        """Returns the intersection, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Rectangle(starts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select this rectangle from the whole tensor."""
        return tuple(slice(offset, end) for offset, end in zip(self.offsets, self.ends, strict=True))

    def slices_in(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Returns the slices that select this rectangle from a tensor that covers `outer`."""
        dims = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(offset - start, offset - start + size) for offset, start, size in dims)

    def shift(self, dim: int, distance: int, size: int) -> "Rectangle":
        """Returns this rectangle shifted by `distance` elements along `dim`, with the new `size` along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += distance
        sizes[dim] = size
        return Rectangle(tuple(offsets), tuple(sizes))


def covering_rectangles(shape: Sequence[int], first: int, last: int) -> Iterator[Rectangle]:
    """Yields rectangles that together cover the elements [first, last) of the flattened tensor of `shape`.

    The rectangles are in ascending order, and each is contiguous in the flattened tensor. For n dims, there are at most 2n - 1.
    """
    if first >= last:
        return
    if not shape:
        yield Rectangle((), ())
        return
    row_size = prod(shape[1:])
    (row, start), (end_row, end) = divmod(first, row_size), divmod(last, row_size)
    if row == end_row:
        yield from _row_rectangles(row, shape, start, end)
        return
    if start:
        yield from _row_rectangles(row, shape, start, row_size)
        row += 1
    if row < end_row:
        yield Rectangle((row, *(0 for _ in shape[1:])), (end_row - row, *shape[1:]))
    yield from _row_rectangles(end_row, shape, 0, end)


def _row_rectangles(row: int, shape: Sequence[int], first: int, last: int) -> Iterator[Rectangle]:
    for inner in covering_rectangles(shape[1:], first, last):
        yield Rectangle((row, *inner.offsets), (1, *inner.sizes))


@dataclass(frozen=True)
class TensorPiece:
    """A piece to save of the tensor `name` of `shape`, at `rectangle`. `tensor` is often a view of live memory."""

    name: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_updated_by_optimizer(self) -> bool:
        """Whether only updates change the tensor, as is true of weights, their averages and optimizer states."""
        return self.name.startswith((WEIGHTS, AVERAGES, OPTIMIZER))


class Region(NamedTuple):
    """The part of a tensor of `shape` that a rank holds. shard: the rank's padded shard, or None if the rank holds no shard but
    the whole tensor. elements: the range of the flattened shard or tensor that the rank holds, or None if it holds all of it.
    """

    shape: tuple[int, ...]
    shard: Shard | None = None
    elements: ElementRange | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor, including padding."""
        shape = self.shape if self.shard is None else self.shard.local_shape
        return shape if self.elements is None else self.elements.optimizer_shape(shape)

    def split(self, shard: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yields the rectangles of the whole tensor that `shard` holds, each with its view of `shard`; leaves out padding."""
        assert tuple(shard.shape) == self.local_shape, f"a tensor of {list(shard.shape)} for {self}"
        for rectangle, view in self._split_shard(shard):
            if self.shard is None:
                yield rectangle, view
                continue
            dim = self.shard.dim
            size = min(rectangle.sizes[dim], self.shard.unpadded_size - rectangle.offsets[dim])
            if size > 0:
                yield rectangle.shift(dim, self.shard.index * self.shard.size, size), view.narrow(dim, 0, size)

    def _split_shard(self, shard: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yields the rectangles of the padded shard, each with its view of `shard`."""
        shape = self.shape if self.shard is None else self.shard.local_shape
        if self.elements is None:
            yield Rectangle.full(shape), shard
            return
        start = 0
        for rectangle in covering_rectangles(shape, self.elements.first, self.elements.last):
            yield rectangle, shard.view(-1)[start : start + rectangle.numel].view(rectangle.sizes)
            start += rectangle.numel


def region_of(param: Param, elements: ElementRange | None = None) -> Region:
    """Returns the region of this rank's parameter, or of `elements` of it, in the whole parameter."""
    return Region(param.shape, param.shard, elements)


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The description of a saved run: everything in a checkpoint except the tensors. All fields can be written as JSON.

    run: the name of the run. step: the number of completed steps. lineage: the attempts that ran these steps. plan: the
    resolved plan in TOML. versions: the versions of torch and the plugins. layout: the number of ranks along each axis, and
    `world`. optimizer: the optimizer's name in the plan. state: the loss scale, the position in the data and other states that
    are equal on all ranks. `with_ranks` sets the remaining fields. values: the values by name that are not tensors. trees: the
    nested structure of a parameter's optimizer states, by the parameter's name. ranks: the state of each rank.
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
    trees: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lineage", parse_lineage(self.lineage))  # JSON has lists in place of tuples

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after this step is the best so far, according to `[evaluation] keep_best`."""
        best = self.state.get("best")
        return best is not None and bool(best["step"] == self.step)

    def with_ranks(self, rank_values: Sequence[Mapping[str, Any]]) -> Self:
        """Returns the description completed with the results of `TrainingState.rank_values` on all ranks.

        Raises RunError "checkpoint-ranks" if two ranks have different values for a name.
        """
        values, trees = (_merge_equal([rank[part] for rank in rank_values]) for part in ("values", "trees"))
        return replace(self, values=values, trees=trees, ranks=[rank["rank"] for rank in rank_values])


def _merge_equal(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the union of all ranks' mappings. Raises RunError "checkpoint-ranks" if two have different values for a key."""
    merged: dict[str, Any] = {}
    for rank, mapping in enumerate(mappings):
        for name, value in mapping.items():
            if merged.setdefault(name, value) != value:
                message = f"{name!r} is {value!r} on rank {rank}, but {merged[name]!r} on another rank"
                raise RunError("checkpoint-ranks", message)
    return merged


class CheckpointReader(TensorReader, Protocol):
    """Reads a checkpoint. `names` has the names of tensors in `TrainingState.pieces`."""

    @property
    def description(self) -> SavedRun: ...

    @property
    def place(self) -> str:
        """The path or URL of the checkpoint, for messages."""
        ...

    def read_into(self, name: str, part: Rectangle, target: Tensor) -> None:
        """Reads `part` of the tensor `name` into `target`, which has the sizes of `part`; converts to the dtype of `target`."""


class WholeTensors:
    """A checkpoint reader with all tensors in memory, for checkpointers that read whole files."""

    def __init__(self, description: SavedRun, tensors: Mapping[str, Tensor], place: str = "the checkpoint") -> None:
        self.description = description
        self.place = place
        self._tensors = tensors

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def kind(self, name: str) -> TensorKind:
        return TensorKind(DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, part: Rectangle, target: Tensor) -> None:
        target.copy_(self._tensors[name][part.slices])


class TrainingState(Protocol):
    """The state of one rank of a run, which a checkpointer saves and restores. All methods must be called between two steps.

    attempt: the present attempt of the run. folder: the checkpoint folder, or None. notes: messages for the user, to which the
    checkpointer may add.
    """

    plan: Plan
    parts: Parts
    attempt: RunAttempt
    folder: str | None
    notes: list[str]

    def agree(self, label: str) -> None:
        """Raises RunError "ranks-differ" unless all ranks call it with the same `label`. A collective of all ranks."""

    def all_or_none(self, work: Callable[[], T], label: str, code: str = "checkpoint-load") -> T:
        """Calls `work`, such as "load the checkpoint" (`label`), and returns its result. A collective of all ranks. Raises
        RunError `code` on all ranks if `work` fails on any.
        """
        ...

    def pieces(self) -> list[TensorPiece]:
        """Returns this rank's tensors, which are views of live memory. Must not communicate.

        The names of tensors do not depend on the layout. A part of a tensor that several ranks hold has the same bits on all of
        them. Weights, master weights and optimizer states may change after `Checkpointer.copy_unwritten_state`, other tensors
        at any time. Raises RunError "checkpoint-type" for an unsupported dtype.
        """
        ...

    def rank_values(self) -> dict[str, Any]:
        """Returns this rank's state, except tensors, as JSON types, for `SavedRun.with_ranks`."""
        ...

    def describe(self, step: int) -> SavedRun:
        """Returns the description of the run after `step` steps, the same on all ranks. Only rank 0 has the lineage."""
        ...

    def restore(self, saved: CheckpointReader) -> list[str]:
        """Restores the run from a checkpoint that was saved in any layout; returns notes for the user. Must be called on all
        ranks.

        If it raises, it raises the same error on all ranks and changes nothing: PlanError "resume-differs" or "data-changed" if
        the plan or the data would give different results, RunError "checkpoint-mismatch" if the model or optimizer differs, and
        RunError "checkpoint-load" if a rank cannot read the checkpoint.
        """
        ...

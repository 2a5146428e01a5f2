"""Defines the data that a run and its checkpointer exchange: pieces of tensors, and the description and the state of the run.
Also reads the weights in checkpoints and run folders without a run, for exports, samples and later runs.

elements 2 to 9 of a [3, 4]     . . a a      three rectangles, each contiguous in the flattened tensor
                                b b b b
                                c c . .
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.engine.buffers import ElementRange
from sley_core.engine.parts import Parts
from sley_core.engine.registry import Param
from sley_core.engine.shards import Shard
from sley_core.errors import RunError
from sley_core.files import PLAN_FILE, WEIGHTS_FOLDER
from sley_core.json_text import decode_value
from sley_core.model.build import HostModel, build_on_meta
from sley_core.model.tensors import checksum
from sley_core.optim import optimizers
from sley_core.plan.document import read_file, read_text
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan
from sley_core.protocols import CheckpointFiles
from sley_core.records import CheckpointerRecord
from sley_core.run_folder import AttemptTracker, Lineage, parse_lineage, read_attempt, use_copied_files
from sley_core.weight_files.read import TensorInfo, TensorReader, WeightFiles, merge_adapters, weight_files_error
from sley_core.weight_files.write import BY_NAME, DTYPES

T = TypeVar("T")

WEIGHTS, AVERAGES, OPTIMIZER, BUFFERS = "weights/", "averages/", "optimizer/", "buffers/"
"""The prefixes of tensor names: `weights/norm.weight`, `optimizer/norm.weight/exp_avg`, `buffers/norm.running_mean`."""

OPTIONS, SHARED, BASE = "options/", "shared/", "base/"
"""The prefixes of the names of saved values that are not tensors: a parameter's options in the optimizer's groups, a value that
the optimizer keeps for all parameters, and the checksum of a frozen parameter of a model with adapters.
"""


class Rectangle(NamedTuple):
    """A rectangular part of a tensor: along dim d, `sizes[d]` elements from `offsets[d]` on. Both are () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> "Rectangle":
        """Returns the rectangle that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersection(self, other: "Rectangle") -> "Rectangle | None":
        """Returns the rectangle of the elements that this rectangle and `other` share, or None if there are none."""
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
        """Returns the slices that select this rectangle from a tensor that holds only the rectangle `outer`."""
        dims = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(offset - start, offset - start + size) for offset, start, size in dims)

    def shift(self, dim: int, distance: int, size: int) -> "Rectangle":
        """Returns this rectangle shifted by `distance` elements along `dim`, with the new `size` along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += distance
        sizes[dim] = size
        return Rectangle(tuple(offsets), tuple(sizes))


def split_into_rectangles(shape: Sequence[int], first: int, last: int) -> Iterator[Rectangle]:
    """Yields rectangles that together cover the elements [first, last) of the flattened tensor of `shape`. The rectangles are
    in ascending order, and each is contiguous in the flattened tensor. For n dims, there are at most 2n - 1.
    """
    if not shape and first < last:
        yield Rectangle((), ())
    while shape and first < last:
        row_size = prod(shape[1:])
        row, start = divmod(first, row_size)
        num_rows = 0 if start else (last - first) // row_size
        if num_rows:
            yield Rectangle((row, *(0 for _ in shape[1:])), (num_rows, *shape[1:]))
            first += num_rows * row_size
        else:  # a part of one row
            end = min(last - first + start, row_size)
            for inner in split_into_rectangles(shape[1:], start, end):
                yield Rectangle((row, *inner.offsets), (1, *inner.sizes))
            first += end - start


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor, to save. name, shape: the name and the shape of the whole tensor. rectangle: the place of the part.
    tensor: the values of the part, often a view of live memory.
    """

    name: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_updated_by_optimizer(self) -> bool:
        """Whether only updates change the tensor: true for weights, their averages and optimizer states."""
        return self.name.startswith((WEIGHTS, AVERAGES, OPTIMIZER))


class Region(NamedTuple):
    """The part of a tensor of `shape` that a rank holds. shard: the rank's padded shard, or None if the tensor is not sharded.
    elements: the range of the flattened shard or tensor that the rank holds, or None if the rank holds all of it.
    """

    shape: tuple[int, ...]
    shard: Shard | None = None
    elements: ElementRange | None = None

    @classmethod
    def from_param(cls, param: Param, elements: ElementRange | None = None) -> "Region":
        """Returns the region of the whole parameter that this rank's `param` covers, or that `elements` of `param` cover."""
        return cls(param.shape, param.shard, elements)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor, including padding."""
        shape = self.shape if self.shard is None else self.shard.local_shape
        return shape if self.elements is None else self.elements.optimizer_shape(shape)

    def split(self, shard: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yields each rectangle of the whole tensor that `shard` holds, and its view in `shard`. Skips the padding."""
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
        """Yields each rectangle of the padded shard that `shard` holds, with the view of `shard` that has its values."""
        shape = self.shape if self.shard is None else self.shard.local_shape
        if self.elements is None:
            yield Rectangle.from_shape(shape), shard
            return
        start = 0
        for rectangle in split_into_rectangles(shape, self.elements.first, self.elements.last):
            yield rectangle, shard.view(-1)[start : start + rectangle.numel].view(rectangle.sizes)
            start += rectangle.numel


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The description of a saved run: everything in a checkpoint except the tensors. All fields can be written as JSON.

    run: the name of the run. step: the number of completed steps. lineage: the attempts that ran these steps. plan: the
    resolved plan in TOML. versions: the versions of torch and the plugins. layout: the number of ranks along each axis, and
    `world`. optimizer: the optimizer's name in the plan. state: the loss scale, the position in the data and other states that
    are equal on all ranks. `with_ranks` sets the other fields. values: the saved values that are not tensors, by name.
    trees: the nested structure of each parameter's optimizer state, by the parameter's name. ranks: the state of each rank.
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
        """Returns a copy with `values`, `trees` and `ranks` set. rank_values: the result of `TrainingState.rank_values` on
        each rank, in rank order. Raises RunError "checkpoint-ranks" if two ranks have different values for a name.
        """
        values, trees = (_merge_mappings([rank[part] for rank in rank_values]) for part in ("values", "trees"))
        return replace(self, values=values, trees=trees, ranks=[rank["rank"] for rank in rank_values])


def _merge_mappings(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the union of each rank's mapping. Raises RunError "checkpoint-ranks" if two ranks differ in a value."""
    merged: dict[str, Any] = {}
    for rank, mapping in enumerate(mappings):
        for name, value in mapping.items():
            if merged.setdefault(name, value) != value and not optimizers.is_equal(merged[name], value):  # as for NaN
                message = f"{name!r} is {value!r} on rank {rank}, but {merged[name]!r} on another rank"
                raise RunError("checkpoint-ranks", message)
    return merged


class CheckpointReader(TensorReader, Protocol):
    """Reads a checkpoint. `names` contains the names of the tensors that `TrainingState.pieces` returned on any rank."""

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

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, part: Rectangle, target: Tensor) -> None:
        target.copy_(self._tensors[name][part.slices])


class TrainingState(Protocol):
    """The state of a run on one rank, which a checkpointer saves and restores. All methods must be called between two steps.
    attempt: the present attempt of the run. folder: the path or URL of the checkpoint folder, or None if the run has none.
    notes: messages for the user, to which the checkpointer may add.
    """

    plan: Plan
    parts: Parts
    attempt: AttemptTracker
    folder: str | None
    notes: list[str]

    def agree(self, label: str) -> None:
        """Raises RunError "ranks-differ" unless all ranks call it with the same `label`. A collective of all ranks."""

    def all_or_none(self, work: Callable[[], T], label: str, code: str = "checkpoint-load") -> T:
        """Calls `work` and returns its result. A collective of all ranks. If `work` fails on any rank, raises RunError `code`
        on all ranks. label: a verb phrase such as "load the checkpoint", for the message.
        """
        ...

    def pieces(self) -> list[TensorPiece]:
        """Returns this rank's tensors, which are views of live memory. Must not communicate.

        The names of tensors do not depend on the layout. A part of a tensor that several ranks hold has the same bits on all of
        them. Weights, their full-precision copies and optimizer states may change after `Checkpointer.copy_unwritten_state`;
        other tensors may change at any time. Raises RunError "checkpoint-type" for an unsupported dtype.
        """
        ...

    def rank_values(self) -> dict[str, Any]:
        """Returns the state of this rank that is not in tensors, as JSON types, for `SavedRun.with_ranks`."""
        ...

    def describe(self, step: int) -> SavedRun:
        """Returns the description of the run after `step` steps. It is equal on all ranks, but only rank 0 has the lineage."""
        ...

    def restore(self, saved: CheckpointReader) -> list[str]:
        """Restores the run from a checkpoint that was saved in any layout; returns notes for the user. Must be called on all
        ranks.

        If a restore fails, all ranks raise the same error, and nothing changes: PlanError "resume-differs" or "data-changed" if
        the plan or the data would give different results, RunError "checkpoint-mismatch" if the model or optimizer differs, and
        RunError "checkpoint-load" if a rank cannot read the checkpoint.
        """
        ...


def checkpoint_files(loader: PluginLoader, plan: Plan | None = None) -> CheckpointFiles | None:
    """Returns the `CheckpointFiles` of the plan's checkpointer, or None if the checkpointer has no such class.

    If `plan` is None or has no `[checkpoint]` table, uses the default checkpointer. Raises PluginError "plugin-missing" if the
    default is not installed.
    """
    if plan is not None and plan.checkpoint is not None:
        record = plan.checkpoint.record
    else:
        record = loader.record(CheckpointerRecord, CHECKPOINTER)
    assert isinstance(record, CheckpointerRecord), record
    if record.files is None:
        return None
    files: CheckpointFiles = record.load(record.files)()
    return files


def open_run_weights(path: Path, run: Path) -> TensorReader:
    """Returns a reader of the final weights in the run folder `run` if `path` is this folder, or else of the weights in the
    checkpoint `path`. Adapters are merged into the weights. Raises RunError "weight-files" if there is no checkpoint in `path`.
    """
    plan = resolve_plan(use_copied_files(read_file(run / PLAN_FILE), run), PluginLoader())
    source: TensorReader
    if path == run:
        source = WeightFiles(run / WEIGHTS_FOLDER)
    else:
        files = checkpoint_files(plan.loader, plan)
        checkpoint = None if files is None else files.open(str(path))
        if checkpoint is None:
            raise weight_files_error(f"there is no checkpoint in `{path}`")
        plan, source = load_plan_and_weights(checkpoint)
    return source if plan.adapters is None else merge_adapters(plan, source)


def extra_state_names(saved: CheckpointReader) -> dict[str, str]:
    """Maps the name of each module's extra state in the model to its name in the checkpoint. If several ranks saved the same
    state, the first name in `saved.names` is used.
    """
    names: dict[str, str] = {}
    for saved_name in saved.names:
        prefix, separator, name = saved_name.partition("/extra/")
        if separator and prefix.startswith("ranks/"):
            names.setdefault(name, saved_name)
    return names


def load_parameter_state(optimizer: torch.optim.Optimizer, saved: CheckpointReader, name: str) -> None:
    """Restores the saved state of the parameter `name` into `optimizer`, whose only parameter must be this one, unsharded and
    on the CPU.
    """
    (parameter,) = optimizer.param_groups[0]["params"]
    values = saved.description.values
    leaves = {
        leaf: decode_value(values[state]) if state in values else saved.tensor(state)
        for leaf, state in state_names_by_parameter(saved).get(name, {}).items()
    }
    options = decode_value(values.get(OPTIONS + name, {}))
    states = {id(parameter): join_leaves(decode_value(saved.description.trees.get(name)), leaves)}
    dtypes = {id(parameter): BY_NAME[saved.info(WEIGHTS + name).dtype]}
    optimizers.load_optimizer_state(
        optimizer, states, [options], shared_states(saved), optimizers.copy_attributes(optimizer), dtypes
    )


def shared_states(saved: CheckpointReader) -> optimizers.SharedValues:
    """Returns the optimizer's saved values that belong to no parameter and no group, by their path in the optimizer."""
    pairs = (decode_value(value) for name, value in saved.description.values.items() if name.startswith(SHARED))
    return {tuple(path): value for path, value in pairs}


def state_names_by_parameter(saved: CheckpointReader) -> dict[str, dict[str, str]]:
    """Returns the name in the checkpoint of each value in the optimizer states: `result[parameter][value]`."""
    names: dict[str, dict[str, str]] = {}
    for name in (*saved.names, *saved.description.values):
        if name.startswith(OPTIMIZER):
            parameter, _, leaf = name.removeprefix(OPTIMIZER).rpartition("/")
            names.setdefault(parameter, {})[leaf] = name
    return names


class SavedWeights:
    """Reads the weights and buffers of a checkpoint by their names in the model. The weights are the averages if there are any,
    or else the full-precision weights. If the optimizer has the methods `train` and `eval`, as schedule-free optimizers do, the
    full-precision weights are returned as `eval` leaves them.

    plan: the plan of the run that wrote the checkpoint. base: a function that returns the reader of the frozen parameters,
    which the checkpoint of a model with adapters does not contain.
    """

    def __init__(self, saved: CheckpointReader, plan: Plan, base: "Callable[[], BaseWeights]") -> None:
        self.saved = saved
        self._plan = plan
        self._base = cache(base)
        self._saved_names = extra_state_names(saved) | {
            name.removeprefix(prefix): name
            for prefix in (WEIGHTS, AVERAGES, BUFFERS, BASE)  # an average replaces the weight of its name
            for name in (*saved.names, *saved.description.values)
            if name.startswith(prefix)
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self._saved_names)

    def info(self, name: str) -> TensorInfo:
        if self._saved_names[name].startswith(BASE):
            return self._base().info(name)
        return self.saved.info(self._saved_names[name])

    def tensor(self, name: str) -> Tensor:
        """Returns the weight or buffer `name`. Raises RunError "adapters-base" for a frozen parameter if its value is not the
        value that it had in the run that wrote the checkpoint.
        """
        if self._saved_names[name].startswith(BASE):
            value = self._base().tensor(name)
            if checksum(value) != self.saved.description.values[BASE + name]:
                raise base_error(self.saved.place, name)
            return value
        value = self.saved.tensor(self._saved_names[name])
        if not self.saved.description.state["has_modes"] or not self._saved_names[name].startswith(WEIGHTS):
            return value
        parameter = nn.Parameter(value)
        config: Any = self._plan.optimizer.config
        group = {"params": [parameter], "lr": config.lr, "initial_lr": config.lr, "weight_decay": config.weight_decay}
        optimizer: Any = optimizers.set_training_mode(self._plan.optimizer.build([group], parameter.device))
        load_parameter_state(optimizer, self.saved, name)
        optimizer.eval()
        return parameter.detach()


class BaseWeights:
    """Reads the initial values of the parameters of the model in `plan`. Keeps at most one layer with a builder in memory."""

    def __init__(self, plan: Plan) -> None:
        info = open_dataset(plan.data, DataContext(plan.run.seed, "train")).info
        self._host = HostModel(build_on_meta(plan.model, info, plan.run.seed, plan.adapters))
        self._layer: tuple[str, nn.Module] = ("", nn.Module())

    def info(self, name: str) -> TensorInfo:
        value = self.tensor(name)
        return TensorInfo(DTYPES[value.dtype], tuple(value.shape))

    def tensor(self, name: str) -> Tensor:
        layer = next(layer for layer in self._host.model.layers if name.startswith(f"{layer.name}."))
        if self._layer[0] != layer.name:
            self._layer = layer.name, self._host.build_module(layer)
        return self._layer[1].get_parameter(name.removeprefix(f"{layer.name}.")).detach()


def base_error(place: str, name: str) -> RunError:
    """Returns RunError "adapters-base" for the parameter `name`, whose base value is not that of the checkpoint `place`."""
    hint = "restore the files and the seed of the base model, whose weights a checkpoint of adapters does not contain"
    message = f"{place} was trained on a different base model: the values of {name!r} differ"
    return RunError("adapters-base", message, hint=hint)


def load_plan_and_weights(saved: CheckpointReader) -> tuple[Plan, SavedWeights]:
    """Returns the resolved plan of the run that wrote the checkpoint `saved`, and its weights. If the checkpoint folder is in
    the folder of this run, the plan names the copies of its files in the run's folder instead of the originals.
    """
    document = read_text(saved.description.plan, saved.place, Path())
    folder = Path(saved.place).parent.parent
    attempt = read_attempt(folder)
    is_of_run = attempt is not None and attempt.is_writer_of(saved.description.lineage)
    plan = resolve_plan(use_copied_files(document, folder) if is_of_run else document, PluginLoader())
    # The copied files contain no weights, so the base is read from the original files.
    return plan, SavedWeights(saved, plan, lambda: BaseWeights(resolve_plan(document, PluginLoader())))


def join_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns the optimizer state of a parameter. leaves: the state's values, by name. tree: the state's nested structure, with
    the names in place of the values; None if the state is a flat dict.
    """
    return dict(leaves) if tree is None else tree_map(leaves.__getitem__, tree)

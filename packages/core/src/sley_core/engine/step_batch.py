"""Converts the samples of a step to microbatches, and the model's outputs back to the form of the input.

    a batch of n microbatches ──┐  fields, sizes    ┌──────────┐  this rank's slice   ┌──────────┐
                                 ├─────────────────> │  whole   │ ───────────────────> │  micros  │ ──> n outputs
    a list of n microbatches ───┘  token ids        └──────────┘  of each sequence    └──────────┘

    a batch of n microbatches <── one output, its tensors joined along the batch dim
    a list of n microbatches  <── a list of n outputs; with `join` of whole sequences, gathered over `sp`

The loss weight of the global batch is known from the data alone, before the first backward. Dividing by it once makes gradients
independent of microbatches, dp, sp and padding; a mean of means would depend on them. The loss's `weight` is called once for a
batch in one piece; with canonical sums, once for each microbatch.

A loss must be a sum over microbatches (`BatchSplitter`) and, if ranks have slices of sequences, over positions
(`PositionAdditivity`):

    right    loss(positions 0 to 15) = loss(0 to 7) + loss(8 to 15)
    wrong    labels that the loss shifts itself, a term that compares neighbours, a mean over the sequence

For a loss with `sequence = "whole"`, `WholeSequences` gathers full sequences instead:

    rank 0   output of slice 0 ──┐ gathered   ┌── the loss of whole sequences ──> gradient of slice 0; counts
    rank 1   output of slice 1 ──┘  on both   └── the same loss               ──> gradient of slice 1

Each rank computes, and has memory for, the full loss, and keeps the gradient of its own slice, so the backward does not
communicate. The loss and its weight count only on the first rank of `sp`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sley_core.comm.world import Group
from sley_core.data.batches import SequenceSlicer, add_positions, check_additive, check_tokens, count_microbatches, narrow_batch
from sley_core.data.dataset import Batch, DataInfo, Field
from sley_core.engine.boundary import flatten, unflatten
from sley_core.errors import RunError
from sley_core.plan.plan import Plan
from sley_core.protocols import Loss
from sley_core.records import LossRecord

MAX_CHECKED_SHAPES = 16
"""The maximum number of batch shapes for which a `BatchSplitter` checks that the loss's weights add up."""


class BatchWeight:
    """The divisor of all gradients. total: returns the loss weight of the global batch. scale: the loss scale of fp16, or 1."""

    def __init__(self, total: Callable[[], float], scale: float = 1.0) -> None:
        self.scale = scale
        self._total = total
        self._inverse: Tensor | None = None

    def inverse(self, like: Tensor) -> Tensor:
        """Returns scale / weight as a scalar, or 0 if the weight is 0. The first call calls `total`, which may wait for other
        ranks, and determines the dtype and device of all results. like: a tensor with this dtype and device.
        """
        if self._inverse is None:
            total = self._total()
            self._inverse = like.new_full((), self.scale / total if total > 0 else 0.0)
        return self._inverse


GivenBatch: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
"""One batch, or a list of its microbatches. The sequences of different microbatches in a list may differ in length."""


class BatchCounts(NamedTuple):
    """The counts of a batch. trained_tokens: the tokens whose label is not ignored. positions: the positions that the model
    computes. pairs: the pairs of positions in the same sequence or document: the sum of the squared lengths.
    """

    samples: float = 0.0
    tokens: float = 0.0
    trained_tokens: float = 0.0
    positions: float = 0.0
    pairs: float = 0.0

    def add(self, other: "BatchCounts") -> "BatchCounts":
        """Returns the sums of the counts of two batches."""
        return BatchCounts(*map(sum, zip(self, other, strict=True)))


NO_COUNTS = BatchCounts()  # the counts of an empty batch


@dataclass(frozen=True)
class StepBatch:
    """This rank's samples of one step or one evaluation, on the host. micros: each microbatch as {field: tensor}, fields in the
    declared order, with this rank's slice of each sequence. whole: the same samples with full sequences, in the pieces in which
    they were passed. weights: this rank's shares of the loss weight of the global batch, by piece, or by microbatch with
    canonical sums; empty if this rank has no loss. counts: the counts of these samples. num_counted: the number of microbatches
    that count, or None for all; the other microbatches run only because other ranks run as many.
    """

    micros: Sequence[Batch]
    whole: Sequence[Mapping[str, Tensor]]
    weights: Sequence[float] = ()
    counts: BatchCounts = NO_COUNTS
    num_counted: int | None = None

    @property
    def num_microbatches(self) -> int:
        """Returns the number of microbatches that this rank runs."""
        return len(self.micros)


@dataclass(eq=False)
class BatchSplitter:
    """Checks the samples of a step, and cuts them into a `StepBatch`. info: the declaration of full samples. micro_size: the
    number of samples of a microbatch. slicer: cuts this rank's part of each sequence. loss: the loss; None if only outputs are
    computed. computes_weight: whether this rank has the model's last chunk, and so calls the loss's `weight`.
    weight_per_microbatch: whether to call `weight` for each microbatch instead of each piece. weight_of_full_sequences: whether
    to call `weight` with full sequences instead of this rank's slices.
    """

    info: DataInfo
    micro_size: int
    slicer: SequenceSlicer
    loss: Loss | None
    computes_weight: bool = field(default=False, kw_only=True)
    weight_per_microbatch: bool = field(default=False, kw_only=True)
    weight_of_full_sequences: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.computes_weight = self.computes_weight and self.loss is not None
        self._fields = add_positions(self.info, self.slicer.num_slices).fields
        self._checked_shapes: set[tuple[object, ...]] = set()

    def split_input(self, batch: GivenBatch) -> StepBatch:
        """Checks and splits the samples that a program passes to a step. Raises RunError "batch-fields" unless they are a batch
        or a list of microbatches with the declared fields, "batch-size" if they do not fill microbatches, "token-out-of-range"
        if a token id is outside the vocabulary, and "loss-not-additive" as `split_feed` does.
        """
        whole = [batch] if isinstance(batch, Mapping) else _require_microbatches(batch)
        counts = [self._count(piece) for piece in whole]
        if whole is batch and set(counts) != {1}:  # the batch came in microbatches
            message = (
                f"the list's items have {counts} microbatches, but each must have 1 ([batch] micro_size = {self.micro_size})"
            )
            raise RunError("batch-size", message, hint="pass one or more microbatches of that size")
        for piece in whole:
            check_tokens(piece, self.info)
        return self._split(whole, counts)

    def split_feed(self, batch: Batch, num_samples: int | None = None) -> StepBatch:
        """Splits the samples of the plan's data, whose tokens have been checked. num_samples: how many of the first samples
        count; None means all. Raises RunError "batch-fields" and "batch-size" as `split_input` does, and "loss-not-additive" if
        the loss weights of the microbatches do not add up to the loss weight of the batch.
        """
        count, size = self._count(batch), self.micro_size
        if num_samples is None or num_samples >= count * size:
            return self._split([batch], [count])
        # The last microbatch that counts may be smaller; those after it keep their size, and weigh nothing.
        num_counted = -(-max(0, num_samples) // size)
        pieces: list[Batch] = []
        for micro in range(count):
            piece = narrow_batch(batch, self.info.fields, micro, count)
            if micro == num_counted - 1:
                dims, num_remaining = {name: self.info.fields[name].batch_dim for name in piece}, num_samples - micro * size
                piece = {name: value.narrow(dims[name], 0, num_remaining) for name, value in piece.items()}
            pieces.append(piece)
        split = self._split(pieces, [1] * count)
        weights = [weight if micro < num_counted else 0.0 for micro, weight in enumerate(split.weights)]
        return replace(split, weights=weights, num_counted=num_counted)

    def select_fields(self, names: Collection[str]) -> "BatchSplitter":
        """Returns a splitter for batches that have only the declared fields in `names`."""
        fields = {name: field for name, field in self.info.fields.items() if name in names}
        slicer = SequenceSlicer(fields, self.slicer.num_slices, self.slicer.index)
        return replace(self, info=replace(self.info, fields=fields), slicer=slicer)

    def split_prediction(self, batch: GivenBatch, reads: Collection[str]) -> StepBatch:
        """Checks and splits `batch` like `split_input`, without loss weights. reads: the fields that `batch` must have."""
        names = set[str]().union(*([batch] if isinstance(batch, Mapping) else _require_microbatches(batch)))
        return replace(self.select_fields(names | set(reads)), loss=None).split_input(batch)

    def _count(self, piece: Mapping[str, Tensor]) -> int:
        return count_microbatches(piece, self.info.fields, self.micro_size)

    def _split(self, whole: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> StepBatch:
        """Cuts `whole` and computes the loss weights. counts: the number of microbatches in each piece of `whole`."""
        slices = [self.slicer(piece) for piece in whole]
        weighed = whole if self.weight_of_full_sequences else slices
        if self.loss is not None:
            for piece, count in zip(weighed, counts, strict=True):
                self._check_weights(self.loss, piece, count)
        micros = _cut_microbatches(slices, self._fields, counts)
        if not self.computes_weight:
            weighed = ()
        elif self.weight_per_microbatch:
            weighed = _cut_microbatches(whole, self.info.fields, counts) if self.weight_of_full_sequences else micros
        return StepBatch(micros, whole, [self.loss.weight(piece) for piece in weighed] if self.loss else [])

    def _check_weights(self, loss: Loss, batch: Mapping[str, Tensor], num_microbatches: int) -> None:
        """Raises RunError "loss-not-additive" if the weights of the microbatches do not add up to the weight of the batch, as
        with a mean. Checks each of the first `MAX_CHECKED_SHAPES` shapes once, also on ranks without the model's last chunk.
        """
        shape = (num_microbatches, *(tuple(value.shape) for value in batch.values()))
        if num_microbatches == 1 or len(self._checked_shapes) >= MAX_CHECKED_SHAPES or shape in self._checked_shapes:
            return
        fields = self.info.fields if self.weight_of_full_sequences else self._fields
        hint = (
            'return a sum from the loss and not a mean, for example `F.cross_entropy(..., reduction="sum")`, and return the '
            'number of summed terms as its weight, for example `(batch["labels"] != -100).sum().item()`'
        )
        check_additive(loss, batch, _cut_microbatches([batch], fields, [num_microbatches]), "microbatches", ("loss",), hint)
        self._checked_shapes.add(shape)


def _cut_microbatches(
    pieces: Sequence[Mapping[str, Tensor]], fields: Mapping[str, Field], counts: Sequence[int]
) -> list[Batch]:
    """Returns the microbatches of all `pieces`, in order. counts: the number of microbatches in each piece."""
    pairs = zip(pieces, counts, strict=True)
    return [narrow_batch(piece, fields, index, count) for piece, count in pairs for index in range(count)]


def _require_microbatches(batch: object) -> Sequence[Mapping[str, Tensor]]:
    """Returns `batch`. Raises RunError "batch-fields" unless it is a list of microbatches."""
    if isinstance(batch, Sequence) and all(isinstance(micro, Mapping) for micro in batch):
        return batch
    type_text = f"a {type(batch).__name__}"
    if isinstance(batch, list | tuple):
        type_text += f" of {', '.join(sorted({type(micro).__name__ for micro in batch}))}"
    message = f"run.step expects a dict of tensors, or a list of such dicts, but got {type_text}"
    raise RunError("batch-fields", message, hint="pass one tensor for each field that the data declares")


DimSize = tuple[int, int]
"""A dim of a tensor, and the size of the tensor along this dim."""


@dataclass
class ModelOutputs:
    """The model's outputs in a step or prediction. by_micro: the outputs by index in `micros`; empty without the last layer."""

    micros: Sequence[Batch] = ()
    by_micro: dict[int, Any] = field(default_factory=dict)

    def to_input_form(self, input_batch: GivenBatch | None, fields: Mapping[str, Field], sp: Group, *, join: bool) -> Any:
        """Returns the outputs in the form of the step's input, or None if there are none: one output for a batch, with the
        tensors of its microbatches concatenated along the batch dim, or a list of outputs for a list of microbatches.
        input_batch: the step's input; None for a batch of the plan's data. fields: the declared fields. join: whether to gather
        full sequences over `sp`; if so, all ranks of `sp` must call this. Raises RunError "outputs-apart" if a tensor does not
        have the dim along which it would be joined.
        """
        if not self.by_micro:
            return None
        outputs = [self.by_micro[number] for number in range(len(self.micros))]
        is_single = input_batch is None or isinstance(input_batch, Mapping)
        if is_single and len(outputs) > 1:
            samples = dim_and_size(self.micros[0], fields, "batch_dim")
            flat_outputs = [flatten(output) for output in outputs]
            for tensors, structure in flat_outputs:
                if structure != flat_outputs[0][1] or not all(_has_dim(tensor, samples) for tensor in tensors):
                    shapes, (dim, size) = [list(tensor.shape) for tensor in tensors], samples
                    message = f"an output of shapes {shapes} does not have the {size} samples of its microbatch along dim {dim}"
                    hint = "pass a list of microbatches to get one output per microbatch"
                    raise RunError("outputs-apart", message, hint=hint)
            columns = zip(*(tensors for tensors, _ in flat_outputs), strict=True)
            outputs = [unflatten([torch.cat(tensors, samples[0]) for tensors in columns], flat_outputs[0][1])]
        if join and sp.size > 1:
            lengths = [dim_and_size(micro, fields, "sequence_dim") for micro in self.micros]
            outputs = [gather_output(output, dim_size, sp) for output, dim_size in zip(outputs, lengths, strict=False)]
        return outputs[0] if is_single else outputs


def gather_along_dim(tensor: Tensor, dim: int, group: Group, label: str) -> Tensor:
    """Returns all ranks' tensors, joined along `dim`. A blocking collective over `group`. The backward does not communicate."""
    joined: Tensor = _GatherFunction.apply(tensor, dim, group, label)  # type: ignore[no-untyped-call]
    return joined


class _GatherFunction(torch.autograd.Function):
    """The autograd function of `gather_along_dim`. The gradient is this rank's slice of the output's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group, label: str) -> Tensor:
        ctx.dim, ctx.first, ctx.length = dim, group.coord * tensor.shape[dim], tensor.shape[dim]
        gathered = tensor.new_empty((group.size, *tensor.shape))
        group.all_gather(gathered.flatten(), tensor.contiguous().flatten(), label=label).wait()
        return torch.cat(gathered.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(ctx.dim, ctx.first, ctx.length), None, None, None


def dim_and_size(micro: Mapping[str, Tensor], fields: Mapping[str, Field], dim_attribute: str) -> DimSize:
    """Returns the batch dim or the sequence dim, as `dim_attribute` says, of the first field in `micro` that has one, and its
    size. dim_attribute: "batch_dim" or "sequence_dim". Raises StopIteration if no field has one.
    """
    dims = ((getattr(field, dim_attribute), micro[name]) for name, field in fields.items() if name in micro)
    return next((dim, value.shape[dim]) for dim, value in dims if dim is not None)


def gather_output(output: Any, positions: DimSize, sp: Group) -> Any:
    """Returns the output for full sequences. Runs one blocking collective over `sp` per tensor, in the order of the output.
    positions: the sequence dim and its size. Raises RunError "outputs-apart" if a tensor does not have this dim and size.
    """
    tensors, structure = flatten(output)
    for tensor in tensors:
        if not _has_dim(tensor, positions):
            dim, length = positions
            message = f"an output of shape {list(tensor.shape)} lacks the {length} positions of its slice along dim {dim}"
            hint = 'remove `join` or [loss] sequence = "whole"; only outputs with a value for every position can be joined'
            raise RunError("outputs-apart", message, hint=hint)
    return unflatten([gather_along_dim(tensor, positions[0], sp, "the outputs of slices") for tensor in tensors], structure)


def _has_dim(tensor: Tensor, dim_size: DimSize) -> bool:
    dim, size = dim_size
    return tensor.ndim > dim and tensor.shape[dim] == size


def needs_whole_sequences(plan: Plan) -> bool:
    """Returns whether the plan's loss needs full sequences, as its record or, for a factory, the `[loss]` table declares."""
    loss = plan.loss
    sequence = loss.record.sequence if isinstance(loss.record, LossRecord) else loss.config.sequence
    return bool(sequence == "whole")


class WholeSequences:
    """Gathers full sequences over `sp` for a loss. fields: the slices' fields. is_counted: whether this rank's loss counts."""

    def __init__(self, fields: Mapping[str, Field], sp: Group) -> None:
        self.fields = fields
        self.sp = sp
        self.is_counted = sp.coord == 0

    def __call__(self, output: Any, batch: Mapping[str, Tensor], micro: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Returns the output and the fields for full sequences. A blocking collective over `sp`. batch: the fields that the
        loss reads, on the device. micro: all fields of the microbatch. Raises RunError "outputs-apart" as `gather_output` does.
        """
        fields = {}
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim
            fields[name] = value if dim is None else gather_along_dim(value, dim, self.sp, f"the slices of `{name}`")
        return gather_output(output, dim_and_size(micro, self.fields, "sequence_dim"), self.sp), fields


_NARROW_TOLERANCE = 2**-6
"""The relative tolerance for the sum of the losses of two halves if a loss is not in fp64; bf16 rounds by up to 2^-8."""

WINDOW_LENGTH = 16
"""The maximum number of positions in a window. `PositionAdditivity.check` compares the loss of a window with the sum of the
losses of its halves, for windows at the beginning, in the middle and at the end of a slice.
"""


class PositionAdditivity:
    """Checks, in each call of `check` until one succeeds, that `loss` is a sum over positions. fields: the declared fields."""

    def __init__(self, loss: Loss, fields: Mapping[str, Field]) -> None:
        self.loss = loss
        self.fields = fields
        self._is_checked = False

    @torch.no_grad()
    def check(self, output: object, batch: Mapping[str, Tensor]) -> None:
        """Raises RunError "loss-not-additive" if the loss combines positions. Does not check losses that draw random numbers,
        or cannot be computed for a part of the positions. output: the model's output for `batch`, this rank's slice.
        """
        if self._is_checked or type(output) is not Tensor:
            return
        fields = [name for name, field in self.fields.items() if field.sequence_dim is not None and name in batch]
        dim, length = dim_and_size(batch, self.fields, "sequence_dim") if fields else (0, 0)
        size = min(WINDOW_LENGTH, length) // 2 * 2
        if size < 2 or output.ndim <= dim or output.shape[dim] != length:
            return
        starts = sorted({0, (length - size) // 2, length - size})
        results = [self._check_window(output, batch, dim, start, size) for start in starts]  # checks every window
        self._is_checked = any(results)

    def _check_window(self, output: Tensor, batch: Mapping[str, Tensor], dim: int, start: int, size: int) -> bool:
        """Compares the loss of a window with the sum over its halves. Returns True if they are equal, or cannot be compared;
        False if the losses are 0 or not finite. Raises RunError "loss-not-additive" if they differ.
        """
        half = size // 2
        spans = (start, size), (start, half), (start + half, half), (start, size)

        def window_loss(start: int, size: int) -> Tensor:
            """Returns the loss of `size` positions from `start` on, computed in fp64 if the loss supports it."""
            part = {}
            for name, value in batch.items():
                sequence_dim = self.fields[name].sequence_dim
                part[name] = value if sequence_dim is None else value.narrow(sequence_dim, start, size)
            window = output.narrow(dim, start, size)
            try:
                return loss.loss(window.double(), part)
            except RuntimeError:  # the loss has tensors of the model's dtype
                return loss.loss(window, part)

        try:
            with torch.random.fork_rng([output.device] if output.device.type == "cuda" else []):
                # Called on a copy: a loss may have state, such as a count of its calls.
                loss = deepcopy(self.loss) if isinstance(self.loss, nn.Module) else copy(self.loss)
                losses = [window_loss(*span) for span in spans]
        except Exception:  # the loss may not support a part of an output, another dtype, or a copy
            return True  # the loss cannot be checked, and is not tried again in every forward
        window_total, left, right, window_total_again = map(float, losses)
        scale = max(abs(window_total), abs(left), abs(right))
        limit = 1e-6 if all(loss.dtype == torch.float64 for loss in losses) else _NARROW_TOLERANCE
        if not 0 < scale < float("inf"):
            return False  # no label counts in this window
        if abs(left + right - window_total) <= limit * scale or window_total != window_total_again:
            return True
        message = (
            f"the loss of {size} positions is {window_total:g}, but the losses of the halves add up to {left:g} + {right:g} = "
            f"{left + right:g}, so the loss combines positions, but each rank of `sp` has only a slice"
        )
        hint = 'return a sum over positions, with labels that the data shifts, or set sequence = "whole" in [loss]'
        raise RunError("loss-not-additive", message, path=("parallel", "sp"), hint=hint)

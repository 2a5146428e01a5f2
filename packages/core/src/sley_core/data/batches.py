"""Collates samples into batches, checks batches, and splits them into microbatches and sequence slices.

    samples of one dp coordinate     [b, s]
                                 ┌─────┼─────┐        split along each field's `sequence_dim`; a field without one is
    slices of sp = 3           [b, s/3] ... [b, s/3]  complete in every slice (`cu_seqlens` refers to the full sequence)

If sequences are split, every batch has a field `positions`: the dataset's own, or the indices in the full sequence. Without it,
a model that counts the positions of its input would start every slice at 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from sley_core.data.dataset import Batch, Collate, DataInfo, Field, Sample
from sley_core.errors import KeyPath, PlanError, RunError, format_cause
from sley_core.protocols import Loss


def narrow_batch(
    batch: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    index: int,
    num_parts: int,
    dim: Literal["batch", "sequence"] = "batch",
) -> Batch:
    """Returns part `index` of `num_parts` equal parts of a batch: a microbatch if `dim` is "batch", a slice if it is
    "sequence".

    The tensors of the result are views, in the order of `fields`. A field without the dim is complete in every part. Raises
    RunError "batch-fields" for missing or undeclared fields, and "batch-size" for a field that does not divide into equal
    parts.
    """
    assert 0 <= index < num_parts, (index, num_parts)
    _check_fields(batch, fields)
    part = {}
    for name, field in fields.items():
        part[name] = value = batch[name]
        field_dim = field.batch_dim if dim == "batch" else field.sequence_dim
        if field_dim is not None:
            if field_dim >= value.ndim or value.shape[field_dim] % num_parts:
                shape = tuple(value.shape)
                message = f"field `{name}` of shape {shape} does not divide into {num_parts} along dim {field_dim}"
                raise RunError("batch-size", message)
            size = value.shape[field_dim] // num_parts
            part[name] = value.narrow(field_dim, index * size, size)
    return part


def count_microbatches(batch: Mapping[str, Tensor], fields: Mapping[str, Field], micro_size: int) -> int:
    """Returns the number of microbatches of `micro_size` samples in `batch`, at least one.

    Raises RunError "batch-fields" for missing or undeclared fields, and "batch-size" if fields have different numbers of
    samples or the number is not a positive multiple of `micro_size`.
    """
    _check_fields(batch, fields)
    sizes = {name: _num_samples(name, batch[name], field) for name, field in fields.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise RunError("batch-size", f"field `{name}` has {size} samples, but `{first}` has {sizes[first]}")
    num_microbatches, remainder = divmod(sizes[first], micro_size)
    if remainder or not num_microbatches:
        message = f"{sizes[first]} samples of this rank are not a multiple of [batch] micro_size = {micro_size}"
        raise RunError("batch-size", message, hint="use one or more microbatches of equal size")
    return num_microbatches


def _num_samples(name: str, value: Tensor, field: Field) -> int:
    if not isinstance(value, Tensor):
        raise RunError("batch-fields", f"field `{name}` must be a tensor, but is a {type(value).__name__}")
    if field.batch_dim >= value.ndim:
        raise RunError("batch-size", f"field `{name}` of shape {tuple(value.shape)} has no dim {field.batch_dim}")
    return value.shape[field.batch_dim]


def _check_fields(batch: Mapping[str, Tensor], fields: Mapping[str, Field]) -> None:
    if batch.keys() != fields.keys():
        message = f"a batch must have the declared fields {sorted(fields)}, but has {sorted(batch)}"
        raise RunError("batch-fields", message)


def collate_function(dataset: Any) -> Collate:
    """Returns the dataset's own `collate`, or else a function that stacks samples by `stack_samples`."""
    collate = getattr(dataset, "collate", None)
    if collate is not None:
        return collate  # type: ignore[no-any-return]  # part of the protocol `Dataset`
    fields: Mapping[str, Field] = dataset.info.fields
    return lambda samples: stack_samples(samples, fields)


def stack_samples(samples: Sequence[Sample], fields: Mapping[str, Field]) -> Batch:
    """Stacks each field of `samples` along its `batch_dim`. Raises RunError "data-sample" for a wrong field, dtype or shape."""
    for row, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            message = f"row {row} of the batch is a {type(sample).__name__}, not a dict of tensors"
            raise RunError("data-sample", message, hint="return a dict of tensors from `__getitem__` or `__iter__`")
        if sample.keys() != fields.keys():
            message = f"row {row} of the batch must have the declared fields {sorted(fields)}, but has {sorted(sample)}"
            raise RunError("data-sample", message, hint="return every declared field in every sample, and no others")
    return {name: _stack_field(name, field, samples) for name, field in fields.items()}


def _stack_field(name: str, field: Field, samples: Sequence[Sample]) -> Tensor:
    values = [sample[name] for sample in samples]
    dtype = getattr(torch, field.dtype)
    for row, value in enumerate(values):
        if not isinstance(value, Tensor) or value.dtype != dtype:
            actual = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise RunError("data-sample", f"field `{name}` of row {row} must be a tensor of {dtype}, but is {actual}")
    try:
        return torch.stack(values, dim=field.batch_dim)
    except (RuntimeError, IndexError) as error:
        message = f"the samples of the field `{name}` cannot be stacked along dim {field.batch_dim}: {format_cause(error)}"
        hint = "return samples of equal shape, or give the dataset a `collate(samples)` method that pads them"
        raise RunError("data-sample", message, hint=hint) from error


def check_tokens(batch: Mapping[str, Tensor], info: DataInfo, samples: Sequence[int] | None = None) -> None:
    """Raises RunError "token-out-of-range" if a token id is not in [0, vocab_size). Negative labels are allowed.

    Does not check missing fields, fields whose `ids` is None, and data without a `vocab_size`. samples: the sample number of
    each row, for the error (`Feed.samples`).
    """
    if info.vocab_size is None:
        return
    for name, field in info.fields.items():
        if field.ids is None or name not in batch or not batch[name].numel():
            continue
        value = batch[name]
        low, high = value.aminmax()
        if high >= info.vocab_size or (low < 0 and field.ids == "token"):
            raise _token_error(name, value, field, info.vocab_size, samples)


def _token_error(name: str, value: Tensor, field: Field, vocab_size: int, samples: Sequence[int] | None) -> RunError:
    is_invalid = value >= vocab_size
    if field.ids == "token":
        is_invalid |= value < 0
    index = is_invalid.nonzero()[0].tolist()
    token = int(value[tuple(index)])
    row = index.pop(field.batch_dim)
    sample = f"row {row} of the batch" if samples is None else f"sample {samples[row]}"
    position = f" at position {index[0] if len(index) == 1 else tuple(index)}" if index else ""
    message = f"field `{name}` has the token id {token} in {sample}{position}; the vocabulary has {vocab_size}"
    hint = "use the tokenizer of the data, or correct `vocab_size` or `dtype` of `[data]`"
    return RunError("token-out-of-range", message, hint=hint)


POSITIONS = "positions"
"""The name of the field with the positions in the full sequence."""

_ROUNDING = 1e-5
"""The relative tolerance of sums of loss weights, which may be class weights summed in fp32."""


def check_additive(
    loss: Loss, batch: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], name: str, path: KeyPath, hint: str
) -> None:
    """Raises RunError "loss-not-additive" unless the loss weights of `parts` add up to that of `batch`.

    If all weights are integers (counts), they must add up exactly; otherwise, within the rounding of fp32. name: what the error
    calls the parts. path, hint: of the error.
    """
    total, weights = loss.weight(batch), [loss.weight(part) for part in parts]
    are_counts = all(float(weight).is_integer() for weight in (*weights, total))
    if abs(sum(weights) - total) > (1e-9 if are_counts else _ROUNDING) * abs(total):
        terms = " + ".join(f"{weight:g}" for weight in weights[:4]) + (" + ..." if len(weights) > 4 else "")
        raise RunError(
            "loss-not-additive",
            f"the loss weights of the {len(parts)} {name} must add up to that of the batch, {total:g}, but their sum is "
            f"{terms} = {sum(weights):g}",
            path=path,
            hint=hint,
        )


def sliced_info(info: DataInfo, num_slices: int) -> DataInfo:
    """Returns the declaration of the data with a field `positions`, which slices of sequences need; `info` itself for one
    slice.

    Raises PlanError "sequence-field" if no field has a sequence dim, or the data's own `positions` has none, and
    "sequence-does-not-divide" if the length is not a multiple of `num_slices`.
    """
    if num_slices == 1:
        return info
    positions = info.fields.get(POSITIONS)
    if _sequence_field(info.fields) is None or (positions is not None and positions.sequence_dim is None):
        fields = "no field of the data declares" if positions is None else f"the field `{POSITIONS}` does not declare"
        message = f"`sp = {num_slices}` splits sequences, but {fields} a sequence dim"
        hint = "set `sequence_dim = 1` in `[data.fields.NAME]`, or use `Field(..., sequence_dim=1)` in the dataset"
        raise PlanError("sequence-field", message, path=("data",), hint=hint)
    if info.sequence is not None and info.sequence % num_slices:
        message = f"the sequence length must be a multiple of sp = {num_slices}, but is {info.sequence}"
        raise PlanError("sequence-does-not-divide", message, path=("data",), hint="change `sequence` or `sp`")
    return info if positions is not None else replace(info, fields={**info.fields, POSITIONS: Field("int64", 0, 1)})


class SequenceSlicer:
    """Narrows batches to slice `index` of `num_slices`.

    fields: the fields of a full batch. loss: the loss on ranks that compute it, else None. The first call checks that the loss
    weights of the slices add up to the weight of the batch.
    """

    def __init__(self, fields: Mapping[str, Field], num_slices: int, index: int, loss: Loss | None = None) -> None:
        self.fields = fields
        self.num_slices = num_slices
        self.index = index
        self._sequence = _sequence_field(fields) or ""
        self._unchecked_loss = loss

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns this rank's slice of `batch`. Its tensors are views, except for `positions` if the slicer adds them.

        Raises the errors of `narrow_batch`, and RunError "loss-not-additive" if the loss weight of the first batch is not the
        sum of its slices' weights.
        """
        if self.num_slices == 1:
            return batch
        if self._unchecked_loss is not None:
            parts = [self._slice(batch, index) for index in range(self.num_slices)]
            hint = (
                "use a loss that sums over positions, and set `sequence_dim` of the fields that it reads; or set "
                'sequence = "whole" in [loss]'
            )
            check_additive(self._unchecked_loss, batch, parts, "slices", ("parallel", "sp"), hint)
            self._unchecked_loss = None
        return self._slice(batch, self.index)

    def _slice(self, batch: Mapping[str, Tensor], index: int) -> Batch:
        """Returns slice `index`, with `positions` in the full sequence, int64 [b, s / num_slices], if the data has none."""
        part = narrow_batch(batch, self.fields, index, self.num_slices, dim="sequence")
        if POSITIONS not in part:
            field, value = self.fields[self._sequence], part[self._sequence]
            assert field.sequence_dim is not None, field
            length = value.shape[field.sequence_dim]
            positions = torch.arange(index * length, (index + 1) * length)
            part[POSITIONS] = positions.repeat(value.shape[field.batch_dim], 1)
        return part


def _sequence_field(fields: Mapping[str, Field]) -> str | None:
    return next((name for name, field in fields.items() if field.sequence_dim is not None), None)

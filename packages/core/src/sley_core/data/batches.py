"""Batches: samples are collated as their fields declare, checked, cut along samples, and sliced along sequences for `sp`.

Positions in a slice stay global:

    samples of one dp coordinate     [b, s]
                                 ┌─────┼─────┐        cut along each field's `sequence_dim`; a field without one is
    slices of sp = 3           [b, s/3] ... [b, s/3]  full in every slice (`cu_seqlens` refers to the full sequence)

A model that counts positions from the length of its input would count every slice from 0. So with split sequences every batch
has a field `positions`: the data's own, or the indices in the full sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sley_core.data.dataset import Batch, Collate, DataInfo, Field, Sample
from sley_core.errors import PlanError, RunError

if TYPE_CHECKING:
    from sley_core.protocols import Loss


def cut(
    batch: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    index: int,
    num_parts: int,
    dim: Literal["batch", "sequence"] = "batch",
) -> Batch:
    """Returns part `index` of `num_parts` equal ones: a micro-batch for dim "batch", a sequence slice for "sequence".

    Parts are views, in the order of `fields`; a field without that dim (`sequence_dim = None`) is full in every part. Raises
    RunError if the batch lacks a field, has an undeclared one, or does not divide.
    """
    assert 0 <= index < num_parts, (index, num_parts)
    _check_fields(batch, fields)
    part = {}
    for name, field in fields.items():
        part[name] = value = batch[name]
        along = field.batch_dim if dim == "batch" else field.sequence_dim
        if along is not None:
            if along >= value.ndim or value.shape[along] % num_parts:
                message = f"field `{name}` of shape {tuple(value.shape)} does not divide into {num_parts} along dim {along}"
                raise RunError("batch-size", message)
            size = value.shape[along] // num_parts
            part[name] = value.narrow(along, index * size, size)
    return part


def count_micros(batch: Mapping[str, Tensor], fields: Mapping[str, Field], micro_size: int) -> int:
    """Returns how many micro-batches of `micro_size` samples `batch` contains, at least one. Raises RunError if it lacks a
    field, has an undeclared one, or different numbers of samples, or if that number is not a multiple of `micro_size`.
    """
    _check_fields(batch, fields)
    sizes = {name: _num_samples(name, batch[name], field) for name, field in fields.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise RunError("batch-size", f"field `{name}` has {size} samples, and `{first}` has {sizes[first]}")
    num_micros, left = divmod(sizes[first], micro_size)
    if left or not num_micros:
        message = f"{sizes[first]} samples of this rank are no multiple of [batch] micro_size = {micro_size}"
        raise RunError("batch-size", message, hint="a step takes one micro-batch or more, all of one size")
    return num_micros


def _num_samples(name: str, value: Tensor, field: Field) -> int:
    """Returns the number of samples in one field; raises RunError "batch-fields" or "batch-size"."""
    if not isinstance(value, Tensor):
        raise RunError("batch-fields", f"field `{name}` is a {type(value).__name__}, not a tensor")
    if field.batch_dim >= value.ndim:
        raise RunError("batch-size", f"field `{name}` of shape {tuple(value.shape)} has no dim {field.batch_dim}")
    return value.shape[field.batch_dim]


def _check_fields(batch: Mapping[str, Tensor], fields: Mapping[str, Field]) -> None:
    if batch.keys() != fields.keys():
        message = f"a batch has the fields {sorted(batch)}; the data set declares {sorted(fields)}"
        raise RunError("batch-fields", message)


def collate_of(dataset: Any) -> Collate:
    """Returns the dataset's own `collate`, or `stack` by its fields."""
    own = getattr(dataset, "collate", None)
    if own is not None:
        return own  # type: ignore[no-any-return]  # the protocol of a dataset says what it is
    fields: Mapping[str, Field] = dataset.info.fields
    return lambda samples: stack(samples, fields)


def stack(samples: Sequence[Sample], fields: Mapping[str, Field]) -> Batch:
    """Stacks each field of the samples along a new dim, its `batch_dim`. Raises RunError naming field and row."""
    for row, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            message = f"row {row} of the batch is a {type(sample).__name__}, not a dict of tensors"
            raise RunError("data-sample", message, hint="what a sample is comes from `__getitem__` or `__iter__`")
        if sample.keys() != fields.keys():
            message = f"row {row} of the batch has the fields {sorted(sample)}; declared are {sorted(fields)}"
            raise RunError("data-sample", message, hint="every sample must have every declared field, and no other")
    return {name: _stack_field(name, field, samples) for name, field in fields.items()}


def _stack_field(name: str, field: Field, samples: Sequence[Sample]) -> torch.Tensor:
    """Stacks one field; raises RunError "data-sample" for another dtype than declared or for unequal shapes."""
    values = [sample[name] for sample in samples]
    for row, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise RunError("data-sample", f"field `{name}` of row {row} is a {type(value).__name__}, not a tensor")
        if value.dtype != getattr(torch, field.dtype):
            raise RunError("data-sample", f"field `{name}` of row {row} is {value.dtype}; declared is {field.dtype}")
        if value.shape != values[0].shape:
            message = f"field `{name}` is {tuple(values[0].shape)} in row 0 and {tuple(value.shape)} in row {row}"
            hint = "make all samples of one shape, or give the dataset a `collate(samples)` that pads them"
            raise RunError("data-sample", message, hint=hint)
    if max(field.batch_dim, field.sequence_dim or 0) > values[0].ndim:
        dims = f"batch_dim {field.batch_dim} and sequence_dim {field.sequence_dim}"
        raise RunError("data-sample", f"field `{name}` of {values[0].ndim} dims per sample has no {dims}")
    return torch.stack(values, dim=field.batch_dim)


def check_tokens(batch: Mapping[str, Tensor], info: DataInfo, samples: Sequence[int] | None = None) -> None:
    """Raises RunError "token-out-of-range" for a value that is not a token id; costs one pass over those fields.

    Tokens must lie in [0, vocab_size); negative labels are ignored by the loss and allowed. Fields whose `ids` is None,
    missing fields, and data without a vocabulary are not checked.
    samples: names of the rows for the error (`Feed.samples`); by default their numbers in the batch.
    """
    if info.vocab_size is None:
        return
    for name, field in info.fields.items():
        if field.ids is None or name not in batch or not batch[name].numel():
            continue
        value = batch[name]
        low, high = value.aminmax()
        if high >= info.vocab_size or (low < 0 and field.ids == "token"):
            raise _error(name, value, field, info.vocab_size, samples)


def _error(name: str, value: Tensor, field: Field, vocab_size: int, samples: Sequence[int] | None) -> RunError:
    """Returns the error for the first bad id in `value`, with its sample and position."""
    wrong = value >= vocab_size
    if field.ids == "token":
        wrong |= value < 0
    place = wrong.nonzero()[0].tolist()
    found = int(value[tuple(place)])
    row = place.pop(field.batch_dim)
    where = f"row {row} of the batch" if samples is None else f"sample {samples[row]}"
    position = f" at position {place[0] if len(place) == 1 else tuple(place)}" if place else ""
    message = f"field `{name}` has the token id {found} in {where}{position}; the vocabulary has {vocab_size}"
    hint = "the data was made with another tokenizer, or `vocab_size` or `dtype` of `[data]` is wrong"
    return RunError("token-out-of-range", message, hint=hint)


POSITIONS = "positions"
_ROUNDING = 1e-5
"""Relative tolerance between the sum of the parts' weights and the weight of the whole: class weights are sums in fp32."""


def adds_up(parts: Sequence[float], whole: float) -> bool:
    """Returns whether the loss weights `parts` sum to `whole`: exactly for integers (counts), else within fp32 rounding."""
    counts = all(float(part).is_integer() for part in (*parts, whole))
    return abs(sum(parts) - whole) <= (1e-9 if counts else _ROUNDING) * abs(whole)


def sliced_info(info: DataInfo, num_slices: int) -> DataInfo:
    """Returns the data's info for a model whose sequences `num_slices` ranks share: with a field `positions`. Raises PlanError
    "sequence-field" if no field, or `positions` itself, declares no sequence dim, and "sequence-does-not-divide".
    """
    if num_slices == 1:
        return info
    known = info.fields.get(POSITIONS)
    if _sequence_field(info.fields) is None or (known is not None and known.sequence_dim is None):
        what = "no field" if known is None else f"not the field `{POSITIONS}`"
        message = f"`sp = {num_slices}` splits sequences, but {what} of the data declares a sequence dim"
        hint = "declare it: `sequence_dim = 1` in `[data.fields.NAME]`, or `Field(..., sequence_dim=1)` in the data set"
        raise PlanError("sequence-field", message, path=("data",), hint=hint)
    if info.sequence is not None and info.sequence % num_slices:
        message = f"sequence = sp x slice fails: {info.sequence} is no multiple of {num_slices}"
        raise PlanError("sequence-does-not-divide", message, path=("data",), hint="change `sequence` or `sp`")
    fields = info.fields if known is not None else {**info.fields, POSITIONS: Field("int64", 0, 1)}
    return replace(info, fields=fields)


class Slices:
    """Cuts full batches to slice `index` of `num_slices`. fields: as the data declares a full batch. loss: given on the rank
    that computes it; its weight of the first batch is checked to add up over slices.
    """

    def __init__(self, fields: Mapping[str, Field], num_slices: int, index: int, loss: Loss | None = None) -> None:
        self.fields = fields
        self.num_slices = num_slices
        self.index = index
        self._sequence = _sequence_field(fields) or ""
        self._unproven = loss

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the slice of `batch`: views, except for `positions` if it has to be added.

        Raises RunError as `cut` does, and "loss-not-additive" if the loss weight of the first batch is not the sum of
        its slices' weights: such a loss counts something once per slice.
        """
        if self.num_slices == 1:
            return batch
        if self._unproven is not None:
            whole = self._unproven.weight(batch)
            parts = [self._unproven.weight(self._slice(batch, index)) for index in range(self.num_slices)]
            if not adds_up(parts, whole):
                weights = " + ".join(f"{part:g}" for part in parts)
                message = f"the loss weight of a batch is {whole:g}, but its slices weigh {weights} = {sum(parts):g}"
                hint = (
                    "a loss under `sp` sums over positions, and the fields that it reads need a `sequence_dim`; one that needs "
                    'whole sequences has sequence = "whole" in [loss]'
                )
                raise RunError("loss-not-additive", message, path=("parallel", "sp"), hint=hint)
            self._unproven = None
        return self._slice(batch, self.index)

    def _slice(self, batch: Mapping[str, Tensor], index: int) -> Batch:
        """Returns what the `sp` rank `index` has of `batch`: views of its part of each field along the field's `sequence_dim`,
        and fields without one whole. Adds global `positions` [b, s / num_slices] if the data has none.
        """
        part = cut(batch, self.fields, index, self.num_slices, dim="sequence")
        if POSITIONS not in part:
            field, value = self.fields[self._sequence], part[self._sequence]
            assert field.sequence_dim is not None, field
            length = value.shape[field.sequence_dim]
            places = torch.arange(index * length, (index + 1) * length)
            part[POSITIONS] = places.repeat(value.shape[field.batch_dim], 1)
        return part


def _sequence_field(fields: Mapping[str, Field]) -> str | None:
    """Returns the first field that sequence parallelism cuts, or None."""
    return next((name for name, field in fields.items() if field.sequence_dim is not None), None)

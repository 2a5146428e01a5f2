"""Cuts a batch along its samples or its sequence, only by what each field declares.

Parts are views: no byte is copied, and writes to a part are writes to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from sley_core.data.dataset import Batch, Field
from sley_core.errors import RunError


def cut(
    batch: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    index: int,
    num_parts: int,
    dim: Literal["batch", "sequence"] = "batch",
) -> Batch:
    """Returns part `index` of `num_parts` equal ones: a micro-batch for dim "batch", a sequence slice for "sequence".

    The parts are views. Fields are in the order of `fields`; one without that dim (`sequence_dim = None`) is full in
    every part. Raises RunError if the batch lacks a field, has an undeclared one, or does not divide.
    """
    assert 0 <= index < num_parts, (index, num_parts)
    _check_fields(batch, fields)
    return {name: _part(name, batch[name], field, index, num_parts, dim) for name, field in fields.items()}


def count_micros(batch: Mapping[str, Tensor], fields: Mapping[str, Field], micro_size: int) -> int:
    """Returns how many micro-batches of `micro_size` samples `batch` contains, at least one.

    Raises RunError if the batch lacks a field or has an undeclared one, if its fields have different numbers of
    samples, or if that number is not a multiple of `micro_size`.
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


def _part(
    name: str, value: Tensor, field: Field, index: int, num_parts: int, dim: Literal["batch", "sequence"]
) -> Tensor:
    """Returns the part of one field as a view; the full tensor if the field does not have that dim."""
    along = field.batch_dim if dim == "batch" else field.sequence_dim
    if along is None:
        return value
    if along >= value.ndim or value.shape[along] % num_parts:
        message = f"field `{name}` of shape {tuple(value.shape)} does not divide into {num_parts} along dim {along}"
        raise RunError("batch-size", message)
    size = value.shape[along] // num_parts
    return value.narrow(along, index * size, size)

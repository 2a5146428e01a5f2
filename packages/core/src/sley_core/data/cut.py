"""Cuts a batch along its samples or its sequence, by what each field declares and nothing else.

Cuts are views: no byte is copied, and what is written to a part is written to the batch.
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
    """Part `index` of `num_parts` equal ones: micro-batches along "batch", slices along "sequence".

    A field without that dim (`sequence_dim = None`) is in every part whole.
    Raises RunError if the batch lacks a field, has one that is not declared, or does not divide.
    """
    assert 0 <= index < num_parts, (index, num_parts)
    if batch.keys() != fields.keys():
        message = f"a batch has the fields {sorted(batch)}; the data set declares {sorted(fields)}"
        raise RunError("batch-fields", message)
    return {name: _part(name, batch[name], fields[name], index, num_parts, dim) for name in batch}


def _part(
    name: str, value: Tensor, field: Field, index: int, num_parts: int, dim: Literal["batch", "sequence"]
) -> Tensor:
    along = field.batch_dim if dim == "batch" else field.sequence_dim
    if along is None:
        return value
    if along >= value.ndim or value.shape[along] % num_parts:
        message = f"field `{name}` of shape {tuple(value.shape)} does not divide into {num_parts} along dim {along}"
        raise RunError("batch-size", message)
    size = value.shape[along] // num_parts
    return value.narrow(along, index * size, size)

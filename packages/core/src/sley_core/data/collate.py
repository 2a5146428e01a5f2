"""Collates samples into a batch as the fields declare; a sample that differs from the declaration is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sley_core.data.dataset import Batch, Collate, Field, Sample
from sley_core.errors import RunError


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
            raise RunError(
                "data-sample",
                f"field `{name}` is {tuple(values[0].shape)} in row 0 and {tuple(value.shape)} in row {row}",
                hint="make all samples of one shape, or give the dataset a `collate(samples)` that pads them",
            )
    if max(field.batch_dim, field.sequence_dim or 0) > values[0].ndim:
        dims = f"batch_dim {field.batch_dim} and sequence_dim {field.sequence_dim}"
        raise RunError("data-sample", f"field `{name}` of {values[0].ndim} dims per sample has no {dims}")
    return torch.stack(values, dim=field.batch_dim)

"""Opens datasets, collates their samples into batches, checks batches, and splits them into microbatches and sequence slices.

A factory may return any map-style dataset or stream of dicts of tensors. Its `fields`, `vocab_size` and `sequence` come from
`[data]`, or else from its `info`. If neither has `fields`, they are inferred from the first sample: each key becomes a field
with the tensor's dtype, stacked along dim 0, without a sequence dim. A sample of int64 `tokens` and `labels` of equal length
has `TOKEN_FIELDS`.

    samples of one dp coordinate     [b, s]
                                 ┌─────┼─────┐        split along each field's `sequence_dim`; a field without one is
    slices of sp = 3           [b, s/3] ... [b, s/3]  complete in every slice (`cu_seqlens` refers to the full sequence)

If sequences are split, every batch has a `positions` field: the dataset's own, or the indices in the full sequence. Without it,
a model that counts the positions of its input would start every slice at 0.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from sley_core.data.dataset import (
    TOKEN_FIELDS,
    AnyDataset,
    Batch,
    Collate,
    DataConfig,
    DataContext,
    DataInfo,
    FactoryDataConfig,
    Field,
    Sample,
    find_state_methods,
    is_stream,
)
from sley_core.errors import KeyPath, PlanError, RunError, format_cause
from sley_core.protocols import Loss
from sley_core.records import import_factory
from sley_core.table import Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Component


def open_dataset(component: "Component", context: DataContext) -> AnyDataset:
    """Returns the dataset of the plan's table `component`, with an `info`. Reads no sample. Raises PlanError "data-factory" if
    a factory returns no dataset, and "held-out" if the factory of held-out data has no parameter `context`.
    """
    dataset = component.build(context)
    if component.record is not None:
        return cast(AnyDataset, dataset)
    if context.split == "held_out":
        factory = import_factory(component.name, component.path, component.document.folder)
        if "context" not in inspect.signature(factory).parameters:
            message = f"there is no held-out data to evaluate on: `{component.name}` has no parameter `context`"
            hint = 'add a parameter `context`; `context.split` is "train" or "held_out"'
            raise PlanError("held-out", message, path=("evaluation",), hint=hint)
    assert isinstance(component.config, FactoryDataConfig), component.config
    return wrap_dataset(dataset, component.config, component.name)


def count_samples_per_epoch(dataset: AnyDataset, config: Table) -> int | None:
    """Returns `len(dataset)`, which may load the data, or None for a stream. config: the table of the data. Raises PlanError
    "data-changed" if `samples_per_epoch` in `config` is not this number, or is set for a stream.
    """
    assert isinstance(config, DataConfig), config
    if is_stream(dataset):
        if config.samples_per_epoch is not None:
            message = "a stream has no fixed number of samples per epoch"
            raise PlanError("data-changed", message, path=("data", "samples_per_epoch"), hint="remove the key")
        return None
    count = len(cast(Any, dataset))
    config.check_num_samples(count)
    return count


def wrap_dataset(dataset: Any, config: FactoryDataConfig, name: str) -> AnyDataset:
    """Returns a wrapper of `dataset` with an `info`. name: the factory's name, for errors. Raises PlanError "data-factory" for
    an object that is neither a map-style dataset nor a stream that can start over.
    """
    if is_stream(dataset):
        type_name = type(dataset).__name__
        if not hasattr(dataset, "__iter__"):
            hint = "return an object with `__len__` and `__getitem__`, or with `__iter__`"
            raise _factory_error(f"`{name}` returned a {type_name}, which is not a dataset", hint)
        if hasattr(dataset, "__next__"):
            hint = "return an object whose `__iter__` starts over, such as a class with `def __iter__(self): yield ...`"
            raise _factory_error(f"`{name}` returned a {type_name}, which can be iterated only once", hint)
        return _StreamWrapper(dataset, config, name)
    return _DatasetWrapper(dataset, config, name)


class _InfoWrapper:
    """Wraps a dataset, adds an `info`, and forwards all other public attributes."""

    def __init__(self, dataset: Any, config: FactoryDataConfig, name: str) -> None:
        self._dataset = dataset
        self._config = config
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    @cached_property
    def info(self) -> DataInfo:
        """The declaration of a batch. Reads the first sample if neither the plan nor the dataset declares the fields."""
        info = getattr(self._dataset, "info", None)
        keys: dict[str, Any] = {key: getattr(self._config, key) for key in ("vocab_size", "sequence")}
        if self._config.fields is not None:
            keys["fields"] = {name: Field(**field.model_dump()) for name, field in self._config.fields.items()}
        elif not isinstance(info, DataInfo):
            keys["fields"] = self._infer_fields()
        keys = {key: value for key, value in keys.items() if value is not None}
        return replace(info, **keys) if isinstance(info, DataInfo) else DataInfo(**keys)

    def _infer_fields(self) -> dict[str, Field]:
        """Returns the fields of the first sample. Raises PlanError "data-factory" if it is not a dict of tensors."""
        try:
            sample = self._read_first()
            collate = getattr(self._dataset, "collate", None)
            sample = collate([sample]) if collate is not None else sample
        except (Exception, SystemExit) as error:
            raise _factory_error(f"the first sample of `{self._name}` failed: {format_cause(error)}") from error
        if not isinstance(sample, Mapping) or not sample:
            raise _factory_error(f"a sample of `{self._name}` is a {type(sample).__name__}, not a dict of tensors")
        for key, value in sample.items():
            if not isinstance(value, torch.Tensor):
                message = f"`{key}` in a sample of `{self._name}` must be a tensor, but is a {type(value).__name__}"
                raise _factory_error(message, "return dicts of tensors")
        if _are_token_ids(sample, num_dims=1 if collate is None else 2):
            return dict(TOKEN_FIELDS)
        return {str(key): Field(str(value.dtype).removeprefix("torch.")) for key, value in sample.items()}

    def _read_first(self) -> Any:
        """Returns the first sample; None for an empty stream. A stream keeps its state."""
        stream = self._dataset
        if not is_stream(stream):
            return stream[0]
        names = find_state_methods(stream)
        state = None if names is None else deepcopy(getattr(stream, names[0])())
        sample = next(iter(stream), None)
        if names is not None:
            getattr(stream, names[1])(state)
        return sample


class _DatasetWrapper(_InfoWrapper):
    def __len__(self) -> int:
        try:
            return len(self._dataset)
        except (Exception, SystemExit) as error:
            raise _factory_error(f"the length of `{self._name}` failed: {format_cause(error)}") from error

    def __getitem__(self, index: int) -> Sample:
        return cast(Sample, self._dataset[index])


class _StreamWrapper(_InfoWrapper):
    def __iter__(self) -> Iterator[Sample]:
        return iter(self._dataset)


def _factory_error(message: str, hint: str | None = None) -> PlanError:
    return PlanError("data-factory", message, path=("data", "factory"), hint=hint)


def _are_token_ids(values: Mapping[str, Tensor], num_dims: int) -> bool:
    if values.keys() != TOKEN_FIELDS.keys():
        return False
    kinds = {(value.dtype, value.ndim, value.shape) for value in values.values()}
    return len(kinds) == 1 and next(iter(kinds))[:2] == (torch.int64, num_dims)


def narrow_batch(
    batch: Mapping[str, Tensor],
    fields: Mapping[str, Field],
    index: int,
    num_parts: int,
    dim: Literal["batch", "sequence"] = "batch",
) -> Batch:
    """Returns part `index` of `num_parts` equal parts of a batch: a microbatch if `dim` is "batch", or else a slice.

    The tensors are views, in the order of `fields`. A field without a sequence dim is complete in every slice. Raises RunError
    "batch-fields" for missing or undeclared fields, and "batch-size" for a field that does not divide into equal parts.
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
                message = f"field `{name}` of shape {shape} cannot be split into {num_parts} equal parts along dim {field_dim}"
                raise RunError("batch-size", message)
            size = value.shape[field_dim] // num_parts
            part[name] = value.narrow(field_dim, index * size, size)
    return part


def count_microbatches(batch: Mapping[str, Tensor], fields: Mapping[str, Field], micro_size: int) -> int:
    """Returns the number of microbatches of `micro_size` samples in `batch`. Raises RunError "batch-fields" for missing or
    undeclared fields, and "batch-size" unless all fields have the same number of samples, a positive multiple of `micro_size`.
    """
    _check_fields(batch, fields)
    sizes = {name: _num_samples(name, batch[name], field) for name, field in fields.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise RunError("batch-size", f"field `{name}` has {size} samples, but `{first}` has {sizes[first]}")
    num_microbatches, remainder = divmod(sizes[first], micro_size)
    if remainder or not num_microbatches:
        message = (
            f"the number of samples of this rank must be a multiple of [batch] micro_size = {micro_size}, but is {sizes[first]}"
        )
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
    """Returns the batch of `samples`. Raises RunError "data-sample" for a wrong field or dtype, or different shapes."""
    for row, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            message = f"row {row} of the batch is a {type(sample).__name__}, not a dict of tensors"
            raise RunError("data-sample", message, hint="return a dict of tensors from `__getitem__` or `__iter__`")
        if sample.keys() != fields.keys():
            message = f"row {row} of the batch must have the declared fields {sorted(fields)}, but has {sorted(sample)}"
            raise RunError("data-sample", message, hint="return every declared field in every sample, and no others")
    return {name: _stack_field(name, field, samples) for name, field in fields.items()}


def _stack_field(name: str, field: Field, samples: Sequence[Sample]) -> Tensor:
    """Returns the values of the field `name`, stacked. Raises RunError "data-sample" for a wrong dtype or unequal shapes."""
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
    """Raises RunError "token-out-of-range" if a token id is not in [0, vocab_size). Negative labels are allowed. samples: the
    sample number of each row, for the error (`Feed.samples`); if it is None, the error names the row of the batch.
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
    """Returns RunError "token-out-of-range" for the first invalid id in `value`, the values of the field `name`."""
    is_invalid = value >= vocab_size
    if field.ids == "token":
        is_invalid |= value < 0
    index = is_invalid.nonzero()[0].tolist()
    token = int(value[tuple(index)])
    row = index.pop(field.batch_dim)
    sample = f"row {row} of the batch" if samples is None else f"sample {samples[row]}"
    position = f" at position {index[0] if len(index) == 1 else tuple(index)}" if index else ""
    message = f"field `{name}` has the token id {token} in {sample}{position}; the vocabulary has {vocab_size} tokens"
    hint = "use the tokenizer of the data, or correct `vocab_size` or `dtype` of `[data]`"
    return RunError("token-out-of-range", message, hint=hint)


POSITIONS = "positions"
"""The name of the field that has the position of each element in the full sequence."""


def check_additive(
    loss: Loss, batch: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], name: str, path: KeyPath, hint: str
) -> None:
    """Raises RunError "loss-not-additive" with `path` and `hint` unless the loss weights of `parts` add up to the weight of
    `batch`: exactly if all are integers, or else within a relative error of 1e-5. name: the name of the parts in the message.
    """
    total, weights = loss.weight(batch), [loss.weight(part) for part in parts]
    are_counts = all(float(weight).is_integer() for weight in (*weights, total))
    if abs(sum(weights) - total) > (1e-9 if are_counts else 1e-5) * abs(total):
        terms = " + ".join(f"{weight:g}" for weight in weights[:4]) + (" + ..." if len(weights) > 4 else "")
        raise RunError(
            "loss-not-additive",
            f"the loss weights of the {len(parts)} {name} must add up to the loss weight of the batch, "
            f"{total:g}, but their sum is {terms} = {sum(weights):g}",
            path=path,
            hint=hint,
        )


def add_positions(info: DataInfo, num_slices: int) -> DataInfo:
    """Returns `info`; if there are several slices and `info` has no field `positions`, adds this field (int64 [b, s]). Raises
    PlanError "sequence-field" if no field has a sequence dim, or the data's own `positions` has none, and
    "sequence-does-not-divide" if the sequence length is not a multiple of `num_slices`.
    """
    if num_slices == 1:
        return info
    positions = info.fields.get(POSITIONS)
    if _find_sequence_field(info.fields) is None or (positions is not None and positions.sequence_dim is None):
        fields = "no field of the data declares" if positions is None else f"the field `{POSITIONS}` does not declare"
        message = f"`sp = {num_slices}` splits sequences, but {fields} a sequence dim"
        hint = "set `sequence_dim = 1` in `[data.fields.NAME]`, or use `Field(..., sequence_dim=1)` in the dataset"
        raise PlanError("sequence-field", message, path=("data",), hint=hint)
    if info.sequence is not None and info.sequence % num_slices:
        message = f"the sequence length must be a multiple of sp = {num_slices}, but is {info.sequence}"
        raise PlanError("sequence-does-not-divide", message, path=("data",), hint="change `sequence` or `sp`")
    return info if positions is not None else replace(info, fields={**info.fields, POSITIONS: Field("int64", 0, 1)})


class SequenceSlicer:
    """Narrows batches to slice `index` of `num_slices`. fields: the fields of a full batch. loss: the loss of the run, or None
    to omit the check of the first call, which requires that the loss weights of the slices add up to the weight of the batch.
    """

    def __init__(self, fields: Mapping[str, Field], num_slices: int, index: int, loss: Loss | None = None) -> None:
        self.fields = fields
        self.num_slices = num_slices
        self.index = index
        self._sequence_field = _find_sequence_field(fields) or ""
        self._unchecked_loss = loss

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns this rank's slice of `batch`: views, except for `positions` if the slicer adds them. Raises the errors of
        `narrow_batch`, and in the first call the errors of `check_additive`.
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
            field, value = self.fields[self._sequence_field], part[self._sequence_field]
            assert field.sequence_dim is not None, field
            length = value.shape[field.sequence_dim]
            positions = torch.arange(index * length, (index + 1) * length)
            part[POSITIONS] = positions.repeat(value.shape[field.batch_dim], 1)
        return part


def _find_sequence_field(fields: Mapping[str, Field]) -> str | None:
    return next((name for name, field in fields.items() if field.sequence_dim is not None), None)

"""Builds datasets, and declares the fields of the user's own datasets, which may be any map-style dataset or stream of dicts of
tensors.

`fields`, `vocab_size` and `sequence` come from `[data]`, or else from the dataset's `info`. If neither has `fields`, they are
inferred from the first sample: each key becomes a field with the tensor's dtype, stacked along dim 0, without a sequence dim. A
sample that consists of int64 `tokens` and `labels` of equal length has `TOKEN_FIELDS`.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from sley_core.data.dataset import (
    TOKEN_FIELDS,
    AnyDataset,
    DataConfig,
    DataContext,
    DataInfo,
    FactoryDataConfig,
    Field,
    Sample,
    is_stream,
)
from sley_core.errors import PlanError, format_cause
from sley_core.plan.plan import Component
from sley_core.records import import_factory
from sley_core.table import Table


def open_dataset(component: Component, context: DataContext) -> AnyDataset:
    """Builds the dataset of the plan's table `component`, and gives it an `info`. Reads no sample.

    Raises PlanError "data-factory" if a factory does not return a dataset, and "held-out" if held-out data is needed but the
    factory has no parameter `context`.
    """
    dataset = component.build(context)
    if component.record is not None:
        return cast(AnyDataset, dataset)
    if context.split == "held_out":
        factory = import_factory(component.name, component.path, component.document.folder)
        if "context" not in inspect.signature(factory).parameters:
            message = f"there is no held-out data to evaluate: `{component.name}` has no parameter `context`"
            hint = 'add a parameter `context`, whose `split` is "train" or "held_out"'
            raise PlanError("held-out", message, path=("evaluation",), hint=hint)
    assert isinstance(component.config, FactoryDataConfig), component.config
    return declare_dataset(dataset, component.config, component.name)


def samples_per_epoch(dataset: AnyDataset, config: Table) -> int | None:
    """Returns `len(dataset)`, which may load the data, or None for a stream.

    config: the table of the data. Raises PlanError "data-changed" if its `samples_per_epoch` differs, or is set for a stream.
    """
    assert isinstance(config, DataConfig), config
    if is_stream(dataset):
        if config.samples_per_epoch is not None:
            message = "a stream has no number of samples per epoch"
            raise PlanError("data-changed", message, path=("data", "samples_per_epoch"), hint="remove the key")
        return None
    count = len(cast(Any, dataset))
    config.check_num_samples(count)
    return count


def declare_dataset(dataset: Any, config: FactoryDataConfig, name: str) -> AnyDataset:
    """Wraps `dataset`, and gives it an `info` from `config`, the dataset's own `info` and its first sample.

    name: the factory's name, for errors. Raises PlanError "data-factory" for an object that is neither a map-style dataset nor
    a stream that can start over.
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
        config = self._config
        dataset_info = getattr(self._dataset, "info", None)
        if config.fields is not None:
            fields = {name: Field(**field.model_dump()) for name, field in config.fields.items()}
            info = replace(dataset_info, fields=fields) if isinstance(dataset_info, DataInfo) else DataInfo(fields)
        else:
            info = dataset_info if isinstance(dataset_info, DataInfo) else DataInfo(self._infer_fields())
        vocab_size = info.vocab_size if config.vocab_size is None else config.vocab_size
        sequence = info.sequence if config.sequence is None else config.sequence
        return replace(info, vocab_size=vocab_size, sequence=sequence)

    def _infer_fields(self) -> dict[str, Field]:
        """Returns the fields of the first sample. Raises PlanError "data-factory" if it is not a dict of tensors."""
        try:
            sample = next(iter(self._dataset), None) if is_stream(self._dataset) else self._dataset[0]
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
    types = {(value.dtype, value.shape) for value in values.values()}
    return len(types) == 1 and all(value.dtype == torch.int64 and value.ndim == num_dims for value in values.values())

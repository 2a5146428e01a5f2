"""Datasets of your own: any map-style dataset or stream of dicts of tensors, torch's and Hugging Face's included.

The layout of a batch comes from the plan (`fields`, `vocab_size`, `sequence` of `[data]`), else from the dataset's
`info`, else from its first sample: each key is then a field of that tensor's dtype, samples lie along dim 0, and no
field has a sequence dim, unless a sample is int64 `tokens` and `labels` of one length, which are token ids. Each of the
three keys is decided separately: a plan may add a vocabulary to inferred fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

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
from sley_core.errors import PlanError, cause
from sley_core.factory import import_factory
from sley_core.table import Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Component

KEY = ("data", "factory")
INVALID = "data-factory"


def open_dataset(component: Component, context: DataContext) -> AnyDataset:
    """Builds the dataset of a plan's `[data]` and gives it an `info`; reads no sample yet.

    Raises PlanError if a factory does not return a dataset, or does not take `context` though held-out data is wanted.
    """
    dataset = component.build(context)
    if component.record is not None:
        return cast(AnyDataset, dataset)
    if context.split == "held_out":
        factory = import_factory(component.name, component.path, component.document.folder)
        if "context" not in inspect.signature(factory).parameters:
            message = f"there is no held-out data to evaluate on: `{component.name}` does not take `context`"
            hint = 'name a parameter `context`; its `split` is "train" or "held_out"'
            raise PlanError("held-out", message, path=("evaluation",), hint=hint)
    assert isinstance(component.config, FactoryDataConfig), component.config
    return declared(dataset, component.config, component.name)


def samples_per_epoch(dataset: AnyDataset, config: Table) -> int | None:
    """Returns `len(dataset)`, which a run writes into its resolved plan, or None for a stream; loads the data.

    config: the `[data]` table. Raises PlanError "data-changed" if it was pinned to another number.
    """
    assert isinstance(config, DataConfig), config
    if is_stream(dataset):
        if config.samples_per_epoch is not None:
            message = "a stream has no number of samples per epoch"
            raise PlanError("data-changed", message, path=("data", "samples_per_epoch"), hint="remove the key")
        return None
    count = len(cast(Any, dataset))
    problem = config.changed(count)
    if problem is not None:
        raise PlanError(problem.code, problem.message, path=problem.path, hint=problem.hint)
    return count


def declared(dataset: Any, config: FactoryDataConfig, name: str) -> AnyDataset:
    """Wraps `dataset` with an `info` taken from `config`, the dataset and its first sample. name: the factory's, for errors.
    Raises PlanError "data-factory" for an object that is neither a dataset nor a stream that can start over.
    """
    if is_stream(dataset):
        if not hasattr(dataset, "__iter__"):
            kind = type(dataset).__name__
            raise _invalid(f"`{name}` gave a {kind}, which is no data set", "give `__len__` and `__getitem__`, or `__iter__`")
        if hasattr(dataset, "__next__"):
            kind = type(dataset).__name__
            hint = "give an object whose `__iter__` starts over, such as a class with `def __iter__(self): yield ...`"
            raise _invalid(f"`{name}` gave a {kind}, which can be walked only once", hint)
        return _DeclaredStream(dataset, config, name)
    return _DeclaredDataset(dataset, config, name)


class _Declared:
    """Wraps a dataset and adds an `info`; other public attributes are the dataset's own."""

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
        """The fields and sizes of a batch; reads the first sample if neither the plan nor the dataset gives the fields."""
        config = self._config
        own = getattr(self._dataset, "info", None)
        if config.fields is not None:
            fields = {name: Field(**field.model_dump()) for name, field in config.fields.items()}
            info = replace(own, fields=fields) if isinstance(own, DataInfo) else DataInfo(fields)
        else:
            info = own if isinstance(own, DataInfo) else DataInfo(self._inferred())
        vocab_size = info.vocab_size if config.vocab_size is None else config.vocab_size
        sequence = info.sequence if config.sequence is None else config.sequence
        return replace(info, vocab_size=vocab_size, sequence=sequence)

    def _inferred(self) -> dict[str, Field]:
        """Returns the fields of the first sample; raises PlanError "data-factory" if that is not a dict of tensors."""
        try:
            first = self._first()
            own = getattr(self._dataset, "collate", None)
            first = own([first]) if own is not None else first
        except (Exception, SystemExit) as error:
            raise _invalid(f"the first sample of `{self._name}` failed: {cause(error)}", None) from error
        if not isinstance(first, Mapping) or not first:
            raise _invalid(f"a sample of `{self._name}` is a {type(first).__name__}, not a dict of tensors", None)
        for key, value in first.items():
            if not isinstance(value, torch.Tensor):
                message = f"`{key}` in a sample of `{self._name}` is a {type(value).__name__}, not a tensor"
                raise _invalid(message, "a sample is a dict of tensors")
        if _are_token_ids(first, num_dims=1 if own is None else 2):
            return dict(TOKEN_FIELDS)
        return {str(key): Field(str(value.dtype).removeprefix("torch.")) for key, value in first.items()}

    def _first(self) -> Any:
        raise NotImplementedError


class _DeclaredDataset(_Declared):
    def __len__(self) -> int:
        try:
            return len(self._dataset)
        except (Exception, SystemExit) as error:
            raise _invalid(f"the length of `{self._name}` failed: {cause(error)}", None) from error

    def __getitem__(self, index: int) -> Sample:
        return cast(Sample, self._dataset[index])

    def _first(self) -> Any:
        return self._dataset[0]


class _DeclaredStream(_Declared):
    def __iter__(self) -> Iterator[Sample]:
        return iter(self._dataset)

    def _first(self) -> Any:
        return next(iter(self._dataset), None)


def _invalid(message: str, hint: str | None) -> PlanError:
    return PlanError(INVALID, message, path=KEY, hint=hint)


def _are_token_ids(values: Mapping[str, Tensor], num_dims: int) -> bool:
    """Returns whether `values` are tokens with their labels: `tokens` and `labels`, int64, of one shape."""
    if values.keys() != TOKEN_FIELDS.keys():
        return False
    kinds = {(value.dtype, value.shape) for value in values.values()}
    return len(kinds) == 1 and all(value.dtype == torch.int64 and value.ndim == num_dims for value in values.values())

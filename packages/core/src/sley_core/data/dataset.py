"""A dataset declares its fields, and gives samples as dicts of tensors; nothing here imports torch.

A sample is one row of a batch, without the batch dim. Samples are stacked into a batch along each field's `batch_dim`.
What cuts a batch (data parallelism, micro-batches, sequence parallelism) follows the declared `Field`s alone, so a
dataset with fields of its own needs no code elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import model_validator

from sley_core.records import Problem
from sley_core.table import NonNegative, Positive, Table

if TYPE_CHECKING:
    from torch import Tensor


Split = Literal["train", "held_out"]
Sample: TypeAlias = "dict[str, Tensor]"
Batch: TypeAlias = "dict[str, Tensor]"
Collate: TypeAlias = Callable[[Sequence[Sample]], Batch]

IGNORED = -100
"""The label of a position that has no weight in the loss (PyTorch's default `ignore_index`)."""


@dataclass(frozen=True)
class Field:
    """One tensor of a batch.

    dtype: the name of a torch dtype, "int64".
    batch_dim: the dim of a **batch** along which samples lie; a sample does not have it.
    sequence_dim: the dim of a batch that sequence parallelism cuts, or None for a field that every slice needs whole.
    ids: "token" for token ids, all in [0, vocab_size); "label" for token ids of which negative ones are ignored. Either
        is checked against the vocabulary, batch by batch; None is not.
    """

    dtype: str
    batch_dim: int = 0
    sequence_dim: int | None = None
    ids: Literal["token", "label"] | None = None


TOKEN_FIELDS = {"tokens": Field("int64", 0, 1, ids="token"), "labels": Field("int64", 0, 1, ids="label")}
"""Tokens and labels, both [b, s]. A label is the next token: labels are shifted already."""

BOUNDARY_FIELDS = {"positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}
"""Documents in a row of tokens: positions [b, s] within each document, and the starts of the documents, [b, n + 1]."""


@dataclass(frozen=True)
class DataInfo:
    """What a model may know of its data: the fields of a batch, and sizes where there are any.

    vocab_size: token ids are in [0, vocab_size).
    sequence: positions per sample, where all samples have the same number.
    """

    fields: Mapping[str, Field]
    vocab_size: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class DataContext:
    """Describes the use of a dataset.

    seed: the run's seed. split: the part of the data to read. num_samples: the number of samples in all steps of the run, over
    all ranks; None if it is not known.
    """

    seed: int = 0
    split: Split = "train"
    num_samples: int | None = None


@runtime_checkable
class Dataset(Protocol):
    """Samples by index: any index in [0, len) at any time, also from a thread other than the main one.

    Reading a sample may draw from torch's default generator, `random` and numpy: they are seeded by the sample's number, so
    that every layout and a resumed run read the same. A forward uses them at the same time, and the two take turns; a
    generator of the dataset's own, best seeded by the index, avoids that. A dataset may also have `collate(samples) -> batch`;
    without it samples are stacked along each field's `batch_dim`. `set_epoch(epoch)` is called before the samples of an epoch
    are read. `data_digest`, a text that differs if any sample does, lets a resumed run refuse data that have changed; without
    it a few samples are compared, and the run only says that they differ.

    A dataset may order each epoch itself, as a mixture does: with `is_ordered = True` it is read from 0 to its end. `sources`,
    names, says that its samples come from several: an int64 field `source` then has the index of each sample's, and rows of
    metrics have loss and share of each.
    """

    @property
    def info(self) -> DataInfo:
        """The fields of a batch; must be cheap, because it is also asked when only the model is built."""
        ...

    def __len__(self) -> int:
        """Returns the number of samples in an epoch."""
        ...

    def __getitem__(self, index: int, /) -> Sample: ...


@runtime_checkable
class Stream(Protocol):
    """Samples in their own order, without a length. When a finite stream ends, the next `iter` starts a new epoch.

    A stream without a state of its own starts over at each `iter`, and a restored run reads it up to its position
    again. With `state() -> Any` and `restore(state)`, or torch's names `state_dict` and `load_state_dict`, the first
    `iter` after a restore goes on from there, and the next one starts over. The last batch before is read again: if the state
    does not lead back to it, the stream is read from its beginning. `set_epoch(epoch)` is called before each `iter`.
    """

    @property
    def info(self) -> DataInfo:
        """As `Dataset.info`."""
        ...

    def __iter__(self) -> Iterator[Sample]: ...


AnyDataset: TypeAlias = Dataset | Stream


def is_stream(dataset: Any) -> bool:
    """Returns whether samples can only be iterated: no `__len__` and `__getitem__`, or torch's `IterableDataset`.

    An `IterableDataset` inherits a `__getitem__` that only raises, and may have a length.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(dataset).__mro__}
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return not indexed or "torch.utils.data.dataset.IterableDataset" in names


class DataRows(Protocol):
    """The samples of one split as lists of numbers, without torch, for `train-cli data show`.

    counts: `documents`, `tokens` and `trained` (those that a label asks for), `positions` of all samples, `padding` (those
    without a token), `longest` (the tokens of a document), `dropped` (samples left out or cut, by reason). None counts the
    samples one by one, by source if there is an attribute `sources` with names.
    """

    @property
    def counts(self) -> Mapping[str, Any] | None: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Sequence[int]]:
        """Returns the fields of sample `index`."""
        ...


class TextIds(Protocol):
    """Converts text to token ids and back.

    size: ids are below it. end: the id after which a document ends; None if there is none. num_before: how many of the ids that
    `encode` returns come before the text. is_bytes: whether each id is a byte of the text.
    """

    size: int
    end: int | None
    num_before: int
    is_bytes: bool

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, as a document that begins with it has them."""
        ...

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields text as ids come; each character as soon as all of its ids are there."""
        ...


SOURCE = "source"
"""The field with the source of each sample, int64 [b], of a data set that has `sources`."""


DType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class DataConfig(Table):
    """What every `[data]` table has."""

    shuffle: bool = True
    """Whether each epoch has an order of its own, drawn from the seed; a stream keeps its own order."""

    samples_per_epoch: Positive | None = None
    """Samples in an epoch; a run writes it into its resolved plan, and data with another number of samples are refused."""

    def whole(self) -> Self:
        """Returns the table of all samples, in the training split: with none held out, where it has `held_out` and
        `held_out_files`; for `[evaluation.sets.NAME]`. Raises ValueError for a table that has none.
        """
        nothing = {"held_out": 0.0, "held_out_files": ()}
        return self.model_copy(update={key: value for key, value in nothing.items() if key in type(self).model_fields})

    def changed(self, num_samples: int) -> Problem | None:
        """Returns the problem if the plan was resolved for another number of samples than `num_samples`, else None."""
        if self.samples_per_epoch in (None, num_samples):
            return None
        return Problem(
            ("data", "samples_per_epoch"),
            f"the data has {num_samples} samples per epoch, and this plan was made for {self.samples_per_epoch}",
            "the data has changed since; remove `samples_per_epoch` to train on what is there now",
            "data-changed",
        )


class FieldConfig(Table):
    """One field of a batch that a factory's dataset gives."""

    dtype: DType
    """The torch dtype of the field."""

    batch_dim: NonNegative = 0
    """The dim of a batch along which samples lie."""

    sequence_dim: NonNegative | None = None
    """The dim of a batch that sequence parallelism may cut."""

    ids: Literal["token", "label"] | None = None
    """Whether values are token ids, to be checked against `vocab_size`; negative labels are ignored."""

    @model_validator(mode="after")
    def _possible(self) -> FieldConfig:
        if self.batch_dim == self.sequence_dim:
            raise ValueError(f"`batch_dim` and `sequence_dim` are both {self.batch_dim}")
        return self


class FactoryDataConfig(DataConfig):
    """A dataset of one's own, made by `factory`; what it does not declare itself can be declared here."""

    fields: dict[str, FieldConfig] | None = None
    """The fields of a batch; left out, taken from the dataset's `info`, or else from its first sample."""

    vocab_size: Positive | None = None
    """Token ids are below this."""

    sequence: Positive | None = None
    """Positions per sample."""

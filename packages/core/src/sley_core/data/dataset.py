"""The interface of datasets, and the declaration of a batch's fields. Imports no torch.

A sample is a dict of tensors: one row of a batch, without the batch dim. A batch stacks samples along the `batch_dim` of each
field. The declared `Field`s determine how a batch is split between ranks and into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import NonNegativeInt, PositiveInt, model_validator

from sley_core.errors import KeyPath, PlanError
from sley_core.table import Table

if TYPE_CHECKING:
    from torch import Tensor


Split = Literal["train", "held_out"]
Sample: TypeAlias = "dict[str, Tensor]"  # one row of a batch, without the batch dim, by field
Batch: TypeAlias = "dict[str, Tensor]"  # stacked samples, by field
Collate: TypeAlias = Callable[[Sequence[Sample]], Batch]
"""A function that makes a batch of samples."""

IGNORE_INDEX = -100
"""The label of a position that has no weight in the loss (PyTorch's default `ignore_index`)."""


@dataclass(frozen=True)
class Field:
    """Declares one tensor of a batch.

    dtype: the name of a torch dtype, such as "int64".
    batch_dim: the dim of a **batch** along which samples are stacked; samples do not have this dim.
    sequence_dim: the dim of a batch that sequence parallelism splits; None if every slice needs the complete field.
    ids: "token" for token ids, which must be in [0, vocab_size); "label" for token ids that may also be negative, which means
        ignored. Every batch is checked against the vocabulary. None for other values, which are not checked.
    """

    dtype: str
    batch_dim: int = 0
    sequence_dim: int | None = None
    ids: Literal["token", "label"] | None = None


TOKEN_FIELDS = {"tokens": Field("int64", 0, 1, ids="token"), "labels": Field("int64", 0, 1, ids="label")}
"""Tokens and labels, both [b, s]. The labels are shifted: each label is the next token."""

BOUNDARY_FIELDS = {"positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}
"""The fields that describe the documents in a row of tokens: the positions within each document [b, s], and the starts of the
documents [b, n + 1], from 0 on, padded with the length of the row.
"""


@dataclass(frozen=True)
class DataInfo:
    """Declares the data for a model: the fields of a batch, and two sizes, which are None if they are undefined.

    vocab_size: the number of token ids; all ids are in [0, vocab_size).
    sequence: the number of positions of every sample.
    """

    fields: Mapping[str, Field]
    vocab_size: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class DataContext:
    """Describes the run for which a dataset is built. seed: the run's seed. split: the split to read. num_samples: the number
    of samples in all steps of the run, over all ranks; None if it is unknown.
    """

    seed: int = 0
    split: Split = "train"
    num_samples: int | None = None


@runtime_checkable
class Dataset(Protocol):
    """Returns samples by index, in any order and from any thread.

    Reading a sample may draw from torch's default generator, `random` and numpy. The run seeds them by the sample's number, so
    every layout and every resumed run reads the same samples. The reads of such a dataset do not run beside a step, since the
    model also uses these generators: each step waits for its samples. To avoid the waits, draw from your own generator, seeded
    by the index.

    Optional attributes:

    collate: `collate(samples) -> batch`; by default samples are stacked along each field's `batch_dim`.
    set_epoch: `set_epoch(epoch)` is called before the samples of an epoch are read.
    data_digest: a text that changes whenever a sample changes. With it, a resumed run rejects changed data. Without it, the run
        compares a few samples and only warns.
    counts: a dict of numbers for `train-cli data show`: `documents`, `tokens`, `trained` (the tokens that have a label),
        `positions` (of all samples), `padding` (positions), `longest` (the number of tokens of the longest document), and
        `dropped` (a dict with the number of skipped or truncated samples for each reason). Without it, the command reads and
        counts all samples.
    draws_random: True if the reads draw from these generators. Set it if the reads of the first batch may draw nothing, for
        example because only some samples are augmented. Without it, the run finds out from the reads of the first batch.
    is_ordered: True if the dataset orders each epoch itself. The run then reads it from the first index to the last.
    sources: the names of the sources of a mixture. An int64 field `source` has the index of each sample's source. Metrics rows
        then have the loss of each source, and its share of the samples.
    """

    @property
    def info(self) -> DataInfo:
        """The declaration of a batch. Must be cheap, because it is also read when only the model is built."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@runtime_checkable
class Stream(Protocol):
    """Yields samples in its own order. When a finite stream has ended, the next `iter` starts a new epoch.

    A stream without a state starts over at each `iter`; a resumed run then skips the samples that it has already trained on. A
    stream with `state() -> Any` and `restore(state)`, or `state_dict` and `load_state_dict`, must continue from the restored
    state at the first `iter` after the restore, and start over at the next. A resumed run first reads the last batch again. If
    the batch differs, the run reads the stream from its beginning. `set_epoch(epoch)`, if defined, is called before each
    `iter`.
    """

    @property
    def info(self) -> DataInfo: ...

    def __iter__(self) -> Iterator[Sample]: ...


AnyDataset: TypeAlias = Dataset | Stream


def find_state_methods(stream: Any) -> tuple[str, str] | None:
    """Returns the names of the methods that read and set the state of a stream; None if it has no state."""
    pairs = (("state", "restore"), ("state_dict", "load_state_dict"))
    return next((names for names in pairs if all(hasattr(stream, name) for name in names)), None)


def is_stream(dataset: Any) -> bool:
    """Returns whether samples can only be iterated over: the dataset lacks `__len__` or `__getitem__`, or is a torch
    `IterableDataset`, whose `__getitem__` always raises.
    """
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(dataset).__mro__}
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return not has_index or "torch.utils.data.dataset.IterableDataset" in names


class TextIds(Protocol):
    """Converts text to token ids and back.

    size: the number of ids. end: the id that ends a document; None if there is none. num_before: the number of special ids that
    `encode` puts before the text. is_bytes: whether each id stands for one byte of the text.
    """

    size: int
    end: int | None
    num_before: int
    is_bytes: bool

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a document that begins with `text`."""
        ...

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields each character of the text as soon as `ids` has yielded all ids of this character."""
        ...


SOURCE = "source"
"""In a dataset with `sources`, the name of the field that has the index of each sample's source, int64 [b]."""


class DataConfig(Table):
    """The base class of every dataset record's config."""

    shuffle: bool = True
    """Whether each epoch has a different random order. A stream always keeps its own order."""

    samples_per_epoch: PositiveInt | None = None
    """The number of samples in an epoch. A run writes it into its resolved plan; a run whose plan has it rejects data with a
    different number.
    """

    def include_held_out(self) -> Self:
        """Returns the table with all samples in the training split, for `[evaluation.sets.NAME]`. Raises ValueError for a
        dataset that cannot include its held-out samples.
        """
        empty = {"held_out": 0.0, "held_out_files": ()}
        return self.model_copy(update={key: value for key, value in empty.items() if key in type(self).model_fields})

    def check_num_samples(self, num_samples: int, path: KeyPath = ("data",)) -> None:
        """Raises PlanError "data-changed" if `samples_per_epoch` is set, but is not `num_samples`. path: this table's path."""
        if self.samples_per_epoch not in (None, num_samples):
            counts = f"it has {num_samples} samples per epoch, but the plan expects {self.samples_per_epoch}"
            hint = "remove `samples_per_epoch` to train on the current data"
            raise PlanError("data-changed", f"the data has changed: {counts}", path=(*path, "samples_per_epoch"), hint=hint)


class FieldConfig(Table):
    """Declares one field of a batch, for a dataset that a factory builds."""

    dtype: Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    """The torch dtype of the field."""

    batch_dim: NonNegativeInt = 0
    """The dim of a batch along which samples are stacked."""

    sequence_dim: NonNegativeInt | None = None
    """The dim of a batch that sequence parallelism may split."""

    ids: Literal["token", "label"] | None = None
    """The kind of the values: "token" for token ids; "label" for labels, which may be negative and are then ignored. Both are
    checked against `vocab_size`. By default, the values are not checked.
    """

    @model_validator(mode="after")
    def _check_dims(self) -> FieldConfig:
        if self.batch_dim == self.sequence_dim:
            raise ValueError(f"`batch_dim` and `sequence_dim` are both {self.batch_dim}")
        return self


class FactoryDataConfig(DataConfig):
    """Your own dataset, which `factory` builds. The keys replace the values of the dataset's `info`."""

    fields: dict[str, FieldConfig] | None = None
    """The fields of a batch; by default the fields of the dataset's `info`, or else of its first sample."""

    vocab_size: PositiveInt | None = None
    """The number of token ids."""

    sequence: PositiveInt | None = None
    """The number of positions per sample."""


NUM_ROUNDS = 10
"""The number of rounds of the Feistel network of `Order`, as in NIST SP 800-38G for small domains."""


class Order:
    """A permutation of the samples of an epoch: `order[position]` is the number of a sample; both are in [0, num_samples).

    The permutation depends only on (num_samples, seed, epoch); with `shuffle = False` it is the identity. Each item is computed
    on access, so an epoch of any size needs no memory and can start at any position.

    With n samples and a = ceil(sqrt(n)), the permutation is a Feistel network over pairs (left, right) in [0, a)^2, applied
    again until the result is below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The round
    function is BLAKE2b.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        assert num_samples > 0, num_samples
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._side = isqrt(num_samples - 1) + 1
        self._key = blake2b(f"order/{seed}/{epoch}".encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> int:
        """Returns the number of the sample at `position`. Raises IndexError outside [0, num_samples)."""
        if not 0 <= position < self._num_samples:
            raise IndexError(position)
        if not self._shuffle:
            return position
        sample = self._permute(position)
        while sample >= self._num_samples:
            sample = self._permute(sample)
        return sample

    def _permute(self, value: int) -> int:
        left, right = divmod(value, self._side)
        for number in range(NUM_ROUNDS):
            digest = blake2b(right.to_bytes(8, "little"), digest_size=8, key=self._key, salt=bytes([number])).digest()
            left, right = right, (left + int.from_bytes(digest, "little")) % self._side
        return left * self._side + right

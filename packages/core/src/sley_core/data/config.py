"""The keys that every `[data]` table has, and the table of a dataset of one's own."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from sley_core.records import Problem
from sley_core.table import NonNegative, Positive, Table

DType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class DataConfig(Table):
    """What every `[data]` table has."""

    shuffle: bool = True
    """Whether each epoch has an order of its own, drawn from the seed; a stream keeps its own order."""

    samples_per_epoch: Positive | None = None
    """Samples in an epoch; a run writes it into its resolved plan, and data with another number of samples are refused."""

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

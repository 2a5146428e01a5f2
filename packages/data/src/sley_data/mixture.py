"""The dataset `data.mixture`: the samples of several datasets, in an order that depends only on the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, cast

import torch

from sley_core.api.data import SOURCE, DataContext, DataInfo, Dataset, Field, Sample, is_stream
from sley_core.api.parts import SeededReader, open_dataset, read_sample, set_epoch
from sley_core.errors import PlanError, RunError
from sley_data.config import MixtureConfig, SourceTable
from sley_data.interleave import MixtureOrder, source_seed
from sley_data.sources import locate_errors, source_component, split_sources

_NUM_PROBES = 4
"""The number of reads of each source that are checked for random numbers."""


@dataclass
class _Source:
    """An open source. number: the index of its table. reader: seeds each read of a sample. epoch: the dataset's epoch."""

    table: SourceTable
    number: int
    dataset: Dataset
    seed: int
    reader: SeededReader
    epoch: int = -1


class Mixture:
    """The samples of several datasets, each with the field `source`, in the order of `interleave.MixtureOrder`.

    Raises PlanError "mixture-sources" if the sources have different fields, vocabulary sizes or lengths, and PlanError or
    RunError "data-exhausted" if a source with `exhausted = "refuse"` has too few samples.
    """

    is_ordered = True

    def __init__(self, config: MixtureConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._epoch = 0
        sources = split_sources(config, context.split)
        self.sources = tuple(table.name for _, table in sources)
        self._sources = [self._open_source(number, table) for number, table in sources]

    def _open_source(self, number: int, table: SourceTable) -> _Source:
        seed = source_seed(self._context, table)
        with locate_errors(number, table.name):
            dataset = open_dataset(source_component(self._config, number), replace(self._context, seed=seed, num_samples=None))
        if is_stream(dataset) or hasattr(dataset, "collate"):
            reason = "is a stream" if is_stream(dataset) else "has its own `collate`"
            hint = "use a dataset with a length, whose samples can be stacked"
            raise PlanError(
                "mixture-sources", f"the source `{table.name}` {reason}", path=("data", "sources", number), hint=hint
            )
        return _Source(table, number, cast(Dataset, dataset), seed, SeededReader(seed, _NUM_PROBES))

    @cached_property
    def info(self) -> DataInfo:
        """The common info of the sources, with the field `source`. Loads tokenizers, but no data."""
        infos = []
        for source in self._sources:
            with locate_errors(source.number, source.table.name):
                infos.append(source.dataset.info)
        reference = infos[0]
        for source, info in zip(self._sources, infos, strict=True):
            for key in ("fields", "vocab_size", "sequence"):
                expected, value = getattr(reference, key), getattr(info, key)
                if value != expected or SOURCE in info.fields:
                    values = f"`{self.sources[0]}` has {_format(expected)}, `{source.table.name}` has {_format(value)}"
                    message = f"all sources of a mixture need the same {key}: {values}"
                    raise PlanError("mixture-sources", message, path=("data", "sources", source.number))
        return replace(reference, fields={**reference.fields, SOURCE: Field("int64")})

    @cached_property
    def lengths(self) -> list[int]:
        """The number of samples of each source. Loads the data."""
        lengths = []
        for source in self._sources:
            with locate_errors(source.number, source.table.name):
                lengths.append(len(source.dataset))
            if not lengths[-1]:
                message = f"the source `{source.table.name}` has no samples"
                raise PlanError("data-empty", message, path=("data", "sources", source.number))
        return lengths

    @cached_property
    def _order(self) -> MixtureOrder:
        return MixtureOrder(self._config, self._context, [source.table for source in self._sources], self.lengths)

    def __len__(self) -> int:
        """Returns the number of samples per epoch.

        An epoch ends once every source has been read once, or `epochs` times. With `exhausted = "end"` or "refuse", it ends
        once the first source has been read.
        """
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of later reads."""
        if epoch and self._context.split == "train" and self._config.exhausted == "refuse":
            raise RunError("data-exhausted", f"a source of the mixture is exhausted after {len(self)} samples", path=("data",))
        self._epoch = epoch

    def locate(self, index: int) -> tuple[int, int, int]:
        """Returns the source of sample `index` of the current epoch, the source's epoch, and the sample's index there."""
        return self._order.locate(self._epoch, index)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` with the field `source`, int64. Pads `cu_seqlens` to the same length for all sources."""
        number, epoch, source_index = self.locate(index)
        source = self._sources[number]
        if epoch != source.epoch:
            set_epoch(source.dataset, epoch)
            source.epoch = epoch
        sample = self._read(source, epoch * self.lengths[number] + source_index, source_index)
        if self._num_starts is not None:
            starts = sample["cu_seqlens"]
            sample = {**sample, "cu_seqlens": torch.cat([starts, starts[-1:].expand(self._num_starts - len(starts))])}
        return {**sample, SOURCE: torch.tensor(number)}

    def _read(self, source: _Source, number: int, index: int) -> Sample:
        with locate_errors(source.number, source.table.name):
            return source.reader.read(number, partial(read_sample, source.dataset, index))

    @cached_property
    def _num_starts(self) -> int | None:
        """The largest length of `cu_seqlens` of any source, or None if samples lack that field."""
        if "cu_seqlens" not in self.info.fields:
            return None
        return max(len(self._read(source, 0, 0)["cu_seqlens"]) for source in self._sources)

    @property
    def data_notes(self) -> list[str]:
        """The notes of all sources, each with the name of its source."""
        datasets = zip(self.sources, (source.dataset for source in self._sources), strict=True)
        return [f"{name}: {note}" for name, dataset in datasets for note in getattr(dataset, "data_notes", ())]

    @property
    def data_digest(self) -> str:
        """A digest of the samples of all sources. Raises AttributeError if a source has none."""
        digests: Sequence[str] = [cast(Any, source.dataset).data_digest for source in self._sources]
        return blake2b("/".join(digests).encode(), digest_size=16).hexdigest()


def _format(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else str(value)

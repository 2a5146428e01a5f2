"""The data set `data.mixture`: samples of several data sets in one sequence, which depends on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, cast

import torch

from sley_core.api.data import SOURCE, DataContext, DataInfo, Dataset, Field, Sample, is_stream
from sley_core.api.parts import Draws, open_dataset, read_sample, set_epoch
from sley_core.errors import PlanError, RunError
from sley_data.config import MixtureConfig, SourceTable
from sley_data.sources import MixtureOrder, component_of, located, source_seed, sources_of

_LOOKS = 4
"""Reads of each source in which it is looked at whether it draws random numbers."""


@dataclass
class _Source:
    """A source that is open. number: of its table. draws: reads its samples. epoch: which it was told last."""

    table: SourceTable
    number: int
    dataset: Dataset
    seed: int
    draws: Draws
    epoch: int = -1


class Mixture:
    """Gives samples of several data sets, each with its `source`; orders them itself (see `interleave`).

    Number n of the whole run is number c of one source, and that is place c % length of epoch c // length of the source, in an
    order of its own. Raises PlanError "mixture-sources" for sources whose samples do not fit each other, and "data-exhausted",
    or RunError where only the run finds it, for a source that is needed again and must not be.
    """

    is_ordered = True

    def __init__(self, config: MixtureConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._epoch = 0
        chosen = sources_of(config, context.split)
        self.sources = tuple(table.name for _, table in chosen)
        self._sources = [self._opened(number, table) for number, table in chosen]

    def _opened(self, number: int, table: SourceTable) -> _Source:
        seed = source_seed(self._context, table)
        with located(number, table.name):
            dataset = open_dataset(component_of(self._config, number), replace(self._context, seed=seed, num_samples=None))
        if is_stream(dataset) or hasattr(dataset, "collate"):
            what = "is a stream" if is_stream(dataset) else "collates its batches itself"
            hint = "a mixture reads samples by number, and stacks them"
            raise PlanError("mixture-sources", f"the source `{table.name}` {what}", path=("data", "sources", number), hint=hint)
        return _Source(table, number, cast(Dataset, dataset), seed, Draws(seed, _LOOKS))

    @cached_property
    def info(self) -> DataInfo:
        """That of every source, and the field `source`; loads nothing but tokenizers."""
        infos = []
        for source in self._sources:
            with located(source.number, source.table.name):
                infos.append(source.dataset.info)
        first = infos[0]
        for source, info in zip(self._sources, infos, strict=True):
            for what in ("fields", "vocab_size", "sequence"):
                one, other = getattr(first, what), getattr(info, what)
                if one != other or SOURCE in info.fields:
                    names = f"`{self.sources[0]}` has {_said(one)}, `{source.table.name}` {_said(other)}"
                    message = f"samples of a mixture need the same {what}: {names}"
                    raise PlanError("mixture-sources", message, path=("data", "sources", source.number))
        return replace(first, fields={**first.fields, SOURCE: Field("int64")})

    @cached_property
    def lengths(self) -> list[int]:
        """The samples of each source; loads the data."""
        lengths = []
        for source in self._sources:
            with located(source.number, source.table.name):
                lengths.append(len(source.dataset))
            if not lengths[-1]:
                message = f"the source `{source.table.name}` has no samples"
                raise PlanError("data-empty", message, path=("data", "sources", source.number))
        return lengths

    @cached_property
    def _order(self) -> MixtureOrder:
        return MixtureOrder(self._config, self._context, self.lengths)

    def __len__(self) -> int:
        """The number of samples in an epoch: until every source has been read once; with `exhausted = "end"` or "refuse", until
        the first source has; with `epochs`, until each source has been read so often.
        """
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Is called before the samples of an epoch are read."""
        if epoch and self._context.split == "train" and self._config.exhausted == "refuse":
            raise RunError("data-exhausted", f"a source of the mixture is exhausted after {len(self)} samples", path=("data",))
        self._epoch = epoch

    def place(self, index: int) -> tuple[int, int, int]:
        """Returns the source of sample `index` of the current epoch, the source's epoch, and the sample in the source."""
        return self._order.place(self._epoch, index)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`: that of its source, with `source`, int64, and boundaries of one shape in all sources."""
        number, epoch, at = self.place(index)
        source = self._sources[number]
        if epoch != source.epoch:
            set_epoch(source.dataset, epoch)
            source.epoch = epoch
        sample = self._read(source, epoch * self.lengths[number] + at, at)
        if self._num_starts is not None:
            starts = sample["cu_seqlens"]
            sample = {**sample, "cu_seqlens": torch.cat([starts, starts[-1:].expand(self._num_starts - len(starts))])}
        return {**sample, SOURCE: torch.tensor(number)}

    def _read(self, source: _Source, number: int, index: int) -> Sample:
        with located(source.number, source.table.name):
            return source.draws.read(number, partial(read_sample, source.dataset, index))

    @cached_property
    def _num_starts(self) -> int | None:
        """The most boundaries of a sample of any source, each of which gives all its samples as many; None without any."""
        if "cu_seqlens" not in self.info.fields:
            return None
        return max(len(self._read(source, 0, 0)["cu_seqlens"]) for source in self._sources)

    @property
    def data_notes(self) -> list[str]:
        """The sentences of the sources for the user, each after the name of its source."""
        every = ((name, source.dataset) for name, source in zip(self.sources, self._sources, strict=True))
        return [f"{name}: {note}" for name, dataset in every for note in getattr(dataset, "data_notes", ())]

    @property
    def data_digest(self) -> str:
        """Differs if the samples of a source do; only there if all sources have one."""
        digests: Sequence[str] = [cast(Any, source.dataset).data_digest for source in self._sources]
        return blake2b("/".join(digests).encode(), digest_size=16).hexdigest()


def _said(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else str(value)

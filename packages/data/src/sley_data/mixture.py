"""The dataset `data.mixture`: the samples of several datasets, in an order that depends only on the seed.

Sample numbers are assigned to one source after another; the source with the largest share comes first. Let a be the share of a
source, and b the sum of the shares of this source and all later sources. The source gets round(n a / b) of the first n numbers
that are still free, for every n, and the later sources get the rest. In any range of numbers, the count of a source differs
from its share by at most about two samples. All arithmetic is in integers, and needs neither state nor tables.

                 0 1 2 3 4 5 6 7 8 9
    code, 3        x       x     x        3 of 10, spread evenly
    chats, 7     x   x x x   x x   x
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from math import lcm
from operator import sub
from typing import Any, cast

import torch

from sley_core.api.data import SOURCE, DataContext, DataInfo, Dataset, Field, Order, Sample, is_stream
from sley_core.api.parts import SeededReader, open_dataset, read_sample, set_epoch
from sley_core.errors import PlanError, RunError
from sley_data.plugin import MixtureConfig, SourceTable
from sley_data.sources import build_source_component, list_sources, locate_errors

_ALL_LENGTHS = range(1 << 62)  # all possible numbers of samples, in which `Interleaving` searches for a length by bisection


class Interleaving:
    """Assigns the numbers 0, 1, 2, ... to sources. `interleaving[n]` is the source of number n, and the index of n among the
    numbers of this source. shares: the count of each source among the first sum(shares) numbers, at least 1.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.total = sum(shares)
        sources = sorted(range(len(shares)), key=lambda source: -shares[source])
        totals = accumulate((shares[source] for source in sources), sub, initial=self.total)
        self._splits = [(source, shares[source], total) for source, total in zip(sources, totals, strict=False)]

    def __getitem__(self, number: int) -> tuple[int, int]:
        for source, share, total in self._splits:
            index = _round_share(number, share, total)
            if _round_share(number + 1, share, total) > index:
                return source, index
            number -= index
        raise AssertionError(self._splits)

    def count(self, source: int, length: int) -> int:
        """Returns the count of numbers below `length` that belong to `source`."""
        for split_source, share, total in self._splits:
            count = _round_share(length, share, total)
            if split_source == source:
                return count
            length -= count
        raise AssertionError(source)

    def shortest_prefix(self, source: int, count: int) -> int:
        """Returns the smallest n such that `count` of the first n numbers belong to `source`."""
        return bisect_left(_ALL_LENGTHS, count, key=lambda length: self.count(source, length))

    def longest_prefix(self, source: int, count: int) -> int:
        """Returns the largest n such that at most `count` of the first n numbers belong to `source`."""
        return bisect_right(_ALL_LENGTHS, count, key=lambda length: self.count(source, length)) - 1


def _round_share(count: int, share: int, total: int) -> int:  # round(count * share / total)
    return (2 * count * share + total) // (2 * total)


def to_integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns integers in the exact ratio of the decimal `weights`, such as 3 and 7 for 0.3 and 0.7."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


_NUM_PROBES = 4  # the number of first reads of each source that are watched, to find out whether reading draws random numbers


@dataclass
class _Source:
    """A source with its open dataset. number: the index of the source's table. seed: determines the order of the samples.
    reader: reads the samples with seeded generators. epoch: the current epoch of the dataset, or -1 before the first read.
    """

    table: SourceTable
    number: int
    dataset: Dataset
    seed: int
    reader: SeededReader
    epoch: int = -1


class Mixture:
    """A dataset that mixes the samples of several datasets, and adds the `source` field, the number of the sample's source.

    The c-th sample that a run reads from a source is sample c % length of the source's own order in epoch c // length. The seed
    of this order depends only on the run's seed and the source's name.

    Raises PlanError "mixture-sources" if a source is a stream or has its own `collate`, or if the sources have different
    fields, vocabulary sizes or sequence lengths. Raises PlanError "data-exhausted", or RunError in `set_epoch`, if a source has
    too few samples and the plan sets `exhausted = "refuse"`.
    """

    is_ordered = True

    def __init__(self, config: MixtureConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._epoch = 0
        self._ends_at_first_source = context.split == "train" and config.exhausted != "repeat"
        sources = list_sources(config, context.split)
        self.sources = tuple(table.name for _, table in sources)
        self._sources = [self._open_source(number, table) for number, table in sources]
        self._order = lru_cache(maxsize=2 * len(sources))(self._build_order)

    def _open_source(self, number: int, table: SourceTable) -> _Source:
        """Opens a source's dataset, which may raise errors. Raises PlanError "mixture-sources" for an unsuitable dataset."""
        seed = int.from_bytes(blake2b(f"{self._context.seed}/{table.name}".encode(), digest_size=7).digest())
        with locate_errors(number, table.name):
            dataset = open_dataset(
                build_source_component(self._config, number), replace(self._context, seed=seed, num_samples=None)
            )
        if is_stream(dataset) or hasattr(dataset, "collate"):
            reason = "is a stream" if is_stream(dataset) else "has its own `collate`"
            message = f"the source `{table.name}` {reason}"
            hint = "use a dataset that has a length and whose samples can be stacked"
            raise PlanError("mixture-sources", message, path=("data", "sources", number), hint=hint)
        reader = SeededReader(seed, _NUM_PROBES)
        reader.has_drawn = getattr(dataset, "draws_random", False)
        return _Source(table, number, cast(Dataset, dataset), seed, reader)

    @cached_property
    def info(self) -> DataInfo:
        """The info that is equal for all sources, with the additional field `source`. Loads tokenizers, but no data."""
        infos = []
        for source in self._sources:
            with locate_errors(source.number, source.table.name):
                infos.append(source.dataset.info)
        reference = infos[0]
        for source, info in zip(self._sources, infos, strict=True):
            for key in ("fields", "vocab_size", "sequence"):
                expected, value = getattr(reference, key), getattr(info, key)
                if value != expected or SOURCE in info.fields:
                    first, second = _format_value(expected), _format_value(value)
                    values = f"`{self.sources[0]}` has {first} and `{source.table.name}` has {second}"
                    message = f"all sources of a mixture must have the same `{key}`, but {values}"
                    raise PlanError("mixture-sources", message, path=("data", "sources", source.number))
        return replace(reference, fields={**reference.fields, SOURCE: Field("int64")})

    @cached_property
    def lengths(self) -> list[int]:
        """The number of samples of each source. Loads the data. Raises PlanError "data-empty" for a source without samples."""
        lengths = []
        for source in self._sources:
            with locate_errors(source.number, source.table.name):
                lengths.append(len(source.dataset))
            if not lengths[-1]:
                message = f"the source `{source.table.name}` has no samples"
                raise PlanError("data-empty", message, path=("data", "sources", source.number))
        return lengths

    @cached_property
    def _interleave(self) -> Interleaving:
        """The assignment of sample numbers to sources. Loads the data if the sources set `epochs`."""
        tables = [source.table for source in self._sources]
        if self._config.has_epochs:
            counts = [(table.epochs or 0) * length for table, length in zip(tables, self.lengths, strict=True)]
            return Interleaving([max(1, round(count)) for count in counts])
        return Interleaving(to_integer_shares([table.weight or 0 for table in tables]))

    @cached_property
    def _length(self) -> int:
        """The number of samples per epoch. Raises PlanError "data-exhausted" if a training run with `exhausted = "refuse"`
        needs more samples.
        """
        if self._config.has_epochs:
            return self._interleave.total
        find_end = self._interleave.longest_prefix if self._ends_at_first_source else self._interleave.shortest_prefix
        ends = [find_end(source, length) for source, length in enumerate(self.lengths)]
        length = min(ends) if self._ends_at_first_source else max(ends)
        num_needed = self._context.num_samples
        if self._config.exhausted == "refuse" and self._ends_at_first_source and num_needed is not None and num_needed > length:
            name = self.sources[ends.index(length)]
            message = f"the run needs {num_needed} samples, but the source `{name}` is exhausted after {length}"
            hint = f'use fewer steps, a smaller weight for `{name}`, or `exhausted = "repeat"`'
            raise PlanError("data-exhausted", message, path=("data", "exhausted"), hint=hint)
        return length

    def _build_order(self, number: int, epoch: int) -> Order:
        """Returns the order of the samples of source `number` in its epoch `epoch`."""
        source = self._sources[number]
        is_shuffled = self._config.shuffle and getattr(source.table.component.config, "shuffle", True)
        return Order(self.lengths[number], seed=source.seed, epoch=epoch, shuffle=is_shuffled)

    @property
    def draws_random(self) -> bool:
        """Whether a source draws random numbers, or has not been read often enough to know."""
        return any(source.reader.is_seeding for source in self._sources)

    def __len__(self) -> int:
        """Returns the number of samples per epoch. An epoch ends when every source has been read completely, or `epochs` times.
        In training with `exhausted = "end"` or "refuse", an epoch ends when any source has been read completely.
        """
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Begins `epoch`, from 0. Raises RunError "data-exhausted" for a second training epoch if `exhausted` is "refuse"."""
        if epoch and self._context.split == "train" and self._config.exhausted == "refuse":
            raise RunError("data-exhausted", f"a source of the mixture is exhausted after {len(self)} samples", path=("data",))
        self._epoch = epoch

    def locate(self, index: int) -> tuple[int, int, int]:
        """Returns the number of the source from which sample `index` of the current epoch comes, the epoch of this source, and
        the index of the sample in the source. Raises IndexError if `index` is not in [0, len).
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch = self._epoch
        if self._ends_at_first_source:
            source, position = self._interleave[index]
        else:
            source, samples_before = self._interleave[epoch * len(self) + index]
            epoch, position = divmod(samples_before, self.lengths[source])
        return source, epoch, self._order(source, epoch)[position]

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` of the current epoch, with the `source` field, int64 []. `cu_seqlens` is padded to one length
        for all sources. Raises IndexError if `index` is not in [0, len).
        """
        source_number, epoch, sample_index = self.locate(index)
        source = self._sources[source_number]
        if epoch != source.epoch:
            set_epoch(source.dataset, epoch)
            source.epoch = epoch
        sample = self._read_sample(source, epoch * self.lengths[source_number] + sample_index, sample_index)
        if self._cu_seqlens_length is not None:
            starts = sample["cu_seqlens"]
            sample = {**sample, "cu_seqlens": torch.cat([starts, starts[-1:].expand(self._cu_seqlens_length - len(starts))])}
        return {**sample, SOURCE: torch.tensor(source_number)}

    def _read_sample(self, source: _Source, number: int, index: int) -> Sample:
        """Returns sample `index` of `source`. number: identifies the sample and the epoch of the source, for the seed."""
        with locate_errors(source.number, source.table.name):
            return source.reader.read(number, partial(read_sample, source.dataset, index))

    @cached_property
    def _cu_seqlens_length(self) -> int | None:
        """The largest length of `cu_seqlens` in any source, or None if samples do not have that field."""
        if "cu_seqlens" not in self.info.fields:
            return None
        return max(len(self._read_sample(source, 0, 0)["cu_seqlens"]) for source in self._sources)

    @property
    def data_notes(self) -> list[str]:
        """The notes of all sources for the user. Each note begins with the name of its source."""
        datasets = zip(self.sources, (source.dataset for source in self._sources), strict=True)
        return [f"{name}: {note}" for name, dataset in datasets for note in getattr(dataset, "data_notes", ())]

    @property
    def data_digest(self) -> str:
        """A digest of the samples of all sources. Raises AttributeError if a source has no `data_digest`."""
        digests: Sequence[str] = [cast(Any, source.dataset).data_digest for source in self._sources]
        return blake2b("/".join(digests).encode(), digest_size=16).hexdigest()


def _format_value(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else str(value)

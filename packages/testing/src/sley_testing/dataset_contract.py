"""Tests what every dataset must pass; the tests of a plugin inherit them.

    class TestReviews(DatasetContract):
        data = {"use": "reviews.jsonl", "files": ["*.jsonl"], "sequence": 32}

        def write_files(self, folder):
            (folder / "a.jsonl").write_text(...)

Every rank opens the data itself, and a restarted run opens it again: they must all see the same samples under the same numbers.
The tests run in this process, through the feed that a run reads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from sley_core.data.batches import check_tokens, collate_of
from sley_core.data.dataset import AnyDataset, Batch, DataContext, Dataset, Field, Sample, Split, is_stream
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.json_text import decode_value, encode_value
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

BATCH = 4  # samples of a global batch; two ranks have half of it each

NUM_BATCHES = 6
SEED = 7


class DatasetContract:
    """Tests a dataset: inherit, set `data` to the table `[data]`, and pytest does the rest. num_samples: the most samples that
    are checked. holds_out: whether it has held-out samples.
    """

    data: ClassVar[dict[str, Any]]
    num_samples: ClassVar[int] = 24
    holds_out: ClassVar[bool] = False

    def write_files(self, folder: Path) -> None:
        """Writes the files that the table names, if any, into the folder of the plan."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Returns the plan's folder, with its files."""
        self.write_files(tmp_path)
        return tmp_path

    def test_samples_match_info(self, folder: Path) -> None:
        """Fields, dtypes, dims, token ids and length of a batch are those of `info`, and there is a sample."""
        dataset = self._open(folder)
        samples = self._samples(dataset)
        assert samples, "the data set has no samples"
        batch = collate_of(dataset)(samples)
        fields = dataset.info.fields
        assert batch.keys() == fields.keys(), f"a batch has the fields {sorted(batch)}; declared are {sorted(fields)}"
        for name, field in fields.items():
            _check_field(name, batch[name], field, len(samples), dataset.info.sequence)
        check_tokens(batch, dataset.info, range(len(samples)))

    def test_index_returns_same_sample(self, folder: Path) -> None:
        """Whenever it is read, in any order, by another rank's dataset, and in another thread."""
        dataset, other = self._open(folder), self._open(folder)
        lengths = [] if is_stream(dataset) else [len(cast(Dataset, one)) for one in (dataset, other)]
        assert len(set(lengths)) <= 1, f"two data sets of one table have different lengths: {lengths}"
        first = self._kept(dataset)
        if not is_stream(dataset):
            indexed = cast(Dataset, dataset)
            for index in reversed(self._indices(indexed)):
                assert _same(indexed[index], first[index]), f"sample {index} is another one when it is read again"
            now = len(indexed)
            assert now == lengths[0], f"the length changes when samples are read: it was {lengths[0]} and is {now}"
        there: list[dict[int, Sample]] = []
        thread = threading.Thread(target=lambda: there.append(self._kept(other)))
        thread.start()
        thread.join()
        assert there, "samples cannot be read in a thread other than the main one"
        for index, sample in first.items():
            assert _same(there[0][index], sample), f"sample {index} is another one on another rank, or in another thread"

    def test_samples_do_not_share_memory(self, folder: Path) -> None:
        """While others are read, since they become one batch."""
        dataset = self._open(folder)
        samples = dict(self._numbered(dataset))
        kept = self._kept(self._open(folder))
        for index, sample in samples.items():
            assert _same(sample, kept[index]), f"sample {index} changes while others are read: its memory is used again"

    def test_default_generator_is_unchanged(self, folder: Path) -> None:
        """The generator belongs to the forward that runs at the same time."""
        before = torch.default_generator.get_state()
        self._samples(self._open(folder))
        same = torch.equal(before, torch.default_generator.get_state())
        assert same, "reading samples draws from torch's default generator, or seeds it: use one of your own"

    def test_ranks_split_each_batch(self, folder: Path) -> None:
        """Two ranks' rows are disjoint and make up the batches of one process, across the end of an epoch too."""
        whole = list(islice(self._fed(folder, range(BATCH)), NUM_BATCHES))
        halves = [list(islice(self._fed(folder, rows), NUM_BATCHES)) for rows in (range(2), range(2, BATCH))]
        has_rows = not hasattr(self._open(folder), "collate")  # which may pad a batch as its longest row needs
        for number, (all_rows, first, second) in enumerate(zip(whole, *halves, strict=True)):
            assert first.numbers + second.numbers == all_rows.numbers, f"batch {number}: ranks have other samples than one"
            if has_rows:
                fields = self._open(folder).info.fields
                both = {name: torch.cat([first.batch[name], second.batch[name]], fields[name].batch_dim) for name in fields}
                assert _same(both, all_rows.batch), f"batch {number}: the samples of two ranks are not those of one"

    def test_restart_resumes_position(self, folder: Path) -> None:
        """From the position that a checkpoint stores, with a dataset that is opened again."""
        undisturbed = list(islice(self._fed(folder, range(BATCH)), NUM_BATCHES))
        for done in (1, NUM_BATCHES - 2):
            state = decode_value(json.loads(json.dumps(encode_value(undisturbed[done - 1].state))))
            notes: list[str] = []
            again = list(islice(self._fed(folder, range(BATCH), state, notes), NUM_BATCHES - done))
            assert not notes, f"a run that goes on after batch {done} has another batch {done}: {notes[0]}"
            for number, (wanted, found) in enumerate(zip(undisturbed[done:], again, strict=True), start=done):
                assert _same(found.batch, wanted.batch), f"a run that goes on after batch {done} has another batch {number}"

    def test_held_out_samples_are_not_trained_on(self, folder: Path) -> None:
        """No sample is used both for training and for evaluation."""
        if not self.holds_out:
            pytest.skip("it holds nothing out (`holds_out`)")
        trained = self._samples(self._open(folder))
        for index, sample in enumerate(self._samples(self._open(folder, "held_out"))):
            assert not any(_same(sample, one) for one in trained), f"the held-out sample {index} is trained on too"

    def _open(self, folder: Path, split: Split = "train") -> AnyDataset:
        """Returns the data set as a run opens it, anew."""
        return open_dataset(plan_from_dict(small_plan(data=self.data), folder).data, DataContext(SEED, split))

    def _fed(
        self, folder: Path, rows: range, state: Mapping[str, Any] | None = None, notes: list[str] | None = None
    ) -> Iterator[_Fed]:
        """Yields what a rank with these rows of each batch is fed, from `state` on. notes: gets the feed's, such as that the
        data set's own state does not lead back, so that it was read from its beginning.
        """
        with Feed(self._open(folder), seed=SEED, batch_size=BATCH, rows=rows, timeout_s=60) as feed:
            if state is not None:
                feed.restore(state)
            while True:
                batch = feed.next()
                if notes is not None:
                    notes[:] = feed.notes
                yield _Fed(batch, feed.samples, feed.state())

    def _indices(self, dataset: Dataset) -> list[int]:
        """Returns which samples are looked at: the first and last ones, and some between."""
        return sorted({*range(0, len(dataset), max(1, len(dataset) // self.num_samples)), len(dataset) - 1} - {-1})

    def _numbered(self, dataset: AnyDataset) -> Iterator[tuple[int, Sample]]:
        """Yields samples with their number: of a stream the first ones, else the first and last ones, and some between."""
        if is_stream(dataset):
            yield from enumerate(islice(cast(Any, dataset), self.num_samples))
        else:
            indexed = cast(Dataset, dataset)
            yield from ((index, indexed[index]) for index in self._indices(indexed))

    def _kept(self, dataset: AnyDataset) -> dict[int, Sample]:
        """Returns copies of samples by their number, each made before the next one is read."""
        return {number: {name: value.clone() for name, value in sample.items()} for number, sample in self._numbered(dataset)}

    def _samples(self, dataset: AnyDataset) -> list[Sample]:
        return list(self._kept(dataset).values())


class _Fed(NamedTuple):
    """A batch, the numbers of its samples, and the feed's state after it."""

    batch: Batch
    numbers: tuple[int, ...]
    state: dict[str, Any]


def _check_field(name: str, value: Tensor, field: Field, num_samples: int, sequence: int | None) -> None:
    """Asserts that one field of a batch of `num_samples` is as it is declared."""
    dtype = str(value.dtype).removeprefix("torch.")
    assert dtype == field.dtype, f"the field `{name}` is {dtype}; declared is {field.dtype}"
    assert field.batch_dim < value.ndim, f"the field `{name}` {tuple(value.shape)} has no batch_dim {field.batch_dim}"
    found = value.shape[field.batch_dim]
    assert found == num_samples, f"the field `{name}` of {num_samples} samples has {found} along its batch_dim"
    if field.sequence_dim is None:
        return
    assert field.sequence_dim < value.ndim, f"the field `{name}` {tuple(value.shape)} has no sequence_dim {field.sequence_dim}"
    length = value.shape[field.sequence_dim]
    assert sequence in (None, length), f"the field `{name}` has {length} positions; declared are {sequence}"


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

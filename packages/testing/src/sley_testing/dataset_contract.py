"""Defines the tests that every dataset must pass; a plugin's tests inherit them.

    class TestReviews(DatasetContract):
        data = {"use": "reviews.jsonl", "files": ["*.jsonl"], "sequence": 32}

        def write_files(self, folder):
            (folder / "a.jsonl").write_text(...)

Every rank opens the data itself, and a restarted run opens it again. All of them must get the same sample for the same index.
The tests run in this process and read the data through a run's feed.
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

from sley_core.data.batches import check_tokens, collate_function
from sley_core.data.dataset import AnyDataset, Batch, DataContext, Dataset, Field, Sample, Split, is_stream
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.json_text import decode_value, encode_value
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

BATCH = 4  # the global batch size; each of two ranks has half of it

NUM_BATCHES = 6
SEED = 7


class DatasetContract:
    """Tests a dataset: inherit, set `data` to the table `[data]`, and pytest does the rest. num_samples: the maximum number of
    samples to check. holds_out: whether the dataset has held-out samples.
    """

    data: ClassVar[dict[str, Any]]
    num_samples: ClassVar[int] = 24
    holds_out: ClassVar[bool] = False

    def write_files(self, folder: Path) -> None:
        """Writes the data files of the table into the plan's folder; does nothing by default."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Returns the plan's folder with the data files."""
        self.write_files(tmp_path)
        return tmp_path

    def test_samples_match_info(self, folder: Path) -> None:
        """Compares fields, dtypes, dims, token ids and length of a batch with `info`."""
        dataset = self._open(folder)
        samples = self._samples(dataset)
        assert samples, "the dataset has no samples"
        batch = collate_function(dataset)(samples)
        fields = dataset.info.fields
        assert batch.keys() == fields.keys(), f"a batch has the fields {sorted(batch)}, but `info` declares {sorted(fields)}"
        for name, field in fields.items():
            _check_field(name, batch[name], field, len(samples), dataset.info.sequence)
        check_tokens(batch, dataset.info, range(len(samples)))

    def test_index_returns_same_sample(self, folder: Path) -> None:
        """Reads samples in another order, in a second dataset, and in another thread."""
        dataset, second_dataset = self._open(folder), self._open(folder)
        lengths = [] if is_stream(dataset) else [len(cast(Dataset, opened)) for opened in (dataset, second_dataset)]
        assert len(set(lengths)) <= 1, f"two datasets of the same table have different lengths: {lengths}"
        first_read = self._copy_samples(dataset)
        if not is_stream(dataset):
            indexed = cast(Dataset, dataset)
            for index in reversed(self._indices(indexed)):
                assert _are_equal_samples(indexed[index], first_read[index]), f"sample {index} differs when it is read again"
            new_length = len(indexed)
            assert new_length == lengths[0], f"the length changes when samples are read, from {lengths[0]} to {new_length}"
        thread_reads: list[dict[int, Sample]] = []
        thread = threading.Thread(target=lambda: thread_reads.append(self._copy_samples(second_dataset)))
        thread.start()
        thread.join()
        assert thread_reads, "samples can only be read in the main thread"
        for index, sample in first_read.items():
            assert _are_equal_samples(thread_reads[0][index], sample), (
                f"sample {index} differs on another rank or in another thread"
            )

    def test_samples_do_not_share_memory(self, folder: Path) -> None:
        """Reads all samples of a batch before comparing them."""
        dataset = self._open(folder)
        samples = dict(self._indexed_samples(dataset))
        copies = self._copy_samples(self._open(folder))
        for index, sample in samples.items():
            assert _are_equal_samples(sample, copies[index]), f"sample {index} changes while others are read"

    def test_default_generator_is_unchanged(self, folder: Path) -> None:
        """Protects the generator that a concurrent forward draws from."""
        initial_state = torch.default_generator.get_state()
        self._samples(self._open(folder))
        is_unchanged = torch.equal(initial_state, torch.default_generator.get_state())
        assert is_unchanged, "reading samples draws from or seeds torch's default generator: use a separate generator"

    def test_ranks_split_each_batch(self, folder: Path) -> None:
        """Expects that the rows of two ranks form the batches of one process, even across the end of an epoch."""
        all_batches = list(islice(self._feed(folder, range(BATCH)), NUM_BATCHES))
        halves = [list(islice(self._feed(folder, rows), NUM_BATCHES)) for rows in (range(2), range(2, BATCH))]
        has_rows = not hasattr(self._open(folder), "collate")  # a collate function may pad to the longest row
        for number, (all_rows, first, second) in enumerate(zip(all_batches, *halves, strict=True)):
            assert first.numbers + second.numbers == all_rows.numbers, (
                f"batch {number}: two ranks have different samples than one process"
            )
            if has_rows:
                fields = self._open(folder).info.fields
                joined = {name: torch.cat([first.batch[name], second.batch[name]], fields[name].batch_dim) for name in fields}
                assert _are_equal_samples(joined, all_rows.batch), (
                    f"batch {number}: the tensors of two ranks differ from those of one process"
                )

    def test_restart_resumes_position(self, folder: Path) -> None:
        """Reopens the dataset and continues at the position that a checkpoint stores."""
        uninterrupted = list(islice(self._feed(folder, range(BATCH)), NUM_BATCHES))
        for num_done in (1, NUM_BATCHES - 2):
            state = decode_value(json.loads(json.dumps(encode_value(uninterrupted[num_done - 1].state))))
            notes: list[str] = []
            resumed = list(islice(self._feed(folder, range(BATCH), state, notes), NUM_BATCHES - num_done))
            assert not notes, f"a run that resumes after batch {num_done} has a different batch {num_done}: {notes[0]}"
            for number, (expected, actual) in enumerate(zip(uninterrupted[num_done:], resumed, strict=True), start=num_done):
                assert _are_equal_samples(actual.batch, expected.batch), (
                    f"a run that resumes after batch {num_done} has a different batch {number}"
                )

    def test_held_out_samples_are_not_trained_on(self, folder: Path) -> None:
        """Expects that no sample is used both for training and for evaluation."""
        if not self.holds_out:
            pytest.skip("the dataset has no held-out samples (`holds_out`)")
        training_samples = self._samples(self._open(folder))
        for index, sample in enumerate(self._samples(self._open(folder, "held_out"))):
            assert not any(_are_equal_samples(sample, training_sample) for training_sample in training_samples), (
                f"the held-out sample {index} is also a training sample"
            )

    def _open(self, folder: Path, split: Split = "train") -> AnyDataset:
        """Opens the dataset as a run does."""
        return open_dataset(plan_from_dict(small_plan(data=self.data), folder).data, DataContext(SEED, split))

    def _feed(
        self, folder: Path, rows: range, state: Mapping[str, Any] | None = None, notes: list[str] | None = None
    ) -> Iterator[_FedBatch]:
        """Yields the batches of a rank. rows: the rank's rows of each batch. state: the feed's state to start from. notes: a
        list that receives the feed's notes, such as a dataset state that cannot be restored.
        """
        with Feed(self._open(folder), seed=SEED, batch_size=BATCH, rows=rows, timeout_s=60) as feed:
            if state is not None:
                feed.restore(state)
            while True:
                batch = feed.next()
                if notes is not None:
                    notes[:] = feed.notes
                yield _FedBatch(batch, feed.samples, feed.state())

    def _indices(self, dataset: Dataset) -> list[int]:
        """Returns evenly spaced indices of samples, including the first and the last."""
        return sorted({*range(0, len(dataset), max(1, len(dataset) // self.num_samples)), len(dataset) - 1} - {-1})

    def _indexed_samples(self, dataset: AnyDataset) -> Iterator[tuple[int, Sample]]:
        """Yields indices and samples: the first samples of a stream, else those of `_indices`."""
        if is_stream(dataset):
            yield from enumerate(islice(cast(Any, dataset), self.num_samples))
        else:
            indexed = cast(Dataset, dataset)
            yield from ((index, indexed[index]) for index in self._indices(indexed))

    def _copy_samples(self, dataset: AnyDataset) -> dict[int, Sample]:
        """Returns copies of samples by index, each made before the next sample is read."""
        return {
            number: {name: value.clone() for name, value in sample.items()} for number, sample in self._indexed_samples(dataset)
        }

    def _samples(self, dataset: AnyDataset) -> list[Sample]:
        return list(self._copy_samples(dataset).values())


class _FedBatch(NamedTuple):
    """Holds a batch, the numbers of its samples, and the feed's state after the batch."""

    batch: Batch
    numbers: tuple[int, ...]
    state: dict[str, Any]


def _check_field(name: str, value: Tensor, field: Field, num_samples: int, sequence: int | None) -> None:
    """Asserts that a field of a batch matches its declaration."""
    dtype = str(value.dtype).removeprefix("torch.")
    assert dtype == field.dtype, f"the field `{name}` is {dtype}, but {field.dtype} is declared"
    assert field.batch_dim < value.ndim, f"the field `{name}` {tuple(value.shape)} has no batch_dim {field.batch_dim}"
    size = value.shape[field.batch_dim]
    assert size == num_samples, f"the field `{name}` has size {size} along its batch_dim, but there are {num_samples} samples"
    if field.sequence_dim is None:
        return
    assert field.sequence_dim < value.ndim, f"the field `{name}` {tuple(value.shape)} has no sequence_dim {field.sequence_dim}"
    length = value.shape[field.sequence_dim]
    assert sequence in (None, length), f"the field `{name}` has {length} positions, but {sequence} are declared"


def _are_equal_samples(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())

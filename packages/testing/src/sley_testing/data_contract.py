"""Defines the tests that every dataset and every loss must pass, for a plugin's tests to inherit. They run in this process.

    class TestReviews(DatasetContract):
        data = {"use": "reviews.jsonl", "files": ["*.jsonl"], "sequence": 32}

        def write_files(self, folder):
            (folder / "a.jsonl").write_text(...)

    class TestHuber(LossContract):
        loss = {"use": "robust.huber"}

        def batch(self):
            return torch.randn(4, 6, dtype=torch.float64), {"y": torch.randn(4, 6)}

Each rank opens the data itself, and a restarted run opens it again. All of them must get the same sample for the same index. A
layout may split a batch between any samples, so a loss is a sum, and its weight counts the terms of the sum.
"""

import gc
import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import pytest
import torch

from sley_core.data.batches import check_tokens, collate_function, open_dataset
from sley_core.data.dataset import AnyDataset, Batch, DataContext, Dataset, Field, Sample, Split, is_stream
from sley_core.data.feed import Feed
from sley_core.json_text import decode_value, encode_value
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import Loss
from sley_testing.parity import relative_error
from sley_testing.plain import split_batch
from sley_testing.plans import Tables, small_plan

GLOBAL_SIZE = 4  # samples per batch; each of two ranks has half of them
NUM_BATCHES = 6  # batches that each test reads from a feed
SEED = 7  # the seed of the datasets and feeds


class DatasetContract:
    """Tests a dataset. Subclass it, and set `data` to the `[data]` table. num_samples: the approximate number of samples to
    check. holds_out: whether the dataset has held-out samples.
    """

    data: ClassVar[Tables]
    num_samples: ClassVar[int] = 24
    holds_out: ClassVar[bool] = False

    def write_files(self, folder: Path) -> None:
        """Writes the files that the table names into `folder`, the plan's folder. Does nothing by default."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.write_files(tmp_path)
        return tmp_path

    def test_samples_match_info(self, folder: Path) -> None:
        """Compares the fields, dtypes, dims, token ids and sequence length of a batch with `info`."""
        dataset = self._open_dataset(folder)
        samples = list(self._copy_samples(dataset).values())
        assert samples, "the dataset has no samples"
        batch = collate_function(dataset)(samples)
        fields = dataset.info.fields
        assert batch.keys() == fields.keys(), f"a batch has the fields {sorted(batch)}, but `info` declares {sorted(fields)}"
        for name, field in fields.items():
            _check_field(name, batch[name], field, len(samples), dataset.info.sequence)
        check_tokens(batch, dataset.info, range(len(samples)))

    def test_index_returns_same_sample(self, folder: Path) -> None:
        """Reads samples again in another order, and from a second dataset in another thread."""
        dataset, second_dataset = self._open_dataset(folder), self._open_dataset(folder)
        first_read = self._copy_samples(dataset)
        if not is_stream(dataset):
            indexed = cast(Dataset, dataset)
            lengths = len(indexed), len(cast(Dataset, self._open_dataset(folder)))
            assert lengths[0] == lengths[1], f"a dataset has length {lengths[0]} after it is read, but a new one {lengths[1]}"
            for index in reversed(first_read):
                assert _are_equal_samples(indexed[index], first_read[index]), f"sample {index} differs when it is read again"
        thread_reads: list[dict[int, Sample]] = []
        thread = threading.Thread(target=lambda: thread_reads.append(self._copy_samples(second_dataset)))
        thread.start()
        thread.join()
        assert thread_reads, "samples can only be read in the main thread"
        for index, sample in first_read.items():
            is_equal = _are_equal_samples(thread_reads[0][index], sample)
            assert is_equal, f"sample {index} differs on another rank or in another thread"

    def test_samples_do_not_share_memory(self, folder: Path) -> None:
        dataset = self._open_dataset(folder)
        samples = dict(self._read_samples(dataset))
        copies = self._copy_samples(self._open_dataset(folder))
        for index, sample in samples.items():
            assert _are_equal_samples(sample, copies[index]), f"sample {index} changes while other samples are read"

    def test_default_generator_is_unchanged(self, folder: Path) -> None:
        """Expects reads not to use torch's default generator, from which a concurrent forward may draw."""
        state = torch.default_generator.get_state()
        self._copy_samples(self._open_dataset(folder))
        is_unchanged = torch.equal(state, torch.default_generator.get_state())
        assert is_unchanged, "reading samples draws from or seeds torch's default generator: use a separate generator"

    def test_ranks_split_each_batch(self, folder: Path) -> None:
        """Expects the rows of two ranks to form the batches of one process, even across the end of an epoch."""
        dataset = self._open_dataset(folder)
        fields = {} if hasattr(dataset, "collate") else dataset.info.fields  # `collate` may pad rows to the longest one
        feeds = (self._read_batches(folder, rows) for rows in (range(GLOBAL_SIZE), range(2), range(2, GLOBAL_SIZE)))
        for number, (full, first, second) in enumerate(islice(zip(*feeds, strict=True), NUM_BATCHES)):
            has_same_samples = first.sample_numbers + second.sample_numbers == full.sample_numbers
            assert has_same_samples, f"batch {number}: two ranks have different samples than one process"
            for name, field in fields.items():
                joined = torch.cat([first.batch[name], second.batch[name]], field.batch_dim)
                is_equal = torch.equal(joined, full.batch[name])
                assert is_equal, f"batch {number}: the tensors of two ranks differ from those of one process: {name}"

    def test_restart_resumes_position(self, folder: Path) -> None:
        """Reopens the dataset, and continues at a position that was encoded as in a checkpoint."""
        uninterrupted = list(islice(self._read_batches(folder, range(GLOBAL_SIZE)), NUM_BATCHES))
        for num_done in (1, NUM_BATCHES - 2):
            state = decode_value(json.loads(json.dumps(encode_value(uninterrupted[num_done - 1].state))))
            notes: list[str] = []
            resumed = list(islice(self._read_batches(folder, range(GLOBAL_SIZE), state, notes), NUM_BATCHES - num_done))
            assert not notes, f"a run that resumes after batch {num_done} has a different batch {num_done}: {notes[0]}"
            for number, (expected, actual) in enumerate(zip(uninterrupted[num_done:], resumed, strict=True), start=num_done):
                is_equal = _are_equal_samples(actual.batch, expected.batch)
                assert is_equal, f"a run that resumes after batch {num_done} has a different batch {number}"

    def test_held_out_samples_are_not_trained_on(self, folder: Path) -> None:
        if not self.holds_out:
            pytest.skip("the dataset has no held-out samples (`holds_out`)")
        training_samples = self._copy_samples(self._open_dataset(folder)).values()
        for index, sample in self._copy_samples(self._open_dataset(folder, "held_out")).items():
            is_trained = any(_are_equal_samples(sample, training_sample) for training_sample in training_samples)
            assert not is_trained, f"the held-out sample {index} is also a training sample"

    def _open_dataset(self, folder: Path, split: Split = "train") -> AnyDataset:
        return open_dataset(plan_from_dict(small_plan(data=self.data), folder).data, DataContext(SEED, split))

    def _read_batches(
        self, folder: Path, rows: range, state: Mapping[str, Any] | None = None, notes: list[str] | None = None
    ) -> "Iterator[_FedBatch]":
        """Yields the batches of a rank that has the rows `rows` of each batch. state: the feed's state to resume from, if any.
        notes: a list that receives the feed's notes, for example about a dataset state that cannot be restored.
        """
        with Feed(self._open_dataset(folder), seed=SEED, batch_size=GLOBAL_SIZE, rows=rows, timeout_s=60) as feed:
            if state is not None:
                feed.restore(state)
            while True:
                batch = feed.next()
                if notes is not None:
                    notes[:] = feed.notes
                yield _FedBatch(batch, feed.samples, feed.state())

    def _read_samples(self, dataset: AnyDataset) -> Iterator[tuple[int, Sample]]:
        """Yields indices and samples: the first samples of a stream, or evenly spaced samples that include the last one."""
        if is_stream(dataset):
            yield from enumerate(islice(cast(Any, dataset), self.num_samples))
            return
        indexed, size = cast(Dataset, dataset), len(cast(Dataset, dataset))
        for index in sorted({*range(0, size, max(1, size // self.num_samples)), size - 1} - {-1}):
            yield index, indexed[index]

    def _copy_samples(self, dataset: AnyDataset) -> dict[int, Sample]:
        """Returns copies of samples by index. Copies each sample before it reads the next."""
        return {index: {name: value.clone() for name, value in sample.items()} for index, sample in self._read_samples(dataset)}


class _FedBatch(NamedTuple):
    """Holds a batch of a feed, its sample numbers, and the feed's state after the batch."""

    batch: Batch
    sample_numbers: tuple[int, ...]
    state: dict[str, Any]


def _check_field(name: str, value: torch.Tensor, field: Field, num_samples: int, sequence: int | None) -> None:
    """Asserts that a tensor of a batch has the dtype, the number of samples and the sequence length of its `field`."""
    dtype = str(value.dtype).removeprefix("torch.")
    assert dtype == field.dtype, f"the field `{name}` is {dtype}, but {field.dtype} is declared"
    for dim, declared, label in ((field.batch_dim, num_samples, "samples"), (field.sequence_dim, sequence, "positions")):
        if dim is not None:
            assert dim < value.ndim, f"the field `{name}` {tuple(value.shape)} has no dim {dim} for its {label}"
            size = value.shape[dim]
            assert declared in (None, size), f"the field `{name}` has {size} {label}, but {declared} are declared"


def _are_equal_samples(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


EXACT_TOLERANCE = 1e-10  # the relative tolerance of fp64 sums


class LossContract:
    """Tests a loss. Subclass it, set `loss` to the `[loss]` table, and implement `batch`."""

    loss: ClassVar[Tables]

    def batch(self) -> tuple[torch.Tensor, Batch]:
        """Returns an fp64 model output and its batch. Dim 0 has the samples: an even number, at least four."""
        raise NotImplementedError("implement `batch`, which returns the output and the batch with which the loss is tested")

    def weightless_batch(self) -> "Batch | None":
        """Returns a batch of the size of `batch` with weight 0, for example with ignored labels only; None to skip the test."""
        return None

    def test_weight_is_sum_over_microbatches(self) -> None:
        """Expects the weight of a batch to be a positive Python number and the sum of the weights of its microbatches."""
        loss, (_, batch) = self._loss(), self.batch()
        total = loss.weight(batch)
        assert isinstance(total, int | float), f"the weight is a {type(total).__name__}, not a number"
        assert total > 0, f"the weight of a batch is {total}, not positive"
        for size in self._micro_sizes():
            weights = [loss.weight(part) for part in split_batch(batch, size)]
            assert sum(weights) == pytest.approx(total, rel=EXACT_TOLERANCE), (
                f"the weight of a batch is {total:g}, but its microbatches of {size} weigh {sum(weights):g}: "
                "the weight must count the terms of the loss"
            )

    def test_loss_is_sum_over_samples(self) -> None:
        """Expects a scalar loss. Loss and gradients of a batch must equal the sums over its microbatches."""
        output, batch = self.batch()
        expected, gradient = self._loss_and_gradient(output, batch)
        for size in self._micro_sizes():
            parts = zip(torch.split(output, size), split_batch(batch, size), strict=True)
            results = [self._loss_and_gradient(*part) for part in parts]
            total = sum(loss for loss, _ in results)
            assert total == pytest.approx(expected, rel=EXACT_TOLERANCE, abs=EXACT_TOLERANCE), (
                f"the loss of a batch is {expected:.9g}, but its microbatches of {size} sum to {total:.9g}: a mean is not a sum"
            )
            error = relative_error(gradient, torch.cat([part_gradient for _, part_gradient in results]), 1e-30)
            assert error <= EXACT_TOLERANCE, f"the relative error of the gradients of microbatches of {size} is {error:.3g}"

    def test_gradient_matches_finite_differences(self) -> None:
        output, batch = self.batch()
        loss = self._loss()
        try:
            torch.autograd.gradcheck(lambda value: loss.loss(value, batch), output.detach().requires_grad_())
        except RuntimeError as error:  # GradcheckError, or an error in the backward
            raise AssertionError(f"the gradient is not the derivative of the loss: {error}") from error

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_sum_is_at_least_fp32(self, dtype: torch.dtype) -> None:
        """Expects an fp32 or fp64 loss for each output dtype, since half precision cannot hold sums of thousands of terms."""
        output, batch = self.batch()
        narrow_output = output.to(dtype)
        leaf = narrow_output.detach().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.dtype in (torch.float32, torch.float64), f"the loss of a {dtype} output is {loss.dtype}"
        loss.backward()  # type: ignore[no-untyped-call]
        expected, gradient = self._loss_and_gradient(narrow_output.double(), batch)
        tolerance, actual = 2**-6 if dtype != torch.float32 else 1e-4, float(loss.detach())
        is_close = actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert is_close, f"the loss of a {dtype} output is {actual:.6g}, but {expected:.6g} in fp64"
        assert leaf.grad is not None, f"a {dtype} output gets no gradient"
        assert leaf.grad.dtype == dtype, f"the gradient of a {dtype} output is {leaf.grad.dtype}"
        error = relative_error(gradient, leaf.grad, 1e-30)
        assert error <= tolerance, f"the relative error of the gradient of a {dtype} output is {error:.3g}"

    def test_call_keeps_no_state(self) -> None:
        """Expects a call to keep no output, graph or state, and not to write to its inputs."""
        loss, (output, batch) = self._loss(), self.batch()
        inputs = {"the model's output": output, **{f"the field {name}": value for name, value in batch.items()}}
        copies = {name: value.clone() for name, value in inputs.items()}
        first = loss.weight(batch), float(loss.loss(output, batch))
        changed = [name for name, value in inputs.items() if not torch.equal(value, copies[name])]
        assert not changed, f"the loss writes to {', '.join(changed)}"
        live_output = output.detach().requires_grad_() * 1
        total = loss.loss(live_output, batch)
        total.backward()  # type: ignore[no-untyped-call]
        reference = weakref.ref(live_output)
        del live_output, total
        gc.collect()
        assert reference() is None, "the loss keeps the model's output, and thereby its autograd graph, after the call"
        microbatch = split_batch(batch, len(output) // 2)[0]
        with torch.no_grad():  # an evaluation between two steps
            loss.weight(microbatch)
            loss.loss(output[: len(output) // 2], microbatch)
        second = loss.weight(batch), float(loss.loss(output, batch))
        assert second == first, f"weight and loss of a batch are {first}, but {second} after another batch"

    def test_loss_reads_only_its_fields(self) -> None:
        """Passes only the fields that the loss names in `fields`, since a run moves only these fields to the device."""
        loss, (output, batch) = self._loss(), self.batch()
        fields = getattr(loss, "fields", None)
        if fields is None:
            pytest.skip("the loss has no `fields`")
        try:
            actual = float(loss.loss(output, {name: batch[name] for name in fields}))
        except KeyError as error:
            raise AssertionError(f"the loss reads the field {error}, which is not among its `fields` {fields}") from error
        assert actual == float(loss.loss(output, batch)), f"the loss reads more than its `fields` {fields}"

    def test_batch_without_weight(self) -> None:
        batch = self.weightless_batch()
        if batch is None:
            pytest.skip("`weightless_batch` returns None")
        weight = self._loss().weight(batch)
        assert weight == 0, f"a batch of ignored labels has the weight {weight}"
        loss, gradient = self._loss_and_gradient(self.batch()[0], batch)
        assert loss == 0, f"the loss of a batch of ignored labels is {loss}"
        assert not gradient.count_nonzero(), "a batch of ignored labels has gradients"

    def _loss(self) -> Loss:
        loss: Loss = plan_from_dict(small_plan(loss=self.loss)).loss.build()
        return loss

    def _micro_sizes(self) -> tuple[int, int]:
        """Returns the microbatch sizes to test, in samples: 1, and half of the batch."""
        num_samples = len(self.batch()[0])
        is_valid = num_samples >= 4 and num_samples % 2 == 0
        assert is_valid, f"`batch` must have an even number of samples, at least four, but has {num_samples}"
        return 1, num_samples // 2

    def _loss_and_gradient(self, output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
        """Returns the loss of `output` on `batch`, and its gradient with respect to the output. Asserts that the loss is a
        scalar with a graph.
        """
        leaf = output.detach().clone().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.shape == (), f"the loss is {tuple(loss.shape)}, not a scalar"
        assert loss.requires_grad, "the loss does not depend on the model's output, or has been detached from it"
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None, "the model's output gets no gradient"
        return float(loss.detach()), leaf.grad

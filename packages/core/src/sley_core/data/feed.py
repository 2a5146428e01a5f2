"""The feed reads a rank's rows of each global batch. Its state does not depend on the layout.

The epochs, each in its own order, form one endless sequence of samples. With batches of G samples, batch b has the samples b *
G to (b + 1) * G - 1 of this sequence. So a batch may span two epochs, and the ranks together read the same global batch in
every layout. A resumed run compares digests of samples, to detect whether the data have changed since the checkpoint.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch

from sley_core.data.batches import collate_function
from sley_core.data.dataset import AnyDataset, Batch, Dataset, Order, Sample, Stream, find_state_methods, is_stream
from sley_core.errors import PlanError, RunError, format_cause, note_origin
from sley_core.generators import comparable_state, derive_seed, use_seed
from sley_core.json_text import encode_value
from sley_core.model.tensors import flat_bytes

T = TypeVar("T")


class PrefetchThread:
    """A thread that reads one item of `items` at a time. `close` ends the thread.

    The thread reads the first item when `get` is called. After each item, it reads the next one at once if `reads_ahead()` is
    true, and otherwise when `get` is called again. The thread is a daemon, so a dataset that never returns cannot keep the
    process alive.
    """

    def __init__(self, items: "Iterator[_PrefetchedBatch]", reads_ahead: Callable[[], bool]) -> None:
        self._items = items
        self._reads_ahead = reads_ahead
        self._ready: SimpleQueue[_PrefetchedBatch | BaseException] = SimpleQueue()
        self._permits = threading.Semaphore(0)  # one for each item that the thread may read
        self._is_requested = False  # whether there is a permit for the next item
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._produce_items, name="sley-data", daemon=True)
        self._thread.start()

    def _produce_items(self) -> None:
        """Puts one item into the queue for each permit, and an error when `items` raises or ends. Runs in the thread."""
        try:
            while True:
                self._permits.acquire()
                if self._is_closing:
                    return
                self._ready.put(next(self._items))
        except BaseException as error:
            self._ready.put(error)

    def _request_item(self) -> None:
        if not self._is_requested:
            self._is_requested = True
            self._permits.release()

    def get(self, timeout_s: float, *, is_last: bool) -> "_PrefetchedBatch":
        """Waits for the next item and returns it. Raises the error that ended the thread, again in each later call, and
        RunError "data-timeout" if there is no item within `timeout_s` seconds. is_last: whether to read no item ahead.
        """
        if self._error is not None:
            raise self._error
        self._request_item()
        try:
            result = self._ready.get(timeout=timeout_s)
        except Empty:
            message = f"the dataset returned no batch within {timeout_s:g} s"
            hint = "check the dataset's `__getitem__` or `__iter__`; if it needs more time, increase [limits] data_timeout_s"
            raise RunError("data-timeout", message, hint=hint) from None
        if isinstance(result, BaseException):
            self._error = result
            raise result
        self._is_requested = False
        if not is_last and self._reads_ahead():
            self._request_item()
        return result

    def close(self, timeout_s: float) -> None:
        """Ends the thread after its current item. Raises RunError "data-timeout" if this takes longer than `timeout_s`."""
        self._is_closing = True
        self._permits.release()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunError("data-timeout", f"the dataset returned no batch within {timeout_s:g} s after the feed was closed")


CLOSE_TIMEOUT_S = 30.0
"""The maximum time in seconds that `Feed.close` waits for the thread. It is short, because the run is ending."""


@dataclass(frozen=True)
class _PrefetchedBatch:
    """A batch that `Feed.next` will return. samples, state: `Feed.samples` and the feed's state after this batch."""

    batch: Batch
    samples: tuple[int, ...]
    state: dict[str, Any]


class Feed:
    """Reads one rank's rows of endlessly many global batches. To end its thread, close the feed or use it as a context manager.

    dataset: a Dataset or a Stream.
    seed: the run's seed, from which the order of the samples and the seeds of random reads are derived.
    batch_size: the number of samples of a **global** batch, over all ranks.
    rows: this rank's rows of the global batch.
    shuffle: whether each epoch of a Dataset has a different random order.
    check: a function that is called in the feed's thread with each batch and its sample numbers; `next` raises its errors.
    will_save: whether the state will be saved. If so, the thread computes the digest of the data before the first batch, and
    checks with the first batch that the state of a stream can be encoded.
    timeout_s: the time limit of `next`, in seconds.

    notes: messages for the user about a resumed stream.

    After `next`, `wait_s` is the time in seconds that `next` waited, and `samples` has the dataset index of each row or, for a
    stream, the position of each row in the endless sequence. `next` raises the dataset's errors. No method communicates.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        *,
        seed: int,
        batch_size: int,
        rows: range,
        shuffle: bool = True,
        timeout_s: float = 600.0,
        check: Callable[[Batch, Sequence[int]], None] | None = None,
        will_save: bool = False,
    ) -> None:
        assert len(rows), rows
        assert rows == range(batch_size)[rows.start : rows.stop], (rows, batch_size)
        self._dataset = dataset
        self._seed = seed
        self.batch_size = batch_size
        self.rows = rows
        self._shuffle = shuffle and not getattr(dataset, "is_ordered", False)
        self._timeout_s = timeout_s
        self._check = check
        self._will_save = will_save
        self._sample_reader = SeededReader(seed, batch_size if is_stream(dataset) else len(rows))
        self._collate_reader = SeededReader(seed, 1)
        self._prefetch: PrefetchThread | None = None
        self._state: dict[str, Any] = {"samples": 0}
        self._reader = StreamReader(cast(Stream, dataset), self._read_sample) if is_stream(dataset) else None
        self.notes: list[str] = []
        self.wait_s = 0.0
        self.samples: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int | None:
        """The number of samples in an epoch, or None for a stream. Calls the dataset's `__len__`, which may load the data."""
        return None if is_stream(self._dataset) else len(cast(Dataset, self._dataset))

    def next(self, *, is_last: bool = False) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU. Raises RunError "data-timeout" after `timeout_s`.
        is_last: whether no batch is needed afterwards; a later call must wait for its batch.
        """
        start = time.perf_counter()
        if self._prefetch is None:
            self._prefetch = PrefetchThread(self._checked_batches(self._state), self._reads_ahead)
        item = self._prefetch.get(self._timeout_s, is_last=is_last)
        self.wait_s = time.perf_counter() - start
        self.samples, self._state = item.samples, item.state
        return item.batch

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch of `next`, which is equal in all layouts. It may contain a digest."""
        is_read = self._prefetch is not None and self._state["samples"] > 0
        digest = self.digest if is_read and (self._will_save or self.has_exact_digest) else None
        return deepcopy(self._state) | ({} if digest is None else {"digest": digest})

    def encoded_state(self) -> Any:
        """Returns `state()`, encoded for JSON. Raises RunError "data-state" if this fails."""
        return _encode_state(self.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position `state`, a result of the method `state`; `{"samples": 0}` is the start. Ends the thread."""
        self.close()
        self._state = deepcopy(dict(state))

    def describe_change(self, state: Mapping[str, Any]) -> str:
        """Returns how the data differ from the data of `state`, for a message; "" if they are equal or not comparable."""
        old, new = state.get("digest"), None if "digest" not in state else self.digest
        if None in (old, new) or old == new:
            return ""
        if self.has_exact_digest:
            return "the training text or tokens, or their order, differ from those of the checkpoint's run"
        return "the length of the dataset, or samples at its start, middle or end, differ from those of the checkpoint's run"

    @property
    def has_exact_digest(self) -> bool:
        """Whether the dataset has its own digest, which differs if and only if the data differ."""
        return hasattr(self._dataset, "data_digest")

    @cached_property
    def digest(self) -> str | None:
        """The dataset's own `data_digest`, or a digest of its length and three samples. None for a stream, for a dataset whose
        samples differ when they are read again, and if a read fails.
        """
        if self._reader is not None:
            return None
        if self.has_exact_digest:
            return str(cast(Any, self._dataset).data_digest)
        set_epoch(self._dataset, 0)
        dataset = cast(Dataset, self._dataset)
        num_samples, reader = len(dataset), SeededReader(self._seed, len(dataset))
        indices = (0, num_samples // 2, num_samples - 1)
        try:
            first, second = (
                compute_digest(reader.read(index, partial(read_sample, dataset, index)) for index in indices) for _ in range(2)
            )
        except Exception:
            return None
        return f"{num_samples}:{first}" if first == second else None

    def close(self) -> None:
        """Ends the thread and discards the prefetched batch. Raises RunError "data-timeout" if this takes too long."""
        if self._prefetch is not None:
            self._prefetch.close(min(self._timeout_s, CLOSE_TIMEOUT_S))
            self._prefetch = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reads_ahead(self) -> bool:
        """Whether the thread may read while the caller computes. A seeded read changes the generators of the whole process,
        which the backward and the caller's program also use, so it must run within `next`.
        """
        return not (self._draws_random or self._sample_reader.is_seeding or self._collate_reader.is_seeding)

    @property
    def _draws_random(self) -> bool:
        return getattr(self._dataset, "draws_random", False)

    def _read_sample(self, number: int, read: Callable[[], Sample]) -> Sample:
        return self._sample_reader.read(number, read, must_seed=self._draws_random)

    def _checked_batches(self, state: Mapping[str, Any]) -> Iterator[_PrefetchedBatch]:
        """Yields the batches after the position `state`, each of which it first passes to the function `check`."""
        if self._reader is not None:
            items = self._stream_batches(self._reader, state)
        else:
            items = self._dataset_batches(cast(Dataset, self._dataset), state["samples"])
        for item in items:
            if self._check is not None:
                self._check(item.batch, item.samples)
            yield item

    def _dataset_batches(self, dataset: Dataset, done: int) -> Iterator[_PrefetchedBatch]:
        """Yields the batches of a dataset, after the first `done` samples. A rank reads only its rows."""
        collate = collate_function(dataset)
        num_samples = len(dataset)
        if not num_samples:
            raise PlanError("data-empty", "the dataset has no samples", path=("data",))

        @lru_cache(maxsize=2)
        def order(epoch: int) -> Order:
            return Order(num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)  # a batch may span two epochs

        self.notes.extend(note for note in getattr(dataset, "data_notes", ()) if note not in self.notes)
        if self._will_save:
            _ = self.digest
        last_epoch = -1
        while True:
            indices, samples = list[int](), list[Sample]()
            for row in self.rows:
                epoch, position = divmod(done + row, num_samples)
                if epoch != last_epoch:
                    set_epoch(dataset, epoch)
                    last_epoch = epoch
                indices.append(order(epoch)[position])
                samples.append(self._read_sample(done + row, partial(read_sample, dataset, indices[-1])))
            batch = self._collate(done + self.rows.start, collate, samples)
            done += self.batch_size
            yield _PrefetchedBatch(batch, tuple(indices), {"samples": done})

    def _stream_batches(self, reader: "StreamReader", state: Mapping[str, Any]) -> Iterator[_PrefetchedBatch]:
        """Yields the batches of a stream. Every rank reads all samples and keeps its rows."""
        collate = collate_function(self._dataset)
        samples = reader.read(state, lambda note: self.notes.append(note))
        done = state["samples"]
        while True:
            position, digest, local_samples = reader.position(), blake2b(digest_size=16), []
            # `range` must come first, so that `zip` reads no sample after the batch.
            for row, sample in zip(range(self.batch_size), samples, strict=False):
                update_digest(digest, sample)
                if row in self.rows:
                    local_samples.append(sample)
            numbers = tuple(done + row for row in self.rows)
            replay = {"samples": done, "place": position, "digest": digest.hexdigest()}
            batch = self._collate(numbers[0], collate, local_samples)
            if self._will_save and done == state["samples"]:
                _encode_state(reader.position())  # so that the first batch raises the error of a later save
            done += self.batch_size
            yield _PrefetchedBatch(batch, numbers, {"samples": done, "replay": replay})

    def _collate(self, number: int, collate: Callable[[Sequence[Sample]], Batch], samples: Sequence[Sample]) -> Batch:
        """Returns the batch of `samples`; seeds the generators by `number`. Raises RunError "data-random" if `collate` draws
        random numbers and this rank has only some of the rows.
        """
        batch = self._collate_reader.read(number, partial(collate, samples))
        if self._collate_reader.has_drawn and len(self.rows) < self.batch_size:
            message = "`collate` draws random numbers, so the batches would depend on the layout"
            raise RunError("data-random", message, hint="draw random numbers in `__getitem__` or `__iter__`")
        return batch


def _encode_state(state: Any) -> Any:
    """Returns `state`, encoded for JSON. Raises RunError "data-state" if this fails."""
    try:
        return encode_value(state)
    except TypeError as error:
        message = f"a checkpoint cannot store the state of the data stream: {error}"
        hint = "its `state` or `state_dict` must return tensors, numbers, strings, or lists, tuples and dicts of them"
        raise RunError("data-state", message, hint=hint) from error


def read_sample(dataset: Dataset, index: int) -> Sample:
    """Returns sample `index`. Raises RunError "data-sample" instead of StopIteration or SystemExit, which would end the thread.
    Adds the sample's number as a note to any other error.
    """
    try:
        sample = dataset[index]
    except (StopIteration, SystemExit) as error:
        raise RunError("data-sample", f"sample {index} of the dataset failed: {format_cause(error)}") from error
    except Exception as error:
        note_origin(error, f"sample {index} of the dataset", dataset)
        raise
    return sample


class SeededReader:
    """Reads samples. If the dataset draws from the host's generators, seeds them by the sample number.

    The model and the program also use these generators, so seeded reads cannot run beside a step. For datasets that draw
    nothing, the reader therefore seeds and observes only the first `num_observed` reads; it seeds later reads only if an
    observed read has drawn.
    """

    def __init__(self, seed: int, num_observed: int) -> None:
        self._seed = seed
        self._num_to_observe = num_observed
        self.has_drawn = False

    @property
    def is_seeding(self) -> bool:
        """Whether the next read will be seeded."""
        return self.has_drawn or self._num_to_observe > 0

    def read(self, number: int, read: Callable[[], T], *, must_seed: bool = False) -> T:
        """Calls `read` and returns its result. number: the number of the sample, counted over all epochs. must_seed: whether to
        seed this read even if no observed read has drawn.
        """
        is_seeded = must_seed or self.is_seeding
        self._num_to_observe -= 1
        if not is_seeded:
            return read()
        with use_seed(derive_seed(self._seed, "sample", number)):
            state = None if self.has_drawn else comparable_state()
            sample = read()
            self.has_drawn = state is None or state != comparable_state()
        return sample


def compute_digest(samples: Iterable[Any]) -> str:
    """Returns a digest of the names, dtypes, shapes and values of all tensors in `samples`."""
    digest = blake2b(digest_size=16)
    for sample in samples:
        update_digest(digest, sample)
    return digest.hexdigest()


def update_digest(digest: blake2b, value: Any) -> None:
    """Adds `value` to `digest`: a tensor, a number, text, bytes, or nested dicts of these. Of any other value, adds only the
    type.
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}=".encode())
            update_digest(digest, value[key])
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat_bytes(value.cpu()).numpy().data)
    else:
        is_plain = isinstance(value, int | float | str | bytes)
        digest.update((repr(value) if is_plain else type(value).__qualname__).encode())


class StreamReader:
    """Reads the samples of a stream, epoch after epoch.

    A position is `{"epoch": the number of completed epochs, "stream": the stream's state}`, without "stream" if the stream has
    no state. read_sample: a function `(number, read) -> sample` that reads each sample by `read`; number: the number of
    the sample, counted over all epochs.
    """

    def __init__(self, stream: Stream, read_sample: Callable[[int, Callable[[], Sample]], Sample]) -> None:
        self._read_sample = read_sample
        self._stream = stream
        self._methods = find_state_methods(stream)
        self._epoch = 0
        self._start = self.position()

    def position(self) -> dict[str, Any]:
        state = {} if self._methods is None else {"stream": deepcopy(getattr(self._stream, self._methods[0])())}
        return {"epoch": self._epoch, **state}

    def read(self, state: Mapping[str, Any], add_note: Callable[[str], None]) -> Iterator[Sample]:
        """Returns the samples after the first `state["samples"]`.

        state: may have `replay`, which describes the last batch: the number of samples ("samples") and the position ("place")
        before it, and its "digest". If so, the batch is read again; if it differs, or the stream has no state, the stream is
        read from its start.
        add_note: a function that receives messages for the user.
        """
        done, replay = state["samples"], state.get("replay")
        batch_start = replay["samples"] if replay else done
        if replay and "stream" in replay["place"] and self._methods is not None:
            samples = self._read_samples_after(replay["place"], batch_start)
            if compute_digest(islice(samples, done - batch_start)) == replay["digest"]:
                return samples
            reason = "the data stream cannot return to its saved position, for example because of a shuffle buffer"
            add_note(f"{reason}; {done} samples were read again from its start")
        samples = self._read_samples_after(self._start, 0)
        for _ in islice(samples, batch_start):
            pass
        if replay and compute_digest(islice(samples, done - batch_start)) != replay["digest"]:
            message = "the data stream yields different samples than before the checkpoint"
            add_note(f"{message}: its data has changed, or its order is random at each start")
        return samples

    def _read_samples_after(self, position: Mapping[str, Any], start: int) -> Iterator[Sample]:
        """Moves the stream to `position` and returns the samples after it. start: the number of the first sample."""
        self._epoch = position["epoch"]
        if self._methods is not None:
            getattr(self._stream, self._methods[1])(deepcopy(position["stream"]))
        samples = self._repeat_epochs(is_resumed=self._methods is not None)
        return (self._read_sample(number, partial(next, samples)) for number in count(start))

    def _repeat_epochs(self, *, is_resumed: bool) -> Iterator[Sample]:
        """Yields the samples of all epochs. Raises PlanError "data-empty" for an empty epoch, except the first epoch of a
        resumed stream, whose state may be just before the end.
        """
        while True:
            set_epoch(self._stream, self._epoch)
            is_empty = True
            for sample in self._read_epoch():
                is_empty = False
                yield sample
            if is_empty and not is_resumed:
                raise PlanError("data-empty", "the stream ended without a sample", path=("data",))
            is_resumed = False
            self._epoch += 1

    def _read_epoch(self) -> Iterator[Sample]:
        """Yields the samples of one epoch. Adds a note to errors; raises RunError "data-sample" instead of SystemExit."""
        try:
            yield from self._stream
        except SystemExit as error:  # would end this process without a message
            raise RunError("data-sample", f"the stream failed: {format_cause(error)}") from error
        except Exception as error:
            note_origin(error, "the stream of the dataset", self._stream)
            raise


def set_epoch(dataset: Any, epoch: int) -> None:
    """Calls the dataset's `set_epoch`, if it has one, with `epoch`, the number of the next epoch, counted from 0."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)

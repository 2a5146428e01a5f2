"""The feed gives a rank its rows of each global batch; its state does not depend on the layout.

Samples form one endless sequence: epoch after epoch, each in its own order. Batch b holds the samples [b * G, (b + 1) * G) of
it, so a batch may span epochs, and the rows of all ranks together are the same global batch in every layout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from sley_core.data.batches import collate_of
from sley_core.data.dataset import AnyDataset, Batch, Dataset, Sample, Stream, is_stream
from sley_core.data.order import Order
from sley_core.data.walk import SamplesDigest, StreamReader, probe, set_epoch
from sley_core.errors import PlanError, RunError, cause, note_origin
from sley_core.generators import comparable_state, derive, use_seed

T = TypeVar("T")


class PrefetchThread(Generic[T]):
    """Prefetches the items of `items`, in order, one at a time. `close` stops and joins the thread.

             ┌── permit ──┐                   The thread makes one item per permit. A permit is given when it starts and
        next │            │ get               whenever an item is taken, so exactly one item is prefetched.
             └── queue ───┘

    What the thread raises is raised by `get`, with the thread's own traceback. The thread is a daemon: a dataset that never
    returns cannot keep a process from ending.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._ready: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._permits = threading.Semaphore(1)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sley-data", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """Runs in the thread: puts one item per permit into the queue, or the error that ends it."""
        try:
            while True:
                self._permits.acquire()
                if self._closing:
                    return
                self._ready.put((next(self._items),))
        except BaseException as error:
            self._ready.put(error)

    def get(self, timeout_s: float) -> T:
        """Returns the next item; blocks. Raises what making it raised, at each further call too; RunError after `timeout_s`."""
        if self._error is not None:
            raise self._error
        try:
            result = self._ready.get(timeout=timeout_s)
        except Empty:
            message = f"the data set gave no batch within {timeout_s:g} s"
            hint = "its `__getitem__` or `__iter__` waits for something; if it needs longer, raise [limits] data_timeout_s"
            raise RunError("data-timeout", message, hint=hint) from None
        if isinstance(result, BaseException):
            self._error = result
            raise result
        self._permits.release()
        return result[0]

    def close(self, timeout_s: float) -> None:
        """Stops the thread after its current item and joins it; raises RunError if that takes longer than `timeout_s`."""
        self._closing = True
        self._permits.release()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunError("data-timeout", f"the data set did not return within {timeout_s:g} s of closing")


CLOSE_TIMEOUT_S = 30.0
"""The most seconds that `close` waits: a run that ends must not wait as long as one that continues."""


@dataclass(frozen=True)
class _Item:
    """A prepared batch: this rank's rows, their sample numbers, and the feed's state after it."""

    batch: Batch
    samples: tuple[int, ...]
    state: dict[str, Any]


class Feed:
    """An endless source of one rank's rows; close it, or use it as a context manager, to end its thread.

    dataset: a Dataset, or a Stream.
    batch_size: samples of a **global** batch, over all ranks.
    rows: this rank's rows of the global batch.
    shuffle: whether each epoch of a Dataset has an order of its own.
    check: called with each batch and the sample numbers of its rows, in the feed's thread; `next` raises what it
    raises.
    will_save: whether positions will be kept: the digest of the data is then computed in the thread, before the first batch.
    timeout_s: how long `next` waits for the dataset before it raises RunError.

    notes: get what the user has to know about a stream that is resumed.

    After `next`, `wait_s` is how long it waited, and `samples` holds for each row the dataset's index, or for a stream its
    position in the whole sequence. `next` raises what the dataset raises. No method communicates.
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
        self._reading = Draws(seed, batch_size if is_stream(dataset) else len(rows))
        self._collating = Draws(seed, 1)
        self._prefetch: PrefetchThread[_Item] | None = None
        self._state: dict[str, Any] = {"samples": 0}
        self._reader = StreamReader(cast(Stream, dataset), self._reading.read) if is_stream(dataset) else None
        self.notes: list[str] = []
        self.wait_s = 0.0
        self.samples: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch; None for a stream. Asks the dataset for its length, which may load it."""
        return None if is_stream(self._dataset) else len(cast(Dataset, self._dataset))

    def next(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the host; blocks until the thread has read them.

        One batch is prefetched. Raises RunError "data-timeout" after `timeout_s`.
        """
        begin = time.perf_counter()
        if self._prefetch is None:
            self._prefetch = PrefetchThread(self._items(self._state))
        item = self._prefetch.get(self._timeout_s)
        self.wait_s = time.perf_counter() - begin
        self.samples, self._state = item.samples, item.state
        return item.batch

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch of `next`; small, and the same on every rank of every layout."""
        is_read = self._prefetch is not None and self._state["samples"] > 0
        found = self.digest if is_read and (self._will_save or self.is_digest_exact) else None
        return deepcopy(self._state) | ({} if found is None else {"digest": found})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `state` returned; `{"samples": 0}` is the beginning. Ends the thread."""
        self.close()
        self._state = deepcopy(dict(state))

    def changed_since(self, state: Mapping[str, Any]) -> str:
        """Returns in words how the data differ from those of which `state` is a position; "" if they do not, or if nothing can
        be said before they are read. Reads what `digest` needs; the feed's thread must not run.
        """
        before, now = state.get("digest"), None if "digest" not in state else self.digest
        if None in (before, now) or before == now:
            return ""
        if self.is_digest_exact:
            return "the text or tokens to train on, or their order, are not those of the checkpoint's run"
        return "the data set has another length than in the checkpoint's run, or other samples at its beginning, middle or end"

    @property
    def is_digest_exact(self) -> bool:
        """Whether the data set itself gives the digest: two digests then differ only if the data do."""
        return hasattr(self._dataset, "data_digest")

    @cached_property
    def digest(self) -> str | None:
        """The data set's own `data_digest`, else a digest of a few samples; None for a stream, or samples drawn anew."""
        if self._reader is not None:
            return None
        if self.is_digest_exact:
            return str(cast(Any, self._dataset).data_digest)
        set_epoch(self._dataset, 0)
        dataset = cast(Dataset, self._dataset)
        draws = Draws(self._seed, len(dataset))
        return probe(len(dataset), lambda index: draws.read(index, partial(read_sample, dataset, index)))

    def close(self) -> None:
        """Ends the thread and discards the prefetched batch, which a later `next` reads again. Raises RunError on timeout."""
        if self._prefetch is not None:
            self._prefetch.close(min(self._timeout_s, CLOSE_TIMEOUT_S))
            self._prefetch = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _items(self, state: Mapping[str, Any]) -> Iterator[_Item]:
        """Yields the batches from `state` on, each checked."""
        if self._reader is not None:
            items = self._walked(self._reader, state)
        else:
            items = self._indexed(cast(Dataset, self._dataset), state["samples"])
        for item in items:
            if self._check is not None:
                self._check(item.batch, item.samples)
            yield item

    def _indexed(self, dataset: Dataset, done: int) -> Iterator[_Item]:
        """Yields the batches of an indexed dataset after `done` samples, each rank reading only its own rows."""
        collate = collate_of(dataset)
        num_samples = len(dataset)
        if not num_samples:
            raise PlanError("data-empty", "the data set has no samples", path=("data",))

        @lru_cache(maxsize=2)
        def order(epoch: int) -> Order:
            """Returns the order of an epoch; two are cached, since a batch may span two epochs."""
            return Order(num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)

        self.notes.extend(note for note in getattr(dataset, "data_notes", ()) if note not in self.notes)
        if self._will_save:
            _ = self.digest
        last_epoch = -1
        while True:
            indices, samples = list[int](), list[Sample]()
            for row in self.rows:
                epoch, place = divmod(done + row, num_samples)
                if epoch != last_epoch:
                    set_epoch(dataset, epoch)
                    last_epoch = epoch
                indices.append(order(epoch)[place])
                samples.append(self._reading.read(done + row, partial(read_sample, dataset, indices[-1])))
            batch = self._collated(done + self.rows.start, collate, samples)
            done += self.batch_size
            yield _Item(batch, tuple(indices), {"samples": done})

    def _walked(self, reader: StreamReader, state: Mapping[str, Any]) -> Iterator[_Item]:
        """Yields the batches of a stream; each rank reads all of it and keeps its rows, so layouts get equal batches."""
        collate = collate_of(self._dataset)
        samples = reader.read(state, lambda note: self.notes.append(note))
        done = state["samples"]
        while True:
            place, digest, kept = reader.place(), SamplesDigest(), []
            # `range` comes first: `zip` then takes no sample beyond the batch.
            for row, sample in zip(range(self.batch_size), samples, strict=False):
                digest.add(sample)
                if row in self.rows:
                    kept.append(sample)
            numbers = tuple(done + row for row in self.rows)
            replay = {"samples": done, "place": place, "digest": digest.text}
            batch = self._collated(numbers[0], collate, kept)
            done += self.batch_size
            yield _Item(batch, numbers, {"samples": done, "replay": replay})

    def _collated(self, number: int, collate: Callable[[Sequence[Sample]], Batch], samples: Sequence[Sample]) -> Batch:
        """Returns the batch of `samples`, of which the first has this number.

        Raises RunError "data-random" if collating draws and this rank has only a part of the rows.
        """
        batch = self._collating.read(number, partial(collate, samples))
        if self._collating.has_drawn and len(self.rows) < self.batch_size:
            message = "collating a batch draws random numbers: each layout would make another batch of the same samples"
            raise RunError("data-random", message, hint="draw where a sample is read, in `__getitem__` or `__iter__`")
        return batch


def read_sample(dataset: Dataset, index: int) -> Sample:
    """Returns one sample; an error that would end the thread or process silently becomes RunError "data-sample"."""
    try:
        sample = dataset[index]
    except (StopIteration, SystemExit) as error:  # would end the iteration, or this process, silently
        raise RunError("data-sample", f"sample {index} of the data set failed: {cause(error)}") from error
    except Exception as error:
        note_origin(error, f"sample {index} of the data set", dataset)
        raise
    return sample


class Draws:
    """Reads samples, and seeds the host's generators by the sample's number for a data set that draws from them.

    A forward uses them at the same time, in another thread: the two take turns then. Whether the data set draws is looked at in
    the first reads, while the program waits for a first batch: of others, nothing else may notice.
    """

    def __init__(self, seed: int, looks: int) -> None:
        """looks: how many reads are looked at."""
        self._seed = seed
        self._looks_left = looks
        self.has_drawn = False

    def read(self, number: int, take: Callable[[], T]) -> T:
        """Returns what `take` returns. number: of the sample, over all epochs."""
        self._looks_left -= 1
        if not self.has_drawn and self._looks_left < 0:
            return take()
        with use_seed(derive(self._seed, "sample", number)):
            before = None if self.has_drawn else comparable_state()
            sample = take()
            self.has_drawn = before is None or before != comparable_state()
        return sample

"""The feed gives a rank its rows of each global batch; its state does not depend on the layout.

Samples form one endless sequence: epoch after epoch, each in its own order, none dropped between them. Batch b holds
the samples [b * G, (b + 1) * G) of that sequence, so a batch may span epochs, and concatenating the rows of all ranks
gives the same global batch in every layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from sley_core.data.collate import collate_of
from sley_core.data.dataset import AnyDataset, Batch, Dataset, Sample, Stream, is_stream
from sley_core.data.order import Order
from sley_core.data.prefetch import PrefetchThread
from sley_core.data.walk import stream_state, walk
from sley_core.errors import PlanError, RunError, note_origin
from sley_core.generators import comparable_state, seeded
from sley_core.model.seeds import derive
from sley_core.plan.factory import cause

CLOSE_TIMEOUT_S = 30.0
"""The most seconds that `close` waits: a run that ends must not wait as long as one that continues."""

LOOKS, LOOK_EVERY = 64, 1000
"""In how many first samples, and in which of the later ones, the feed looks whether reading them draws."""

T = TypeVar("T")


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
    timeout_s: how long `next` waits for the dataset before it raises RunError.

    After `next`, `wait_s` is how long it waited, and `samples` holds for each row the dataset's index, or for a stream
    its position in the whole sequence. `next` raises what the dataset raises. No method communicates.
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
    ) -> None:
        """Stores the arguments; the thread starts with the first `next`."""
        assert len(rows), rows
        assert rows == range(batch_size)[rows.start : rows.stop], (rows, batch_size)
        self._dataset = dataset
        self._seed = seed
        self._batch_size = batch_size
        self._rows = rows
        self._shuffle = shuffle
        self._timeout_s = timeout_s
        self._check = check
        self._reading, self._collating = _Draws(seed), _Draws(seed)
        self._prefetch: PrefetchThread[_Item] | None = None
        self._state: dict[str, Any] = {"samples": 0}
        self._beginning = stream_state(cast(Stream, dataset)) if is_stream(dataset) else {}
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
            self._prefetch = PrefetchThread(self._checked(self._items(self._state)))
        item = self._prefetch.get(self._timeout_s)
        self.wait_s = time.perf_counter() - begin
        self.samples, self._state = item.samples, item.state
        return item.batch

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch of `next`; small, and the same on every rank of every layout."""
        return deepcopy(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `state` returned; `{"samples": 0}` is the beginning. Ends the thread."""
        self.close()
        self._state = deepcopy(dict(state))

    def close(self) -> None:
        """Ends the thread and discards the prefetched batch, which a later `next` reads again. Raises RunError on timeout."""
        if self._prefetch is not None:
            self._prefetch.close(min(self._timeout_s, CLOSE_TIMEOUT_S))
            self._prefetch = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yields `items`, after calling `check` for each."""
        for item in items:
            if self._check is not None:
                self._check(item.batch, item.samples)
            yield item

    def _items(self, state: Mapping[str, Any]) -> Iterator[_Item]:
        """Returns the batches from the position `state` on, read as they are iterated."""
        if is_stream(self._dataset):
            return self._walked(cast(Stream, self._dataset), state)
        return self._indexed(cast(Dataset, self._dataset), state["samples"])

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

        while True:
            places = (divmod(done + row, num_samples) for row in self._rows)
            indices = tuple(order(epoch)[place] for epoch, place in places)
            samples = [
                self._reading.read(done + row, partial(_read, dataset, index))
                for row, index in zip(self._rows, indices, strict=True)
            ]
            batch = self._collated(done + self._rows.start, collate, samples)
            done += self._batch_size
            yield _Item(batch, indices, {"samples": done})

    def _walked(self, stream: Stream, state: Mapping[str, Any]) -> Iterator[_Item]:
        """Yields the batches of a stream; each rank reads all of it and keeps its rows, so layouts get equal batches."""
        collate = collate_of(stream)
        samples = walk(stream, state, self._beginning, self._reading.read)
        done = state["samples"]
        while True:
            # `range` comes first: `zip` then takes no sample beyond the batch.
            kept = [sample for row, sample in zip(range(self._batch_size), samples, strict=False) if row in self._rows]
            numbers = tuple(done + row for row in self._rows)
            batch = self._collated(numbers[0], collate, kept)
            done += self._batch_size
            yield _Item(batch, numbers, {"samples": done} | stream_state(stream))

    def _collated(self, number: int, collate: Callable[[Sequence[Sample]], Batch], samples: Sequence[Sample]) -> Batch:
        """Returns the batch of `samples`, of which the first has this number.

        Raises RunError "data-random" if collating draws and this rank has only a part of the rows.
        """
        batch = self._collating.read(number, partial(collate, samples))
        if self._collating.has_drawn and len(self._rows) < self._batch_size:
            raise RunError(
                "data-random",
                "collating a batch draws random numbers: each layout would make another batch of the same samples",
                hint="draw where a sample is read, in `__getitem__` or `__iter__`",
            )
        return batch


def _read(dataset: Dataset, index: int) -> Sample:
    """Returns one sample; an error that would end the thread or process silently becomes RunError "data-sample"."""
    try:
        sample = dataset[index]
    except (StopIteration, SystemExit) as error:  # would end the iteration, or this process, silently
        raise RunError("data-sample", f"sample {index} of the data set failed: {cause(error)}") from error
    except Exception as error:
        note_origin(error, f"sample {index} of the data set", dataset)
        raise
    return sample


class _Draws:
    """Reads samples, and seeds the host's generators by the sample's number for a data set that draws from them.

    A forward uses them at the same time, in another thread: the two take turns then. Whether the data set draws is looked at
    in its first samples, and in every `LOOK_EVERY`-th.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_read = 0
        self.has_drawn = False

    def read(self, number: int, take: Callable[[], T]) -> T:
        """Returns what `take` returns. number: of the sample, over all epochs."""
        self._num_read += 1
        if not self.has_drawn and self._num_read > LOOKS and self._num_read % LOOK_EVERY:
            return take()
        with seeded(derive(self._seed, "sample", number)):
            before = None if self.has_drawn else comparable_state()
            sample = take()
            self.has_drawn = before is None or before != comparable_state()
        return sample

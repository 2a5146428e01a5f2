"""Every layout and every restart gets the same samples, each once per epoch; a thread of the feed's own reads ahead."""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from random import Random, SystemRandom
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sley_core.data.batches import wrap_dataset
from sley_core.data.dataset import DataInfo, FactoryDataConfig, Field, Order
from sley_core.data.feed import Feed
from sley_core.errors import PlanError, RunError
from sley_core.json_text import decode_value, encode_value

INFO = DataInfo({"x": Field("int64")})


class Numbers:
    """Sample i is the number `value(i)`."""

    info = INFO

    def __init__(self, num_samples: int, value: Callable[[int], int] = int) -> None:
        self.num_samples = num_samples
        self.value = value

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.value(index))}


class Stream:
    """0, 1, ..., n - 1, and again at each `iter`."""

    info = INFO

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.num_samples):
            self.num_read += 1
            yield {"x": torch.tensor(number)}


class TorchNamedStream(Stream):
    """The same, and it can be put where it was: iterating goes on from there."""

    place = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.place < self.num_samples:
            self.place += 1
            self.num_read += 1
            yield {"x": torch.tensor(self.place - 1)}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class StatefulStream(TorchNamedStream):
    state = TorchNamedStream.state_dict
    restore = TorchNamedStream.load_state_dict


def drawn_anew(index: int) -> int:
    return SystemRandom().randrange(1 << 40)


def gone(index: int) -> int:
    raise OSError("gone")


KINDS = [Numbers, Stream, StatefulStream]


def taken(dataset: Any, num_batches: int, batch_size: int, rows: range | None = None, **more: Any) -> list[list[int]]:
    with Feed(dataset, seed=1, batch_size=batch_size, rows=rows or range(batch_size), **more) as feed:
        return [feed.next()["x"].tolist() for _ in range(num_batches)]


@pytest.mark.parametrize("kind", [*KINDS, TorchNamedStream])
def test_no_sample_is_lost_when_the_first_is_read_for_the_fields(kind: type) -> None:
    dataset = kind(5)
    dataset.info = None
    wrapped = wrap_dataset(dataset, FactoryDataConfig(), "my:kind")
    assert wrapped.info == INFO
    assert taken(wrapped, 3, 2, shuffle=False) == [[0, 1], [2, 3], [4, 0]]


def test_a_stream_with_a_state_is_not_walked_again() -> None:
    with Feed(StatefulStream(1000), seed=1, batch_size=100, rows=range(100)) as feed:
        for _ in range(5):
            feed.next()
        state = feed.state()
    assert state["replay"]["place"] == {"epoch": 0, "stream": {"place": 400}}
    stream = StatefulStream(1000)
    with Feed(stream, seed=1, batch_size=100, rows=range(100)) as feed:
        feed.restore(state)
        assert feed.next()["x"][0] == 500
    assert stream.num_read <= 300  # the last batch before, this one, and one that is prefetched
    assert feed.notes == []


class Buffered(TorchNamedStream):
    """Draws from a buffer, whose content is not in its state; as shuffled streams of Hugging Face."""

    size = 5

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        drawn, buffer = Random(self.num_samples), list[dict[str, Tensor]]()
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > self.size:
                yield buffer.pop(drawn.randrange(len(buffer)))
        drawn.shuffle(buffer)
        yield from buffer


class Early(TorchNamedStream):
    """Its state lags behind by as much as is left of a chunk of four."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place // 4 * 4}


class Ordered:
    """Another order in each epoch."""

    epoch = 0
    num_samples: int

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return Random(self.epoch).sample(range(self.num_samples), self.num_samples)


class Epochs(Ordered, TorchNamedStream):
    """Its state does not have the order."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = self.order()
        return ({"x": torch.tensor(order[int(sample["x"])])} for sample in super().__iter__())


class EpochsAgain(Ordered, Stream):
    """The same without a state."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": torch.tensor(number)} for number in self.order())


@pytest.mark.parametrize("kind", [*KINDS, TorchNamedStream, Buffered, Early, Epochs, EpochsAgain])
@pytest.mark.parametrize("seed", range(2))
def test_a_feed_that_is_restored_again_and_again_goes_on_as_if_it_had_not_stopped(kind: type, seed: int) -> None:
    """Also where the restored feed was in use, and where its rank has other rows."""
    drawn = Random(seed)
    num_samples, batch_size = drawn.randint(7, 40), drawn.randint(1, 6)
    whole = taken(kind(num_samples), 30, batch_size)
    epochs = list(chain.from_iterable(whole))
    for start in range(0, len(epochs), num_samples):
        assert len(set(epochs[start : start + num_samples])) == len(epochs[start : start + num_samples])
    num_done = 0
    state: dict[str, Any] | None = None
    while num_done < 30:
        start = drawn.randrange(batch_size)
        rows = range(start, drawn.randint(start + 1, batch_size))
        with Feed(kind(num_samples), seed=1, batch_size=batch_size, rows=rows) as feed:
            if state is not None:
                for _ in range(drawn.randrange(2)):
                    feed.next()
                feed.restore(decode_value(json.loads(json.dumps(encode_value(state)))))
                assert feed.state() == state
            for batch in whole[num_done : num_done + drawn.randint(0, 12)]:
                assert feed.next()["x"].tolist() == batch[rows.start : rows.stop]
                num_done += 1
            state = feed.state()
            assert len(feed.notes) <= (kind in (Buffered, Early)), feed.notes


def test_a_stream_that_gives_others_after_a_resume_is_said() -> None:
    class Other(Stream):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"x": sample["x"] + 1} for sample in super().__iter__())

    with Feed(Stream(9), seed=1, batch_size=2, rows=range(2)) as feed:
        feed.next()
        state = feed.state()
    with Feed(Other(9), seed=1, batch_size=2, rows=range(2)) as feed:
        assert feed.digest is None
        feed.restore(state)
        feed.next()
    (note,) = feed.notes
    assert "yields different samples" in note


@pytest.mark.parametrize("value", [{1, 2}, range(3), object()])
def test_a_stream_whose_state_cannot_be_saved_is_refused_with_the_first_batch(value: Any) -> None:
    class Odd(TorchNamedStream):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict() | ({"nested": [value]} if self.place else {})

    with Feed(Odd(9), seed=1, batch_size=2, rows=range(2), will_save=True) as feed, pytest.raises(RunError, match="data-state"):
        feed.next()
    with Feed(Odd(9), seed=1, batch_size=2, rows=range(2)) as feed:
        for _ in range(2):
            feed.next()
        with pytest.raises(RunError, match=r"cannot store the state of the data stream: .* is not plain data"):
            feed.encoded_state()


def test_an_indexed_data_set_is_told_its_epochs() -> None:
    class Told(Numbers):
        told: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    taken(Told(4), 5, 3)
    assert Told.told[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        (Numbers(9), Numbers(9), False),
        (Numbers(9), Numbers(8), True),
        (Numbers(9), Numbers(9, lambda index: index + 1), True),
        (Numbers(9, drawn_anew), Numbers(9, drawn_anew), False),
        (Numbers(9, drawn_anew), Numbers(9), False),
        (Numbers(9), Numbers(9, gone), False),
    ],
)
def test_a_data_set_with_other_samples_is_noticed_unless_they_are_drawn(before: Any, now: Any, differs: bool) -> None:
    with Feed(before, seed=1, batch_size=2, rows=range(2), will_save=True) as feed:
        feed.next()
        state = feed.state()
    with Feed(now, seed=1, batch_size=2, rows=range(2)) as feed:
        assert bool(feed.describe_change(state)) == differs
        assert not feed.describe_change({"samples": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_give_is_an_error(kind: type) -> None:
    with pytest.raises(PlanError) as caught:
        taken(kind(0), 1, 2)
    assert caught.value.diagnostics[0].code == "data-empty"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"y": torch.tensor(0)}, r"declared fields \['x'\], but has \['y'\]"),
        ({"x": torch.tensor(0), "y": torch.tensor(0)}, "must have the declared fields"),
        ({"x": torch.tensor(0.0)}, "must be a tensor of torch.int64, but is torch.float32"),
        ({"x": 0}, "must be a tensor of torch.int64, but is a int"),
        ({"x": torch.tensor([0])}, r"cannot be stacked along dim 0: .* \[1\] at entry 1"),
    ],
)
def test_a_sample_that_is_not_as_declared_is_an_error(sample: dict[str, Any], message: str) -> None:
    class Odd(Numbers):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return sample if index == 1 else super().__getitem__(index)

    with pytest.raises(RunError, match=message):
        taken(Odd(2), 1, 2, shuffle=False)


@given(st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
@settings(deadline=None)
def test_each_sample_comes_once_for_any_seed_and_epoch(num_samples: int, seed: int, epoch: int) -> None:
    order = Order(num_samples, seed=seed, epoch=epoch)
    assert {order[place] for place in range(num_samples)} == set(range(num_samples))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert list(Order(10, seed=1, epoch=2)) == [8, 1, 9, 7, 6, 5, 3, 2, 4, 0]


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sley-data"]


def breaks_at_three(index: int) -> int:
    if index == 3:
        raise KeyError("sample three is broken")
    return index


def test_what_a_dataset_raises_reaches_the_caller_with_its_traceback() -> None:
    with Feed(Numbers(6, breaks_at_three), seed=1, batch_size=2, rows=range(2), shuffle=False) as feed:
        feed.next()
        for _ in range(2):
            with pytest.raises(KeyError, match="sample three is broken") as caught:
                feed.next()
            text = "".join(traceback.format_exception(caught.value))
            assert "in breaks_at_three" in text
            assert "in sample 3 of the dataset" in text
        assert feed.state() == {"samples": 2}
        for thread in data_threads():
            thread.join(timeout=10)
        assert not data_threads()  # a thread would keep the error, its frames and their tensors until the feed is closed


def test_closing_leaves_no_thread_and_loses_nothing() -> None:
    feed = Feed(Numbers(9), seed=1, batch_size=2, rows=range(2), shuffle=False)
    feed.close()
    assert feed.next()["x"].tolist() == [0, 1]
    assert len(data_threads()) == 1
    feed.close()
    feed.close()
    assert not data_threads()
    assert feed.next()["x"].tolist() == [2, 3]
    feed.close()


def test_closing_a_feed_closes_the_iterator_of_a_stream() -> None:
    closed = []

    class Kept(Stream):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            self.iterator = self.samples()
            return self.iterator

        def samples(self) -> Iterator[dict[str, Tensor]]:
            try:
                yield from super().__iter__()
            finally:
                closed.append(True)

    with Feed(Kept(6), seed=1, batch_size=2, rows=range(2), shuffle=False) as feed:
        feed.next()
        assert not closed
    assert closed


class Waits(Numbers):
    """Every sample waits for a permit."""

    def __init__(self, num_samples: int, num_permits: int) -> None:
        super().__init__(num_samples, self.wait)
        self.permits = threading.Semaphore(num_permits)
        self.read: list[int] = []

    def wait(self, index: int) -> int:
        assert self.permits.acquire(timeout=10)
        self.read.append(index)
        return index


def test_exactly_one_batch_is_prepared_ahead() -> None:
    dataset = Waits(100, 100)
    with Feed(dataset, seed=1, batch_size=2, rows=range(2), shuffle=False) as feed:
        feed.next()
        wait_until(lambda: len(dataset.read) == 4)
        time.sleep(0.05)
        assert dataset.read == [0, 1, 2, 3]
        feed.next(is_last=True)
        time.sleep(0.05)
        assert dataset.read == [0, 1, 2, 3]


class Draws(Waits):
    """Adds a random number to each sample from number `start` on. Declares it if the first batch has none."""

    def __init__(self, start: int) -> None:
        super().__init__(100, 100)
        self.start = start
        self.draws_random = start > 0

    def wait(self, index: int) -> int:
        return 1000 * super().wait(index) + (int(torch.randint(1000, ())) if index >= self.start else 0)


@pytest.mark.parametrize("start", [0, 5])
def test_samples_with_random_numbers_are_read_only_within_next(start: int) -> None:
    dataset = Draws(start)
    with Feed(dataset, seed=1, batch_size=2, rows=range(2), shuffle=False) as feed, torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        batches, program_numbers = [], []
        for _ in range(4):
            batches.append(feed.next()["x"])
            program_numbers.append(torch.rand(()))
        time.sleep(0.05)
        assert dataset.read == list(range(8))
        torch.manual_seed(3)
        assert program_numbers == [torch.rand(()) for _ in range(4)]
        for number in (1, 2):
            feed.restore({"samples": 2 * number})
            assert torch.equal(feed.next()["x"], batches[number])


def test_a_dataset_that_never_returns_is_an_error_in_time() -> None:
    dataset = Waits(100, 0)
    feed = Feed(dataset, seed=1, batch_size=1, rows=range(1), timeout_s=0.05)
    with pytest.raises(RunError, match=r"returned no batch within 0.05 s"):
        feed.next()
    with pytest.raises(RunError, match=r"returned no batch within 0.05 s after the feed was closed"):
        feed.close()
    dataset.permits.release()
    wait_until(lambda: not data_threads())
    feed.close()


def wait_until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within 5 s")

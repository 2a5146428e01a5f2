"""The feed reads ahead in a thread of its own: what it raises reaches the caller, and closing ends it."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import pytest
from numbered import Numbers
from torch import Tensor

from sley_core.data.feed import Feed
from sley_core.errors import RunError


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sley-data"]


class Breaks(Numbers):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 3:
            raise KeyError("sample three is broken")
        return super().__getitem__(index)


def test_what_a_dataset_raises_reaches_the_caller_with_its_traceback() -> None:
    with Feed(Breaks(6), seed=1, batch_size=2, rows=range(2), shuffle=False) as feed:
        feed.next()
        for _ in range(2):
            with pytest.raises(KeyError, match="sample three is broken") as caught:
                feed.next()
            text = "".join(traceback.format_exception(caught.value))
            assert "in __getitem__" in text
            assert "in sample 3 of the data set" in text
        assert feed.state() == {"samples": 2}
    assert not data_threads()


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


class Waits(Numbers):
    """Every sample waits for a permit."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.permits = threading.Semaphore(0)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        assert self.permits.acquire(timeout=10)
        self.read.append(index)
        return super().__getitem__(index)


def test_exactly_one_batch_is_prepared_ahead() -> None:
    dataset = Waits(100)
    for _ in range(100):
        dataset.permits.release()
    with Feed(dataset, seed=1, batch_size=2, rows=range(2), shuffle=False) as feed:
        feed.next()
        wait_until(lambda: len(dataset.read) == 4)
        time.sleep(0.05)
        assert dataset.read == [0, 1, 2, 3]


def test_a_dataset_that_never_returns_is_an_error_in_time() -> None:
    dataset = Waits(100)
    feed = Feed(dataset, seed=1, batch_size=1, rows=range(1), timeout_s=0.05)
    with pytest.raises(RunError, match=r"gave no batch within 0.05 s"):
        feed.next()
    with pytest.raises(RunError, match=r"did not return within 0.05 s of closing"):
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

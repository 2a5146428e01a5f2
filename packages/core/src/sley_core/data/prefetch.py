"""Prefetches items: one background thread prepares the next item while the current one is used.

         ┌── permit ──┐                   The thread makes one item per permit. A permit is given when it starts and
    next │            │ get               whenever an item is taken, so exactly one item is prefetched.
         └── queue ───┘

What the thread raises is raised by `get`, with the thread's own traceback. The thread is a daemon: a dataset that never returns
cannot keep a process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from sley_core.errors import RunError

T = TypeVar("T")


class PrefetchThread(Generic[T]):
    """Prefetches the items of `items`, in order, one at a time. `close` stops and joins the thread."""

    def __init__(self, items: Iterator[T]) -> None:
        """Starts the thread, which prepares the first item at once."""
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
            raise RunError(
                "data-timeout",
                f"the data set gave no batch within {timeout_s:g} s",
                hint="its `__getitem__` or `__iter__` waits for something; if it needs longer, raise [limits] data_timeout_s",
            ) from None
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

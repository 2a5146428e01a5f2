"""Watches the thread that runs a factory, and the threads that it starts or submits work to.

torch's modes apply to one thread, but code that loads checkpoints often writes to parameters from a thread pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from sley_core.model.journal import Journal
from sley_core.model.record import Recorder
from sley_core.model.surface import Surface, whole_functions

_THREAD: Any = threading.Thread
_POOL: Any = ThreadPoolExecutor


@contextmanager
def watched(journal: Journal, registered: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Returns a context manager that records what this thread does, and the threads that it starts or submits executor work to.

    registered: returns the meta parameter that replaces a real one, or None. Patches `Thread.start` and
    `ThreadPoolExecutor.submit` for the whole process until the context ends; threads that live longer are no longer recorded.
    """
    here = threading.local()

    def inside(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `run` with this thread recorded; directly if it is recorded already or the factory has ended."""
        if getattr(here, "is_watched", False) or journal.is_closed:
            return run(*args, **kwargs)
        here.is_watched = True
        try:
            with Surface(journal, registered), Recorder(journal):
                return run(*args, **kwargs)
        finally:
            here.is_watched = False

    start, submit = _THREAD.start, _POOL.submit

    def started(thread: Any) -> None:
        """Replaces `Thread.start`: a thread started by a recorded thread is recorded too."""
        if getattr(here, "is_watched", False):
            thread.run = partial(inside, thread.run)
        start(thread)

    def submitted(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Replaces `ThreadPoolExecutor.submit`: work submitted by a recorded thread is recorded too."""
        work = partial(inside, function) if getattr(here, "is_watched", False) else function
        return submit(pool, work, *args, **kwargs)

    here.is_watched, _THREAD.start, _POOL.submit = True, started, submitted
    try:
        with whole_functions(journal), Surface(journal, registered), Recorder(journal):
            yield
    finally:
        _THREAD.start, _POOL.submit = start, submit
        journal.close()

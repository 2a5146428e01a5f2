"""Watches a factory: the thread that runs it, and those that it starts or gives work to.

torch's modes are a thread's own, and code that reads checkpoints writes to parameters in pools of threads.
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
    """Inside, what this thread does is remembered, and what threads do that it starts, or gives work to by an executor.

    registered: the parameter on meta that stands for a real one. Threads that go on afterwards are watched no more.
    """
    here = threading.local()

    def inside(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        if getattr(here, "is_watched", False):
            thread.run = partial(inside, thread.run)
        start(thread)

    def submitted(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        work = partial(inside, function) if getattr(here, "is_watched", False) else function
        return submit(pool, work, *args, **kwargs)

    here.is_watched, _THREAD.start, _POOL.submit = True, started, submitted
    try:
        with whole_functions(journal), Surface(journal, registered), Recorder(journal):
            yield
    finally:
        _THREAD.start, _POOL.submit = start, submit
        journal.close()

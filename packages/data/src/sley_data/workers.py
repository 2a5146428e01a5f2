"""Calls a function on batches in worker processes, one for each core; torch-free.

The workers are new Python processes, since a rank may have threads and a GPU, and its main module may lack a guard.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import Any, Self, TypeVar

from sley_core.errors import RunError

T = TypeVar("T")
R = TypeVar("R")

_COMMAND = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from sley_data.workers import run_worker; run_worker()"
)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_batches(function: Callable[[T], R], batches: Iterable[T]) -> Generator[R]:
    """Yields the result of `function` for each batch, in order. With one core, this process calls the function.

    At most four batches per core are in memory. Function, batches and results must be picklable. Raises the errors of
    `function`, and RunError "data-worker" if a worker process dies.
    """
    if num_cores() == 1:
        yield from map(function, batches)
        return
    idle_workers: SimpleQueue[_Worker] = SimpleQueue()

    def call(batch: T) -> R:
        worker = idle_workers.get()
        try:
            result: R = worker.call(batch)
            return result
        finally:
            idle_workers.put(worker)

    pending: deque[Future[R]] = deque()
    with ExitStack() as stack:
        for _ in range(num_cores()):
            idle_workers.put(stack.enter_context(_Worker(function)))
        pool = stack.enter_context(ThreadPoolExecutor(num_cores()))
        for batch in batches:
            pending.append(pool.submit(call, batch))
            if len(pending) == 4 * num_cores():
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Worker:
    """A process that calls `function` on each batch that it receives. Closing its pipe ends it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one thread: each core has a process
        self._process = Popen([sys.executable, "-c", _COMMAND], stdin=PIPE, stdout=PIPE, env=environment)
        self._send(sys.path)
        self._send(function)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def call(self, batch: Any) -> Any:
        assert self._process.stdout is not None
        try:
            self._send(batch)
            is_error, result = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the last if the process died mid-reply
            message = f"a worker process exited with status {self._process.wait()} while tokenizing {batch}"
            hint = "if the system killed the process, use a host with more memory or set `cache` to a path on another disk"
            raise RunError("data-worker", message, path=("data",), hint=hint) from None
        if is_error:
            raise result
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def run_worker() -> None:
    """Runs a worker: reads the function and the batches from stdin, and writes the results to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which stops the workers
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of libraries is not part of a reply
    try:
        function = pickle.load(requests)
        while True:
            batch = pickle.load(requests)
            try:
                reply = (False, function(batch))
            except Exception as error:
                reply = (True, error)
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has ended

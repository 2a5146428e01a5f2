"""Makes calls that take seconds, each in a process forked from this one, several at a time.

this process ──fork──> call, its result by a pipe, the end     (once for each call)
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from sley_core.errors import RunError
from sley_estimate.bytes.limited import late_error

T = TypeVar("T")

BACKWARD_S = 60.0
"""What the backward of one element may take, in a fork that finds no lock which nobody holds there."""


def can_fork() -> bool:
    """Returns whether a process forked from this one can work: torch refuses a backward there once there was one here."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return all(is_done for _, is_done in forked([_backward], 1, BACKWARD_S))
    except (RuntimeError, RunError):
        return False


def forked(calls: Iterable[Callable[[], T]], at_once: int, limit_s: float) -> Iterator[tuple[int, T]]:
    """Yields the number of each call, from 0, and its result, as they end; at most `at_once` processes run at a time. A call
    is taken from `calls`, and sees what was done in this process, when it is started.

    Results cross by pickle. Raises what a call raises, RunError `estimate-ended` for a process that ends before its call, and
    `estimate-late` for a call that takes longer than `limit_s`; then, and when the caller wants no more, the other processes
    are killed.
    """
    context = multiprocessing.get_context("fork")
    left = enumerate(calls)
    running: dict[Any, tuple[int, Any, float]] = {}
    try:
        while True:
            for number, call in islice(left, at_once - len(running)):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(call, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = number, process, time.monotonic() + limit_s
            if not running:
                return
            first_end = min(end for _, _, end in running.values())
            done = wait(list(running), max(0.0, first_end - time.monotonic()))
            if not done:
                raise late_error(limit_s)
            for ended in done:
                number, process, _ = running[ended]
                result = _received(ended, process)
                del running[ended]
                yield number, result
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def _received(receiver: Any, process: Any) -> Any:
    """Returns the result that a forked process sends, and waits for the end of the process.

    Raises what its call raised, and RunError `estimate-ended` if it ended without sending anything.
    """
    try:
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        raise RunError(
            "estimate-ended",
            f"a process that took a stage's steps without values ended with code {process.exitcode}",
            hint="-9 is the system's when memory runs out",
        ) from None
    process.join()
    if not is_done:
        raise result
    return result


def _work(call: Callable[[], Any], sender: Connection) -> None:
    """Makes the call in a forked process, with one thread, and sends (True, its result) or (False, the exception)."""
    gc.freeze()  # what was inherited is neither walked through nor, by that, copied
    torch.set_num_threads(1)  # those of OpenMP did not come along
    try:
        sender.send((True, call()))
    except Exception as error:
        sender.send((False, error))


def _backward() -> bool:
    """Runs the backward of one element and returns True: where torch refuses backwards in a fork it raises."""
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    return True

"""Limits the time of steps that are taken in this process: what waits for ever, as a layer for a lock, is interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sley_core.errors import RunError


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises RunError `estimate-late` in the block once it has lasted `limit_s` seconds.

    The system's timer interrupts Python code, and waits that a signal ends; what a library does by itself goes on until it is
    back. In a thread that is not the main one, on a system without such timers, and beside somebody's timer that is due
    before, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    due_s, again_s = signal.getitimer(signal.ITIMER_REAL)
    if 0 < due_s <= limit_s:
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise late_error(limit_s)

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if due_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, due_s - (time.monotonic() - began)), again_s)


def late_error(limit_s: float) -> RunError:
    """Returns the RunError `estimate-late` of steps that took longer than `limit_s`, in this process or in one of their own."""
    return RunError(
        "estimate-late",
        f"the steps of a stage, without values, were not done after {limit_s:g} s",
        hint="`train-cli run --dry-run` takes the same steps: does a layer wait for a lock, a file or a peer? "
        "If it only takes long, raise [limits] estimate_timeout_s",
    )

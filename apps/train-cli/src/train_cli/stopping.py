"""What signals do to one rank: it finishes its step, ends what it began, and is gone within a limit.

    working ── first SIGINT ──> run.stop(): the step is finished ── the loop returned ──> tearing down, 10 s at most
        │                              └── second SIGINT ──> gone at once
        └── SIGTERM ──> run.stop(), and gone after 8 s whatever happens: peers may be dead, and a collective may hang

A thread of its own does it, woken by C: the main thread may be inside a collective that never returns.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from sley_core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

TEAR_DOWN_S = 10.0
TERMINATED_S = 8.0

_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
_LOOK_AGAIN = b"\0"
_SHOW_CURSOR = b"\x1b[?25h"
"""A progress line may have hidden it."""


class Terminated(SystemExit):
    """SIGTERM came while there was no step to finish."""


class Stopping(AbstractContextManager["Stopping"]):
    """Handles SIGINT and SIGTERM of this process while it is entered.

    say: tells the user that the signal was heard; left out where a launcher has said so. Does nothing in a thread other
    than the main one, where Python allows no handlers.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._stop: Callable[[], None] | None = None
        self._first: int | None = None
        self._deadline: float | None = None
        self._deadline_code = 0
        self._closed = False
        self._is_main = threading.current_thread() is threading.main_thread()

    @property
    def exit_code(self) -> int | None:
        """130 or 143 once a signal came, else None."""
        return None if self._first is None else _CODES[signal.Signals(self._first)]

    def working(self, stop: Callable[[], None]) -> None:
        """From here on a signal calls `stop` (from another thread); before, it raises in the main thread."""
        self._stop = stop

    def tearing_down(self, code: int) -> None:
        """Gives this process `TEAR_DOWN_S` seconds until it ends with exit code `code`."""
        self._limit(TEAR_DOWN_S, code)
        if self._is_main:
            os.write(self._writer, _LOOK_AGAIN)

    def __enter__(self) -> Stopping:
        if not self._is_main:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in _CODES}
        self._thread = threading.Thread(target=self._watch, name="sley-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_main:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._closed = True
        os.write(self._writer, _LOOK_AGAIN)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(EXIT_TERMINATED)

    def _watch(self) -> None:
        while not self._closed:
            wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], wait_s)
            if not ready:
                _leave(self._deadline_code)
            for number in os.read(self._reader, 64):
                if number in _CODES:
                    self._heard(number)

    def _heard(self, number: int) -> None:
        code = _CODES[signal.Signals(number)]
        if self._first is None:
            self._first = number
            if self._stop is not None:
                if self._say is not None:
                    self._say("stopping after this step; Ctrl-C again stops at once")
                self._stop()
            else:
                self._limit(TEAR_DOWN_S, code)
        elif number == signal.SIGINT:
            _leave(code)
        if number == signal.SIGTERM:
            self._limit(TERMINATED_S, self.exit_code or code)

    def _limit(self, seconds: float, code: int) -> None:
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline, self._deadline_code = deadline, code


def _leave(code: int) -> None:
    """Ends this process now, from any thread; what is in buffers is lost, what a writer has flushed is not."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)
    os._exit(code)

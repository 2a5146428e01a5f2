"""What signals do to one rank: it finishes its step, ends what it began, and is gone within a limit.

    working ── first SIGINT ──> run.stop(): the step is finished ── the loop returned ──> tearing down, 10 s at most
        │                              ├── still in the step ──> a line every 10 s
        │                              └── second SIGINT ──> gone at once
        └── SIGTERM ──> run.stop(), and gone after 8 s whatever happens: peers may be dead, and a collective may hang

SIGHUP, a terminal that was closed, is SIGTERM with another exit code; not where it is ignored, as under `nohup`.

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

from sley_core.errors import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED
from train_cli.lifeline import end_workers

TEAR_DOWN_S = 10.0
TERMINATED_S = 8.0
REMIND_S = 10.0
TOGETHER_S = 1.0
"""Within this a second SIGINT is the first again: what interrupts a whole job reaches a rank directly and by its launcher."""

HEARD = "stopping after this step; Ctrl-C again stops at once"
STILL = "still in this step after {:.0f} s; Ctrl-C again stops at once"

_LOOK_AGAIN = b"\0"
_SHOW_CURSOR = b"\x1b[?25h"
"""A progress line may have hidden it."""


class Terminated(SystemExit):
    """SIGTERM came while there was no step to finish."""


def codes() -> dict[int, int]:
    """The signals that end a run in order, with the exit codes of a run that they ended."""
    found: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found[signal.SIGHUP] = EXIT_HUNG_UP
    return found


class Stopping(AbstractContextManager["Stopping"]):
    """Handles SIGINT, SIGTERM and SIGHUP of this process while it is entered.

    say: tells the user that the signal was heard; left out where a launcher has said so. late: called, in a thread of its own,
    before a process ends that SIGTERM could not end within `TERMINATED_S`. Does nothing in a thread other than the main
    one, where Python allows no handlers.
    """

    def __init__(self, say: Callable[[str], None] | None = None, late: Callable[[], None] | None = None) -> None:
        self._say = say
        self._late = late
        self._codes = codes()
        self._stop: Callable[[], None] | None = None
        self._first: int | None = None
        self._heard_at = 0.0
        self._is_working = False
        self._deadline: float | None = None
        self._deadline_code = 0
        self._closed = False
        self._is_main = threading.current_thread() is threading.main_thread()

    @property
    def exit_code(self) -> int | None:
        """130, 143 or 129 once a signal came, else None."""
        return None if self._first is None else self._codes[self._first]

    def working(self, stop: Callable[[], None]) -> None:
        """From here on a signal calls `stop` (from another thread); before, it raises in the main thread."""
        self._stop = stop
        self._is_working = True

    def tearing_down(self, code: int) -> None:
        """Gives this process `TEAR_DOWN_S` seconds until it ends with exit code `code`."""
        self._is_working = False
        self._limit(TEAR_DOWN_S, code)
        if self._is_main:
            os.write(self._writer, _LOOK_AGAIN)

    def __enter__(self) -> Stopping:
        if not self._is_main:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in self._codes}
        self._thread = threading.Thread(target=self._watch, name="sley-signals", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)
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

    def _forget(self) -> None:
        """Puts the handlers back in a process forked from this one, such as a worker of `multiprocessing`.

        There SIGTERM would stop nothing, and the end of this process, which sends it and waits, would never come.
        """
        if not self._closed:
            self._closed = True
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(self._codes[number])

    def _watch(self) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._reader], [], [], self._wait_s())
            if not ready:
                self._tick()
            else:
                for number in os.read(self._reader, 64):
                    if number in self._codes:
                        self._heard(number)

    def _wait_s(self) -> float | None:
        """Until the next moment at which there is something to do; None where only a signal can bring one."""
        if self._deadline is not None:
            return max(0.0, self._deadline - time.monotonic())
        return None if self._first is None or self._say is None else REMIND_S

    def _tick(self) -> None:
        if self._deadline is None:
            if self._say is not None and self._is_working:
                self._say(STILL.format(time.monotonic() - self._heard_at))
        elif time.monotonic() >= self._deadline:
            if self._late is not None:
                self._late()
            _leave(self._deadline_code)

    def _heard(self, number: int) -> None:
        code = self._codes[number]
        now = time.monotonic()
        if self._first is None:
            self._first, self._heard_at = number, now
            if self._stop is not None:
                if self._say is not None:
                    self._say(HEARD)
                self._stop()
            else:
                self._limit(TEAR_DOWN_S, code)
        elif number == signal.SIGINT and (self._say is not None or now - self._heard_at > TOGETHER_S):
            _leave(code)
        if number != signal.SIGINT:
            self._limit(TERMINATED_S, self.exit_code or code)

    def _limit(self, seconds: float, code: int) -> None:
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline, self._deadline_code = deadline, code


def _leave(code: int) -> None:
    """Ends this process now, from any thread; what is in buffers is lost, what a writer has flushed is not."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)
    end_workers()
    os._exit(code)

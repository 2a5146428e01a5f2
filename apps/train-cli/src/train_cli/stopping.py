"""How a rank ends: by a signal, after its step and within a time limit; with its launcher; and without waiting for peers.

    working ── first SIGINT ──> run.stop(): the step is finished ── the loop returned ──> tearing down, 10 s at most
        │                              ├── still in the step ──> a line every 10 s
        │                              └── second SIGINT ──> ended at once
        └── SIGTERM ──> run.stop(), and ended after 25 s whatever happens, 8 s where nothing is to be saved
                  └── SIGTERM again ──> ended after 6 s: peers have died, and a collective may hang

SIGHUP, a terminal that was closed, is SIGTERM with another exit code; not where it is ignored, as under `nohup`. A warning of a
batch system (`[run] stop_signals`) asks the run to stop too, and sets no limit: the batch system has one.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sley_core.errors import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

TEAR_DOWN_S = 10.0
TERMINATED_S = 8.0
SAVING_S = 25.0
"""As `TERMINATED_S`, of a run that saves itself or its weights when it is asked to stop; torchrun kills after 30 s."""

HURRY_S = 6.0
"""From a second SIGTERM on: the sender waits no longer, such as a launcher of which a rank has failed."""

REMIND_S = 10.0
TOGETHER_S = 1.0
"""Within this time a second signal counts as the first: an interrupt of a job reaches a rank directly and by its launcher."""

HEARD = "stopping after this step; Ctrl-C again stops at once"
STILL = "still in this step after {:.0f} s; Ctrl-C again stops at once"

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that batch systems send some time before they end a job."""

LAUNCHER = "SLEY_LAUNCHER"
"""The environment variable in which a local launch gives its process id to the ranks that it starts."""

ELASTIC = "TORCHELASTIC_RUN_ID"
"""The variable that torchrun sets for its workers: on Linux these die with it too."""

_LOOK_AGAIN = b"\0"
_SHOW_CURSOR = b"\x1b[?25h"
"""A progress line may have hidden it."""

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.5

_has_launcher = False


def has_launcher() -> bool:
    """Returns whether this process is a rank of a local launch, whose launcher shows its errors."""
    return _has_launcher


def die_with_launcher() -> None:
    """Makes this process end with its launcher, ours or torchrun, even after the launcher's `kill -9`; does nothing if neither
    started it.

    On Linux the kernel sends the signal, even while the rank hangs in a driver; elsewhere a thread watches the parent. Called
    before slow imports. If the launcher has already died, this process ends here.
    """
    global _has_launcher
    # Taken away, so that a process that the rank starts does not mistake itself for one.
    launcher = int(os.environ.pop(LAUNCHER, 0))
    _has_launcher = launcher != 0
    if not _has_launcher and ELASTIC not in os.environ:
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    elif _has_launcher:
        threading.Thread(target=_watch_parent, args=(launcher,), name="sley-watch-launcher", daemon=True).start()
    if _has_launcher and os.getppid() != launcher:
        os._exit(1)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends this process with exit code `code`.

    A rank that failed ends at once, without destructors: those of communicators may wait for peers that are gone. Its
    `multiprocessing` children are killed, since Python's exit handlers do not run.
    """
    if code and "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        _kill_workers()
        os._exit(code)
    sys.exit(code)


def _kill_workers() -> None:
    if "multiprocessing" in sys.modules:
        with suppress(ValueError):  # not the main thread, which alone runs handlers
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's for loaders raises when a worker is killed
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()


class Terminated(BaseException):
    """Raised by SIGTERM while there is no step to finish; ends the process with exit code `code`.

    No SystemExit, which a factory of the user's may raise, and which is reported as its failure.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def terminated_s(plan: Plan) -> float:
    """Returns within how many seconds of SIGTERM a rank of `plan` has ended: it finishes its step, and may save a
    checkpoint.
    """
    saves = plan.run.final_weights != "none" or (plan.checkpoint is not None and plan.checkpoint.config.on_interrupt)
    return SAVING_S if saves else TERMINATED_S


def codes(warnings: Iterable[str] = ()) -> dict[int, int]:
    """Returns the signals that end a run in an orderly way, each with the exit code of such a run: 128 and its number.

    warnings: the names of those among `WARNINGS` that do.
    """
    codes: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        codes[signal.SIGHUP] = EXIT_HUNG_UP
    return codes | {number: 128 + number for number in map(signal.Signals.__getitem__, warnings)}


class Stopping(AbstractContextManager["Stopping"]):
    """Handles SIGINT, SIGTERM, SIGHUP and `warnings` of this process while it is entered.

    A thread does this, woken from C: the main thread may be inside a collective that never returns. say: tells the user that
    the signal was heard; None if a launcher does. late: called, in the thread, before it ends a process that SIGTERM could not
    end within `terminated_s`. Does nothing outside of the main thread, where Python allows no handlers.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        late: Callable[[], None] | None = None,
        terminated_s: float | None = None,
        warnings: Iterable[str] = (),
    ) -> None:
        self._terminated_s = TERMINATED_S if terminated_s is None else terminated_s
        self._say = say
        self._late = late
        self._codes = codes(warnings)
        self._stop: Callable[[], None] | None = None
        self._first: int | None = None
        self._heard_at = 0.0
        self._terminated_at: float | None = None
        self._is_working = False
        self._deadline: float | None = None
        self._deadline_code = 0
        self._closed = False
        self._is_main = threading.current_thread() is threading.main_thread()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the first signal that came, such as 130; None before."""
        return None if self._first is None else self._codes[self._first]

    def working(self, stop: Callable[[], None]) -> None:
        """Makes signals call `stop`, from another thread; before this call they raise in the main thread."""
        self._stop = stop
        self._is_working = True

    def tearing_down(self, code: int) -> None:
        """Ends this process with exit code `code` unless it ends by itself within `TEAR_DOWN_S` seconds."""
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
        """Restores the handlers in a process forked from this one, such as a worker of `multiprocessing`.

        There SIGTERM would stop nothing, and this process, which sends it and waits, would never end.
        """
        if not self._closed:
            self._closed = True
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                # A batch system may warn all processes of a job, and a worker is still needed then.
                signal.signal(number, signal.SIG_IGN if number in WARNINGS else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(self._codes[number])

    def _watch(self) -> None:
        """Runs in the thread: waits for signals, deadlines and reminders."""
        while not self._closed:
            if self._deadline is not None:
                wait_s: float | None = max(0.0, self._deadline - time.monotonic())
            else:
                wait_s = None if self._first is None or self._say is None else REMIND_S
            if select.select([self._reader], [], [], wait_s)[0]:
                for number in os.read(self._reader, 64):
                    if number in self._codes:
                        self._heard(number)
            elif self._deadline is None:
                if self._say is not None and self._is_working:
                    self._say(STILL.format(time.monotonic() - self._heard_at))
            elif time.monotonic() >= self._deadline:
                if self._late is not None:
                    self._late()
                _end_now(self._deadline_code)

    def _heard(self, number: int) -> None:
        """Acts on a signal: asks the run to stop, sets a deadline, or ends the process at once."""
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
            _end_now(code)
        if number != signal.SIGINT and number not in WARNINGS:
            if self._terminated_at is None:
                self._terminated_at = now
            is_again = now - self._terminated_at > TOGETHER_S
            self._limit(HURRY_S if is_again else self._terminated_s, self.exit_code or code)

    def _limit(self, seconds: float, code: int) -> None:
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline, self._deadline_code = deadline, code


def _end_now(code: int) -> None:
    """Ends this process, from any thread; unflushed buffers are lost."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)
    _kill_workers()
    os._exit(code)

"""Ends a rank after a signal, or when its launcher dies. After a signal, a rank finishes its step within a time limit, and does
not wait for peers that have died.

    training ── first SIGINT ──> run.stop(): the step is finished ── the loop returns ──> cleanup, at most 10 s
        │                              └── second SIGINT ──> exits at once
        └── SIGTERM ──> run.stop(), and exits after 25 s at most, or 8 s if there is nothing to save
                  └── second SIGTERM ──> exits after 6 s: peers have died, and a collective may hang

SIGHUP, from a closed terminal, is handled like SIGTERM with another exit code, unless it is ignored as under `nohup`. A warning
signal of a batch system (`[run] stop_signals`) also stops the run, but sets no time limit, since the batch system has its own.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import NoReturn

from sley_core.errors import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED
from sley_core.plan.plan import Plan

CLEANUP_TIMEOUT_S = 10.0
"""The time limit in seconds for a rank's cleanup after its run has ended."""

SIGTERM_TIMEOUT_S = 8.0
SAVE_TIMEOUT_S = 25.0
"""The time limits in seconds after SIGTERM: `SAVE_TIMEOUT_S` for a run that saves a checkpoint or its weights when it stops,
`SIGTERM_TIMEOUT_S` for other runs. torchrun sends SIGKILL after 30 s.
"""

SECOND_SIGTERM_TIMEOUT_S = 6.0
"""The time limit in seconds after a second SIGTERM, which a launcher sends if a rank has failed."""

DUPLICATE_SIGNAL_S = 1.0
"""The time in seconds within which two signals count as one: an interrupt may reach a rank directly and from its launcher."""

STOP_MESSAGE = "stopping after this step; Ctrl-C again stops at once"
"""The line that is printed after the first signal of a run."""

WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""The signals that batch systems send some time before they end a job."""

LAUNCHER_VARIABLE = "SLEY_LAUNCHER"
"""The environment variable in which a local launch passes its process id to its ranks."""

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets for its workers, which also die with their launcher."""

_PR_SET_PDEATHSIG = 1  # from sys/prctl.h: sets the signal that the kernel sends when the parent dies

_has_launcher = False


def has_launcher() -> bool:
    """Returns whether this process is a rank of a local launch, whose launcher prints its errors."""
    return _has_launcher


def die_with_launcher() -> None:
    """Makes the kernel kill this rank when the launcher or torchrun that started it ends, even by SIGKILL, and even while this
    rank hangs in a driver. Exits at once if the launcher has already ended. Does nothing in a process that neither of them
    started. Call it before slow imports.
    """
    global _has_launcher
    # The variable is removed, so that processes that the rank starts do not act as ranks.
    launcher_pid = int(os.environ.pop(LAUNCHER_VARIABLE, 0))
    _has_launcher = launcher_pid != 0
    if not _has_launcher and TORCHRUN_VARIABLE not in os.environ:
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _has_launcher and os.getppid() != launcher_pid:
        os._exit(1)


def exit_process(code: int) -> NoReturn:
    """Ends this process with exit code `code`. A failed rank exits without destructors, since the destructors of communicators
    may wait for dead peers. Its `multiprocessing` children are killed, since Python's exit handlers do not run.
    """
    if code and "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        _exit_now(code)
    sys.exit(code)


def _exit_now(code: int) -> NoReturn:
    """Kills the `multiprocessing` children and ends this process, from any thread; unflushed buffers are lost."""
    _kill_children()
    os._exit(code)


def _kill_children() -> None:
    if "multiprocessing" in sys.modules:
        with suppress(ValueError):  # only the main thread may set handlers
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the handler of torch's data loaders raises when a worker is killed
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()


class TerminationInterrupt(BaseException):
    """Raised in the main thread by a stop signal other than SIGINT if there is no run to stop. code: the process's exit code.
    It does not derive from SystemExit, since a SystemExit of the user's factory is reported as a failure.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def sigterm_timeout_s(plan: Plan) -> float:
    """Returns the time limit in seconds for a rank of `plan` to finish its step, save and exit after SIGTERM."""
    saves = plan.run.final_weights != "none" or (plan.checkpoint is not None and plan.checkpoint.config.on_interrupt)
    return SAVE_TIMEOUT_S if saves else SIGTERM_TIMEOUT_S


class SignalHandler(AbstractContextManager["SignalHandler"]):
    """A context manager that handles SIGINT, SIGTERM, SIGHUP, and the signals named in `warning_signals`, such as "SIGUSR1".

    A thread handles the signals, since the main thread may be in a collective that never returns. print_line: prints
    `STOP_MESSAGE` when the first signal arrives; None if a launcher prints it. report_timeout: called in the thread before it
    ends a process that has missed its deadline. sigterm_timeout_s: the time limit in seconds after SIGTERM (8 if None).
    exit_now: takes the exit code, and ends this process (or, in a launcher, its ranks) at once. Only the main thread may enter
    the block.
    """

    def __init__(
        self,
        print_line: Callable[[str], None] | None = None,
        report_timeout: Callable[[], None] | None = None,
        sigterm_timeout_s: float | None = None,
        warning_signals: Iterable[str] = (),
        exit_now: Callable[[int], None] = _exit_now,
    ) -> None:
        self._exit_now = exit_now
        self._sigterm_timeout_s = SIGTERM_TIMEOUT_S if sigterm_timeout_s is None else sigterm_timeout_s
        self._print_line = print_line
        self._report_timeout = report_timeout
        self._exit_codes: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._exit_codes[signal.SIGHUP] = EXIT_HUNG_UP
        self._exit_codes |= {signum: 128 + signum for signum in map(signal.Signals.__getitem__, warning_signals)}
        self._stop: Callable[[], None] | None = None
        self._first_signal: int | None = None
        self._first_signal_at_s = 0.0
        self._first_sigterm_at_s: float | None = None
        self._deadline_s: float | None = None
        self._deadline_code = 0
        self._is_closed = False

    @property
    def exit_code(self) -> int | None:
        """The exit code of the first signal, such as 130; None if there was no signal."""
        return None if self._first_signal is None else self._exit_codes[self._first_signal]

    def call_on_signal(self, stop: Callable[[], None]) -> None:
        """Makes the first signal call `stop` in a thread. Before this call, signals raise an exception in the main thread."""
        self._stop = stop

    def limit_cleanup(self, code: int) -> None:
        """Ends this process with exit code `code` if it has not ended by itself within `CLEANUP_TIMEOUT_S` seconds."""
        self._set_deadline(CLEANUP_TIMEOUT_S, code)
        os.write(self._writer, b"\0")  # wakes the thread

    def __enter__(self) -> "SignalHandler":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old_handlers = {signum: signal.signal(signum, self._raise_interrupt) for signum in self._exit_codes}
        self._thread = threading.Thread(target=self._watch, name="sley-signals", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._restore_in_child)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._is_closed = True
        os.write(self._writer, b"\0")  # wakes the thread
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _restore_in_child(self) -> None:
        """Restores the old handlers in a forked process, such as a worker of a dataset, so that SIGTERM ends the process."""
        if not self._is_closed:
            self._is_closed = True
            signal.set_wakeup_fd(-1)
            for signum, handler in self._old_handlers.items():
                # A batch system may warn all processes of a job, and workers must continue.
                signal.signal(signum, signal.SIG_IGN if signum in WARNING_SIGNALS else handler)

    def _raise_interrupt(self, signum: int, _: FrameType | None) -> None:
        """The Python handler of all signals: raises an exception in the main thread if there is no run to stop."""
        if self._stop is None:
            raise KeyboardInterrupt if signum == signal.SIGINT else TerminationInterrupt(self._exit_codes[signum])

    def _watch(self) -> None:
        """Runs in the thread: handles each signal when it arrives, and ends the process at its deadline."""
        while not self._is_closed:
            wait_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
            if select.select([self._reader], [], [], wait_s)[0]:
                for signum in os.read(self._reader, 64):
                    if signum in self._exit_codes:
                        self._handle_signal(signum)
            elif self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                if self._report_timeout is not None:
                    self._report_timeout()
                self._deadline_s = None
                self._exit_now(self._deadline_code)

    def _handle_signal(self, signum: int) -> None:
        """Handles a signal: asks the run to stop, sets a deadline, or ends the process at once."""
        code = self._exit_codes[signum]
        now_s = time.monotonic()
        if self._first_signal is None:
            self._first_signal, self._first_signal_at_s = signum, now_s
            if self._stop is not None:
                if self._print_line is not None:
                    self._print_line(STOP_MESSAGE)
                self._stop()
            else:
                self._set_deadline(CLEANUP_TIMEOUT_S, code)
        elif signum == signal.SIGINT and (self._print_line is not None or now_s - self._first_signal_at_s > DUPLICATE_SIGNAL_S):
            self._exit_now(code)
        if signum != signal.SIGINT and signum not in WARNING_SIGNALS:
            if self._first_sigterm_at_s is None:
                self._first_sigterm_at_s = now_s
            is_second = now_s - self._first_sigterm_at_s > DUPLICATE_SIGNAL_S
            timeout_s = SECOND_SIGTERM_TIMEOUT_S if is_second else self._sigterm_timeout_s
            self._set_deadline(timeout_s, self.exit_code or code)

    def _set_deadline(self, timeout_s: float, code: int) -> None:
        """Makes the thread end this process with `code` after `timeout_s` seconds, unless an earlier deadline is set."""
        deadline_s = time.monotonic() + timeout_s
        if self._deadline_s is None or deadline_s < self._deadline_s:
            self._deadline_s, self._deadline_code = deadline_s, code

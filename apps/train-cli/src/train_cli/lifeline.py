"""Ends a rank with the launcher that started it, however the launcher ended: even after its kill -9 no process is left.

Elastic alone leaves its workers running then. On Linux the kernel sends the signal (prctl(2), PR_SET_PDEATHSIG), at once, and
even while the rank hangs in a driver. Elsewhere a thread watches the parent's id.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

LAUNCHER = "SLEY_LAUNCHER"
"""The environment variable in which a local launch gives its process id to the ranks that it starts."""

ELASTIC = "TORCHELASTIC_RUN_ID"
"""What torchrun sets for its workers: on Linux these die with it too."""

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.5

_held = False


def is_held() -> bool:
    """Returns whether this process is a rank of a local launch, whose launcher shows its errors."""
    return _held


def hold() -> None:
    """Makes this process end with its launcher, ours or torchrun; does nothing if neither started it.

    Called before slow imports. If the launcher has already died, the parent is another process, and this one ends here.
    """
    global _held
    # Taken away, so that a process that the rank starts does not mistake itself for one.
    launcher = int(os.environ.pop(LAUNCHER, 0))
    _held = launcher != 0
    if not _held and ELASTIC not in os.environ:
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    elif _held:
        threading.Thread(target=_watch, args=(launcher,), name="sley-watch-launcher", daemon=True).start()
    if _held and os.getppid() != launcher:
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
        end_workers()
        os._exit(code)
    sys.exit(code)


def end_workers() -> None:
    """Kills the `multiprocessing` children of this process."""
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(1)

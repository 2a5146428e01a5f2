"""Runs `python -m module` in a process forked from the server of `ranks`, which has imported torch already.

A fresh interpreter needs seconds of a core for that. What runs is the same: `runpy` executes the module as `__main__`, in a
session, folder and environment of its own; where it starts modules by `subprocess`, these are forked too (`forked_children`).
Differences: flags of the interpreter are the server's, `atexit` is not called, and /proc shows the server's environment, so
`processes_with` finds what is forked by the variable `processes.MARK` alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from sley_testing.forked_children import fork_children, run
from sley_testing.rank_teams import preloaded_server

_PR_SET_PDEATHSIG = 1


class ForkedProgram:
    """A running `python -m module`, with those methods of `subprocess.Popen` that a test needs.

    stdout, stderr: text, to be read until they end and closed by the caller. returncode: None while it runs; -n after signal n.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        context = preloaded_server()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        outputs = [output for _, output in ends]
        self._process = context.Process(target=_main, args=(module, list(arguments), str(cwd), dict(env), *outputs))
        self._process.start()
        for output in outputs:
            output.close()
        self.stdout, self.stderr = (_text(stream) for stream, _ in ends)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "a process that was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs. Any thread may ask."""
        with self._lock:  # the server says once how a process ended
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, once there is one; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


def _text(stream: Connection) -> TextIO:
    file = os.fdopen(os.dup(stream.fileno()), "r", encoding="utf-8", errors="replace")
    stream.close()
    return file


def _main(module: str, arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """Takes over folder, environment and streams in the new process, and becomes `python -m module`."""
    os.setsid()
    _end_with_the_server()
    os.chdir(cwd)
    for number, connection in ((1, out), (2, err)):
        os.dup2(connection.fileno(), number)
        connection.close()
    path = list(sys.path)
    fork_children(path)
    run(module, arguments, env, [cwd], path)


def _end_with_the_server() -> None:
    """Makes this program's server end with pytest, and on Linux this program with its server: a killed pytest
    closes neither.
    """
    if sys.platform != "linux":
        return
    # The server ends when nobody has the other end of this pipe, of which it gives each process it forks a copy.
    server: Any = forkserver._forkserver  # private
    os.close(server._forkserver_alive_fd)
    server.__init__()  # a program that wants a server starts its own, as in an interpreter of its own
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

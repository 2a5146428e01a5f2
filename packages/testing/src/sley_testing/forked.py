"""Runs `python -m module` in a process forked from the server of `ranks`, which has imported torch already.

A fresh interpreter needs seconds of a core for that. What runs is the same: `runpy` executes the module as `__main__`, in a
session, folder and environment of its own; where it starts modules by `subprocess`, these are forked too (`forked_children`).
Differences: flags of the interpreter are the server's, `atexit` is not called, and /proc shows the server's environment, so
`processes_with` finds what is forked by the variable `processes.MARK` alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence, Set
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from sley_core.errors import is_installed
from sley_testing.processes import call_itself
from sley_testing.ranks import preloaded_server

_PR_SET_PDEATHSIG = 1


class ForkedProgram:
    """A running `python -m module`, with those methods of `subprocess.Popen` that a test needs. stdout, stderr: text, to be
    read until they end and closed by the caller. returncode: None while it runs; -n after signal n.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        context = preloaded_server()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        outputs = [output for _, output in ends]
        self._process = context.Process(target=_main, args=(module, list(arguments), str(cwd), dict(env), *outputs))
        self._process.start()
        for output in outputs:
            output.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(stream.fileno()), "r", encoding="utf-8", errors="replace") for stream, _ in ends
        )
        for stream, _ in ends:
            stream.close()
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


def _main(module: str, arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """Takes over folder, environment and streams in the new process, and becomes `python -m module`."""
    os.setsid()
    if sys.platform == "linux":  # the server ends with pytest, and this program with the server: a killed pytest closes neither
        # The server ends when nobody has the other end of this pipe, of which it gives each process it forks a copy.
        server: Any = forkserver._forkserver  # private
        os.close(server._forkserver_alive_fd)
        server.__init__()  # a program that wants a server starts its own, as in an interpreter of its own
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(cwd)
    for number, connection in ((1, out), (2, err)):
        os.dup2(connection.fileno(), number)
        connection.close()
    path = list(sys.path)
    fork_children(path)
    run(module, arguments, env, [cwd], path)


_EVERY_FILE = 65536
_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private
_ASKED = list(inspect.signature(_exec).parameters)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def fork_children(path: Sequence[str]) -> None:
    """Makes this process fork where it starts a module of Python by `subprocess`. path: `sys.path` of a fresh one."""

    known = frozenset(sys.modules)

    def execute(self: Any, *given: Any) -> None:
        asked = dict(zip(_ASKED, (self, *given), strict=True))
        command = _module_of(asked["args"])
        if command is None or asked["pass_fds"] or asked["preexec_fn"] or asked["env"] is None:
            _exec(self, *given)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        ready, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(asked, command, path, begun, known)
        self._child_created = True
        os.close(begun)
        os.read(ready, 1)  # as after an `exec`: the process has its session when this one goes on
        os.close(ready)
        self._close_pipe_fds(*(asked[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _module_of(command: Any) -> tuple[bool, str, list[str]] | None:
    """Returns whether the current folder stays out of the path, the module, and its arguments; None for another command."""
    if not isinstance(command, list | tuple) or list(command[:1]) != [sys.executable]:
        return None
    rest = [str(one) for one in command[1:]]
    safe = rest[:1] == ["-P"]
    rest = rest[1:] if safe else rest
    rest = rest[1:] if rest[:1] == ["-u"] else rest
    return (safe, rest[1], rest[2:]) if len(rest) > 1 and rest[0] == "-m" else None


def _become(
    asked: Mapping[str, Any], command: tuple[bool, str, list[str]], path: Sequence[str], begun: int, known: Set[str]
) -> NoReturn:
    """Takes over what `asked` says and runs the module; in the new process. begun: a file that is closed when it has begun.
    known: the modules of a fresh process.
    """
    code = 255
    try:
        if asked["start_new_session"]:
            os.setsid()
        os.close(begun)
        for number, wanted in enumerate((asked["p2cread"], asked["c2pwrite"], asked["errwrite"])):
            if wanted not in (-1, number):
                os.dup2(wanted, number)
        if asked["cwd"] is not None:
            os.chdir(asked["cwd"])
        _set_back(known)
        os.closerange(3, _EVERY_FILE)
        safe, module, arguments = command
        run(module, arguments, asked["env"], [] if safe else [str(Path.cwd())], path)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def run(module: str, arguments: Sequence[str], env: Mapping[str, str], first: Sequence[str], path: Sequence[str]) -> None:
    """Runs `module` as `__main__`, and returns at its end, or raises what it raises. first: what of `sys.path` goes before
    PYTHONPATH. path: what follows it.
    """
    os.environ.clear()
    os.environ.update(env)
    call_itself(env)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)
    sys.path[:] = [*first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv = [module, *arguments]

    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_back(known: Set[str]) -> None:
    """Undoes what the program that forks may have done to its process; changes within modules stay. known: the names of the
    modules that were there before it.
    """
    subprocess.Popen._execute_child = _exec  # type: ignore[attr-defined]  # private
    faulthandler.disable()
    gc.enable()
    for number in signal.Signals:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    servers: list[Any] = [forkserver._forkserver, resource_tracker._resource_tracker]  # private
    for server in servers:
        server.__init__()  # a program that wants one starts its own
    for name in sys.modules.keys() - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and not is_installed(file):
            del sys.modules[name]  # of the program's own folder: it is imported anew

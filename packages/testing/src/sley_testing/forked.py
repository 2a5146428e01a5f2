"""Runs `python -m module` in a process that is forked from the server of `ranks`, which has already imported torch.

A fresh interpreter needs seconds of CPU time for this import. `runpy` executes the module as `__main__` in a separate session,
folder and environment. Modules that the program starts by `subprocess` are forked too (`fork_children`). Differences from a
fresh interpreter: interpreter flags are those of the server, `atexit` functions are not called, and /proc shows the
environment of the server, so that `processes_with` finds forked programs only by the variable `processes.MARK`.
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
from sley_testing.processes import set_process_name
from sley_testing.ranks import preloaded_server

_PR_SET_PDEATHSIG = 1


class ForkedProgram:
    """Represents a running `python -m module`, with the methods of `subprocess.Popen` that tests need. stdout, stderr: text
    streams, which the caller reads to the end and closes. returncode: None while the program runs, -n after signal n.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        context = preloaded_server()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        outputs = [output for _, output in ends]
        self._process = context.Process(
            target=_run_forked_program, args=(module, list(arguments), str(cwd), dict(env), *outputs)
        )
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
        assert self._process.pid is not None, "the process has not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit code, or None while the program runs. Any thread may call it."""
        with self._lock:  # the server reports an exit code only once
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code and returns it. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


def _run_forked_program(
    module: str, arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection
) -> None:
    """Sets folder, environment and streams of the new process, and runs the module."""
    os.setsid()
    if sys.platform == "linux":  # if pytest is killed, the server ends, and then this program
        # The server ends when all copies of this pipe end are closed, and each forked process has a copy.
        server: Any = forkserver._forkserver  # private
        os.close(server._forkserver_alive_fd)
        server.__init__()  # a program that needs a server starts a new one, as in a fresh interpreter
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(cwd)
    for number, connection in ((1, out), (2, err)):
        os.dup2(connection.fileno(), number)
        connection.close()
    path = list(sys.path)
    fork_children(path)
    run_module(module, arguments, env, [cwd], path)


_MAX_FILES = 65536
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private
_EXECUTE_PARAMETERS = list(inspect.signature(_execute_child).parameters)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def fork_children(path: Sequence[str]) -> None:
    """Makes `subprocess` fork this process to start a Python module. path: `sys.path` of a fresh process."""

    initial_modules = frozenset(sys.modules)

    def execute(self: Any, *args: Any) -> None:
        options = dict(zip(_EXECUTE_PARAMETERS, (self, *args), strict=True))
        command = _parse_module_command(options["args"])
        if command is None or options["pass_fds"] or options["preexec_fn"] or options["env"] is None:
            _execute_child(self, *args)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(options, command, path, write_end, initial_modules)
        self._child_created = True
        os.close(write_end)
        os.read(read_end, 1)  # waits until the child has its session, as after an `exec`
        os.close(read_end)
        self._close_pipe_fds(*(options[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _parse_module_command(command: Any) -> tuple[bool, str, list[str]] | None:
    """Returns whether the command has `-P` (no current folder in the path), the module, and its arguments; else None."""
    if not isinstance(command, list | tuple) or list(command[:1]) != [sys.executable]:
        return None
    arguments = [str(argument) for argument in command[1:]]
    is_safe_path = arguments[:1] == ["-P"]
    arguments = arguments[1:] if is_safe_path else arguments
    arguments = arguments[1:] if arguments[:1] == ["-u"] else arguments
    return (is_safe_path, arguments[1], arguments[2:]) if len(arguments) > 1 and arguments[0] == "-m" else None


def _run_child(
    options: Mapping[str, Any],
    command: tuple[bool, str, list[str]],
    path: Sequence[str],
    ready_file: int,
    initial_modules: Set[str],
) -> NoReturn:
    """Applies the `options` of `subprocess` and runs the module in the new process. ready_file: the pipe end to close when the
    session exists. initial_modules: the modules of a fresh process.
    """
    code = 255
    try:
        if options["start_new_session"]:
            os.setsid()
        os.close(ready_file)
        for number, descriptor in enumerate((options["p2cread"], options["c2pwrite"], options["errwrite"])):
            if descriptor not in (-1, number):
                os.dup2(descriptor, number)
        if options["cwd"] is not None:
            os.chdir(options["cwd"])
        _reset_process(initial_modules)
        os.closerange(3, _MAX_FILES)
        is_safe_path, module, arguments = command
        run_module(module, arguments, options["env"], [] if is_safe_path else [str(Path.cwd())], path)
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


def run_module(
    module: str, arguments: Sequence[str], env: Mapping[str, str], first_paths: Sequence[str], last_paths: Sequence[str]
) -> None:
    """Runs `module` as `__main__`. first_paths: the entries of `sys.path` before PYTHONPATH. last_paths: the entries
    after it.
    """
    os.environ.clear()
    os.environ.update(env)
    set_process_name(env)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)
    sys.path[:] = [*first_paths, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *last_paths]
    sys.argv = [module, *arguments]
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    if torch := sys.modules.get("torch"):  # else the module reads the environment when it imports torch
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _reset_process(initial_modules: Set[str]) -> None:
    """Undoes changes that the forking program may have made to its process, except within modules. initial_modules: the names
    of the modules of a fresh process.
    """
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]  # private
    faulthandler.disable()
    gc.enable()
    for number in signal.Signals:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    servers: list[Any] = [forkserver._forkserver, resource_tracker._resource_tracker]  # private
    for server in servers:
        server.__init__()  # a program that needs a server starts a new one
    for name in sys.modules.keys() - initial_modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and not is_installed(file):
            del sys.modules[name]  # a module of the program's folder is imported again

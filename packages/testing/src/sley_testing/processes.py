"""Runs `python -m module` in a process forked from the fork server of `ranks`, and finds processes that a test has left.

A fresh interpreter needs seconds of CPU time to import torch, which the server has already imported. `runpy` executes the
module as `__main__` in a separate session, folder and environment. Python modules that the program starts with `subprocess` are
forked too (`fork_children`). A forked program has the server's interpreter flags and does not call `atexit` functions. In
/proc, which only Linux has, it has the server's environment, so `processes_with` finds it only by the variable MARK.
"""

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
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from sley_core.errors import is_installed
from sley_testing.ranks import forkserver_context

_PROC = Path("/proc")  # the folder in which Linux describes each process
_PYTHON_SERVERS = ("from multiprocessing.forkserver import", "from multiprocessing.resource_tracker import")
"""Parts of the command lines of Python's servers, which live as long as the interpreter that started them."""

MARK = "SLEY_TEST_PROGRAM"
"""The environment variable whose value becomes the name of a forked program's process."""

_NAME_LENGTH = 15  # the maximum length of a process name in Linux
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # options of prctl(2)


@dataclass(frozen=True)
class Process:
    """Describes a running process. parent: the pid of its parent. command: its command line."""

    pid: int
    parent: int
    command: str


def descendants(pid: int | None = None) -> list[Process]:
    """Returns all descendants of `pid` (default: this process), except Python's fork servers and resource trackers."""
    root, processes = os.getpid() if pid is None else pid, list(_processes())
    root_commands = [process.command for process in processes if process.pid == root]
    generation = [process for process in processes if process.parent == root]
    # A forked process has the command line of its fork server, but only the servers themselves are excluded.
    result = [
        process
        for process in generation
        if process.command in root_commands or not any(server in process.command for server in _PYTHON_SERVERS)
    ]
    while generation:
        parents = [process.pid for process in generation]
        generation = [process for process in processes if process.parent in parents]
        result += generation
    return result


def processes_with(variable: str, value: str) -> list[Process]:
    """Returns all processes that were started with `variable=value` in their environment, including orphans."""
    entry = f"{variable}={value}".encode()
    name = f"{value[-_NAME_LENGTH:]}\n" if variable == MARK else None
    result = []
    for process in _processes():
        folder = _PROC / str(process.pid)
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0") or (folder / "comm").read_text("utf-8") == name:
                result.append(process)
    return result


def assert_none_left(find: Callable[[], list[Process]] = descendants, *, within_s: float = 1.0) -> None:
    """Calls `find` until it returns no process. Raises AssertionError with the remaining processes after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while processes := find():
        lines = "\n".join(f"  {process.pid}: {process.command}" for process in processes)
        assert time.monotonic() < deadline, f"{len(processes)} processes are left after {within_s:g} s\n{lines}"
        time.sleep(0.02)


def _processes() -> Iterator[Process]:
    """Yields all running processes of this machine, without zombies."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # "pid (name) state parent ...", where the name may contain any character, such as spaces and parentheses
                state, parent, *_ = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if state not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    yield Process(int(folder.name), int(parent), command.strip())


class ForkedProgram:
    """Runs `python -m module` in a forked process, with the methods of `subprocess.Popen` that tests need. stdout, stderr: text
    streams, which the caller must read to the end and close. returncode: None while the program runs; -n if signal n ended it.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        context = forkserver_context()
        inputs, outputs = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
        program = (module, list(arguments), str(cwd), dict(env), *outputs)
        self._process = context.Process(target=_run_forked_program, args=program)
        self._process.start()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(stream.fileno()), "r", encoding="utf-8", errors="replace") for stream in inputs
        )
        for end in (*inputs, *outputs):
            end.close()
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
        """Waits for the exit code and returns it. Raises `subprocess.TimeoutExpired` after `timeout` seconds, if given."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


def _run_forked_program(
    module: str, arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection
) -> None:
    """Sets the folder, environment and streams of the forked process, and runs the module in it."""
    os.setsid()
    if sys.platform == "linux":  # if pytest is killed, the server ends, and then this program
        # The server ends when all copies of this end of a pipe are closed. Each forked process has a copy.
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


_MAX_FILES = 65536  # a forked child closes all file descriptors from 3 to this number
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private
_EXECUTE_PARAMETERS = list(inspect.signature(_execute_child).parameters)  # the names of the parameters, in order
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # the parameters of `Popen._close_pipe_fds`


def fork_children(path: Sequence[str]) -> None:
    """Makes `subprocess` fork this process instead of starting `python -m module`. path: the `sys.path` of a fresh process."""
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
        os.read(read_end, 1)  # wait until the child has its session, as after an `exec`
        os.close(read_end)
        self._close_pipe_fds(*(options[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _parse_module_command(command: Any) -> tuple[bool, str, list[str]] | None:
    """Returns whether the command has the `-P` option (no current folder in `sys.path`), the module, and its arguments. Returns
    None if the command is not `python -m module` of this interpreter, or has options other than `-P` and `-u`.
    """
    if not isinstance(command, list | tuple) or "-m" not in command or command[0] != sys.executable:
        return None
    index = list(command).index("-m")
    options, (module, *arguments) = list(command[1:index]), map(str, command[index + 1 :])
    return ("-P" in options, module, arguments) if set(options) <= {"-P", "-u"} else None


def _run_child(
    options: Mapping[str, Any],
    command: tuple[bool, str, list[str]],
    path: Sequence[str],
    ready_file: int,
    initial_modules: Set[str],
) -> NoReturn:
    """Applies the `options` of `subprocess` to the forked process, runs the module, and exits with its code. path,
    initial_modules: the `sys.path` and the names of the modules of a fresh process. ready_file: the end of a pipe, which is
    closed once the session exists.
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
    """Runs `module` as `__main__` with the environment `env`. first_paths, last_paths: the entries of `sys.path` before and
    after those of PYTHONPATH.
    """
    os.environ.clear()
    os.environ.update(env)
    if sys.platform == "linux" and MARK in env:  # the name by which `processes_with` finds this process and its forks
        ctypes.CDLL(None).prctl(_PR_SET_NAME, env[MARK][-_NAME_LENGTH:].encode(), 0, 0, 0)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)
    sys.path[:] = [*first_paths, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *last_paths]
    sys.argv = [module, *arguments]
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    if torch := sys.modules.get("torch"):  # otherwise torch reads the variable when the module imports it
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _reset_process(initial_modules: Set[str]) -> None:
    """Undoes changes of the forking program to the process, except changes to the state of installed modules."""
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
            del sys.modules[name]  # modules that are not installed, such as those in the program's folder, are imported again

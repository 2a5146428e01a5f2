"""Lets a forked program fork, too, where it would start `python -m module` again: a launcher its ranks.

A fresh interpreter imports torch and much more, for seconds of a core. What is forked has done so already, and begins as if it
were fresh: modules of the user are forgotten, handlers, flags and caches are as before the program, files are closed. Whatever
cannot be set back is found (`unchanged`), and then a fresh interpreter it is.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from sley_testing.processes import call_itself

_EVERY_FILE = 65536
_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private
_ASKED = list(inspect.signature(_exec).parameters)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def fork_children(path: Sequence[str]) -> None:
    """Makes this process fork, from now on, where it starts a module of Python by `subprocess`. path: `sys.path` of a fresh
    one.
    """

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
            _become(asked, command, path, begun)
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


def _become(asked: Mapping[str, Any], command: tuple[bool, str, list[str]], path: Sequence[str], begun: int) -> NoReturn:
    """Takes over what `asked` says and runs the module; in the new process. begun: a file that is closed when it has begun."""
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
        if not _is_as_fresh():
            os.execve(sys.executable, [str(one) for one in asked["args"]], asked["env"])
        os.closerange(3, _EVERY_FILE)
        safe, module, arguments = command
        run(module, arguments, asked["env"], [] if safe else [str(Path.cwd())], path)
        code = 0
    except SystemExit as error:
        code = _code_of(error)
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
    """Runs `module` as `__main__`, and returns at its end, or raises what it raises.

    first: what of `sys.path` goes before PYTHONPATH. path: what follows it.
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


def _is_as_fresh() -> bool:
    """Sets back what can be; whether that was all."""
    from sley_testing.preload import before

    subprocess.Popen._execute_child = _exec  # type: ignore[attr-defined]  # private
    faulthandler.disable()
    gc.enable()
    for number in signal.Signals:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    servers: list[Any] = [forkserver._forkserver, resource_tracker._resource_tracker]  # private
    for server in servers:
        server.__init__()  # a program that wants one starts its own
    # Handlers are a fresh interpreter's now; tests in the background began with others, as their shell ignores Ctrl-C.
    return not before.restore(handlers=False)


def _code_of(error: SystemExit) -> int:
    """Returns the exit code that Python makes of it."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1

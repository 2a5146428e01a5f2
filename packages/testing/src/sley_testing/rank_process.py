"""Runs one rank of a test in a process that `ranks` starts.

    apply the parent's settings ─> join the world ─> call ─> send the outcome ─> wait for the other ranks

A successful rank keeps its sockets open until all ranks are done, so that no peer loses a connection during a collective. A
failed rank exits at once, so that peers fail instead of hanging.
"""

import contextlib
import faulthandler
import io
import os
import pickle
import reprlib
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Job:
    """Holds the input of a rank, except the working folder and `sys.path`, which multiprocessing passes on.

    call: the pickled (function, args, kwargs). folder: a private folder, into which each rank writes its output and stacks.
    filters: the pickled `warnings.filters` of the parent, so that the same warnings are errors. init_timeout_s: the time limit
    of the call if the rank must initialize the default group, else None.
    """

    rank: int
    call: bytes
    folder: str
    environ: dict[str, str]
    filters: bytes
    init_timeout_s: float | None


@dataclass(frozen=True)
class Outcome:
    """Holds the result of a rank. failure: a summary of the error, or "" if the call succeeded. value: the pickled result.
    error: the pickled exception, or b"" if it cannot be pickled. trace: the traceback or the stacks. ended_s: the time of the
    failure on the monotonic clock, which all processes of a machine share.
    """

    rank: int
    failure: str = ""
    value: bytes = b""
    error: bytes = b""
    trace: str = ""
    ended_s: float = 0.0


def rank_main(connection: Connection, job: Job) -> None:
    """Runs `job` and sends its outcome. If the job succeeds, then waits until the parent closes the connection."""
    # A process group of its own lets the parent kill the rank with its children, and keeps Ctrl-C from the rank.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    with _apply_settings(job):
        outcome = _run_job(job)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(outcome))
        if not outcome.failure:
            with contextlib.suppress(EOFError):  # the parent closes the connection when all ranks are done
                connection.recv_bytes()


def _run_job(job: Job) -> Outcome:
    """Runs a job's call and returns its outcome, even if the call raises."""
    try:
        function, args, kwargs = pickle.loads(job.call)
        if job.init_timeout_s is not None:
            import torch.distributed as dist

            # The limit is longer than that of the parent, which reports a hang with the stacks of all ranks.
            timeout, size = timedelta(seconds=job.init_timeout_s + 60), int(job.environ["WORLD_SIZE"])
            store = job.environ["SLEY_STORE"]
            dist.init_process_group("gloo", init_method=store, rank=job.rank, world_size=size, timeout=timeout)
        with _background_failures_are_warnings():
            result = function(*args, **kwargs)
        return Outcome(job.rank, value=pickle.dumps(result))
    except BaseException as error:
        failure = "".join(traceback.format_exception_only(error)).strip()
        return Outcome(job.rank, failure, b"", _pickle_error(error), _format_traceback(error), time.monotonic())


@contextlib.contextmanager
def _apply_settings(job: Job) -> Iterator[None]:
    """Applies the environment and warning filters of the parent, and redirects output and stacks to files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.clear()
    os.environ.update(job.environ)
    output = os.open(Path(job.folder, f"rank{job.rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        assert isinstance(stream, io.TextIOWrapper), stream
        stream.reconfigure(encoding="utf-8", line_buffering=True)  # so that the output of a killed rank is complete
    os.close(output)
    with Path(job.folder, f"rank{job.rank}.stacks").open("w") as stacks:
        # On SIGABRT, C code dumps the stacks of all threads, even while Python waits in a collective.
        faulthandler.enable(file=stacks, all_threads=True)
        import torch

        torch.set_num_threads(1)
        warnings.resetwarnings()
        for action, message, category, module, line in pickle.loads(job.filters):
            patterns = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
            warnings.filterwarnings(action, patterns[0], category, patterns[1], line, append=True)
        try:
            yield
        finally:
            faulthandler.disable()


@contextlib.contextmanager
def _background_failures_are_warnings() -> Iterator[None]:
    """Issues a pytest warning at the end of the block for each unhandled thread exception and each unraisable exception."""
    failures: list[Warning] = []

    def add_failure(category: type[Warning], source: str, failure: Any) -> None:
        lines = traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
        failures.append(category(f"{source}\n{''.join(lines)}"))

    threading.excepthook = lambda failure: add_failure(
        pytest.PytestUnhandledThreadExceptionWarning, f"in {failure.thread}", failure
    )
    sys.unraisablehook = lambda failure: add_failure(
        pytest.PytestUnraisableExceptionWarning, f"{failure.err_msg or 'in'} {failure.object!r}", failure
    )
    yield
    for warning in failures:
        warnings.warn(warning, stacklevel=2)


def _end_with_parent() -> None:
    """Kills this rank and its child processes when pytest ends.

    PR_SET_PDEATHSIG cannot do this: it watches the fork server, which outlives pytest until its ranks end.
    """
    parent = parent_process()
    assert parent is not None, "a rank is started by multiprocessing"
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _pickle_error(error: BaseException) -> bytes:
    """Returns a pickle of `error` that loads as an exception of the same type and text, or b"" if there is none."""
    try:
        data = pickle.dumps(error)
        loaded = pickle.loads(data)
        return data if type(loaded) is type(error) and str(loaded) == str(error) else b""
    except Exception:
        return b""


_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxother = _SHORT_REPR.maxstring = 400


def _format_traceback(error: BaseException) -> str:
    """Returns the traceback without the kit's frames. For an AssertionError, adds the locals of the innermost frame."""
    kit_file = str(Path(__file__))
    step = error.__traceback__
    while step and step.tb_frame.f_code.co_filename == kit_file:
        step = step.tb_next
    text = "".join(traceback.format_exception(type(error), error, step or error.__traceback__))
    if not isinstance(error, AssertionError) or step is None:
        return text
    while step.tb_next:
        step = step.tb_next
    values = (f"    {name} = {_SHORT_REPR.repr(value)}\n" for name, value in step.tb_frame.f_locals.items())
    return text + "  where\n" + "".join(values)

"""Runs a function on n ranks of a gloo world, and returns the results by rank or raises an error within the time limit.

Ranks are forked from a server that has already imported torch, so two ranks start in about 0.1 s instead of seconds. They join
the world through a file in a private folder, and use only the loopback interface. No process is left after the call, even if
the test is interrupted.

    a rank    apply the parent's settings ─> join the world ─> call ─> send the outcome ─> wait for the other ranks

A successful rank keeps its sockets open until all ranks are done, so that no peer loses a connection during a collective. A
failed rank exits at once, so that peers fail instead of hanging.

Forked ranks share the seed of `hash(str)`, so these tests cannot find an order that depends on the seed. Launches from the
command line can, since they start new interpreters.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import reprlib
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

GRACE_S = 1.0  # the time in seconds that the other ranks may run after the first failure

_EXIT_S = 2.0  # the maximum time in seconds of a wait for the end of a process

P = ParamSpec("P")
T = TypeVar("T")


class RankError(Exception):
    """Is raised if a rank fails with an exception that cannot be pickled, or dies without an exception."""


class RankTimeoutError(RankError):
    """Is raised if ranks exceed the time limit. The message contains the Python stacks of each unfinished rank."""


@dataclass(frozen=True)
class Job:
    """Holds the input of a rank, except the working folder and `sys.path`, which multiprocessing passes on. call: the pickled
    (function, args, kwargs). folder: a private folder, into which each rank writes its output and stacks. filters: the pickled
    `warnings.filters` of the parent, so that the same warnings are errors. init_timeout_s: the time limit of the call if the
    rank must initialize the default group, else None.
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


@dataclass(frozen=True)
class Ranks:
    """Calls functions on ranks: `Ranks(2)(function, *args, **kwargs)` returns the list of the results of two ranks.

    function: a module-level function, whose arguments and result can be pickled. With `init`, each rank initializes the default
        gloo group first; otherwise the function must join the world itself. The environment of a rank has RANK, WORLD_SIZE,
        LOCAL_RANK and SLEY_STORE.
    Raises the exception of the rank that failed first, with its traceback and a summary of the other failed ranks as notes.
    Raises RankError if that exception cannot be pickled or the rank died, and RankTimeoutError after `timeout_s` seconds.
    """

    size: int
    timeout_s: float = 60.0
    init: bool = True

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        __tracebackhide__ = True
        return [pickle.loads(value) for value in self._call_ranks(_pickle_call((function, args, kwargs)))]

    def once(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Calls a deterministic function on the ranks, or returns copies of the cached results of an equal earlier call. Use it
        for references that several tests share. Calls with different `sys.path`, working folders or environments are not equal.
        """
        __tracebackhide__ = True
        call = _pickle_call((function, args, kwargs))
        environ = tuple(sorted((name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"))
        key = (self.size, self.init, call, tuple(sys.path), str(Path.cwd()), environ)
        if key not in _cached_results:
            _cached_results[key] = self._call_ranks(call)
        return [pickle.loads(value) for value in _cached_results[key]]

    def _call_ranks(self, call: bytes) -> list[bytes]:
        """Returns the pickled results of the ranks for a pickled call, or raises the first failure."""
        __tracebackhide__ = True
        with tempfile.TemporaryDirectory(prefix="sley-ranks-") as folder, _RankProcesses(folder) as world:
            world.start(self, call)
            outcomes = world.collect(self.timeout_s)
        if failed := sorted((outcome for outcome in outcomes if outcome.failure), key=lambda outcome: outcome.ended_s):
            first, *later = failed
            error = pickle.loads(first.error) if first.error else None
            if not isinstance(error, BaseException) or isinstance(error, SystemExit | KeyboardInterrupt):
                error = RankError(f"rank {first.rank} of {self.size}: {first.failure}")
            error.add_note(f"rank {first.rank} of {self.size} failed first\n{first.trace}".rstrip())
            for outcome in sorted(later, key=lambda outcome: outcome.rank):
                error.add_note(f"rank {outcome.rank}: {outcome.failure}")
            raise error
        return [outcome.value for outcome in outcomes]


_cached_results: dict[Hashable, list[bytes]] = {}  # the results of `Ranks.once`


def _pickle_call(call: tuple[object, ...]) -> bytes:
    """Pickles a call. Raises TypeError if it contains a lambda, a nested function or another unpicklable object."""
    try:
        return pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the call cannot be sent to a rank: {error}; use a function at module level, and pass all values as arguments"
        ) from error


@dataclass
class _RankProcesses:
    """Holds the processes of one call by rank. At the end of its context, kills them and prints their output."""

    folder: str
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def __enter__(self) -> "_RankProcesses":
        return self

    def __exit__(self, *failure: object) -> None:
        for connection in self.connections:
            connection.close()
        # Successful ranks exit by themselves once their connection is closed. After a failure, do not wait for them.
        deadline = time.monotonic() + (0.0 if failure[0] else _EXIT_S)
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                kill(process)
        for rank in range(len(self.processes)):
            for line in _read_text(Path(self.folder, f"rank{rank}.out")).splitlines():
                print(f"[rank {rank}] {line}")

    def start(self, ranks: Ranks, call: bytes) -> None:
        """Starts a process for each rank. The first call also starts the fork server, to which no time limit applies."""
        context = forkserver_context()
        filters = pickle.dumps(list(warnings.filters))
        size, store = str(ranks.size), Path(self.folder, "store").as_uri()
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "SLEY_STORE": store, "GLOO_SOCKET_IFNAME": loopback}
        for rank in range(ranks.size):
            environ = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            parent_end, rank_end = context.Pipe()
            job = Job(rank, call, self.folder, environ, filters, ranks.timeout_s if ranks.init else None)
            process = context.Process(target=rank_main, args=(rank_end, job), name=f"rank {rank}")
            self.processes.append(process)
            self.connections.append(parent_end)
            process.start()
            rank_end.close()

    def collect(self, timeout_s: float) -> list[Outcome]:
        """Returns one outcome per rank. Raises RankTimeoutError if a rank runs for `timeout_s` and no rank has failed."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(outcomes) < len(self.connections):
            waiting = [connection for rank, connection in enumerate(self.connections) if rank not in outcomes]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failed:
                    raise self._make_timeout_error(set(outcomes), timeout_s)
                break
            for connection in ready:
                rank = self.connections.index(connection)  # type: ignore[arg-type]  # `wait` returns elements of its argument
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].failure and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank, process in enumerate(self.processes):
            if rank not in outcomes:
                kill(process)
                outcomes[rank] = Outcome(rank, f"still running {GRACE_S:g} s later, killed", ended_s=float("inf"))
        return [outcomes[rank] for rank in range(len(self.processes))]

    def _receive(self, rank: int) -> Outcome:
        """Returns the outcome of a rank. If its process ended without an outcome, returns a failure with its exit code."""
        try:
            outcome = pickle.loads(self.connections[rank].recv_bytes())
            assert isinstance(outcome, Outcome), outcome
            return outcome
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_EXIT_S)
            # A rank that dies silently causes the errors of its peers, so `ended_s` is 0, which sorts it first.
            code = self.processes[rank].exitcode
            summary = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
            return Outcome(rank, summary, trace=self._read_stacks(rank))

    def _read_stacks(self, rank: int) -> str:
        """Returns the Python stacks that faulthandler wrote in the process of `rank`, without the kit's own frames."""
        stacks: list[str] = []
        for thread in _read_text(Path(self.folder, f"rank{rank}.stacks")).split("\n\n"):
            frames = [line for line in thread.splitlines() if line.startswith(("Thread", "Current thread", "  File"))]
            kit_frames = [index for index, line in enumerate(frames) if __file__ in line]
            if frames and not (kit_frames and frames[kit_frames[0]].endswith(" in _end_with_parent")):
                stacks += frames[: kit_frames[0] if kit_frames else None]
        return "\n".join(stacks)

    def _make_timeout_error(self, finished: set[int], timeout_s: float) -> RankTimeoutError:
        """Makes the unfinished ranks write their stacks, kills them, and returns an error with the stacks."""
        unfinished = [rank for rank in range(len(self.processes)) if rank not in finished]
        for rank in unfinished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGABRT)
        deadline = time.monotonic() + _EXIT_S
        for rank in unfinished:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
            kill(self.processes[rank])
        lines = [f"{len(unfinished)} of {len(self.processes)} ranks did not finish within {timeout_s:g} s"]
        lines += [f"rank {rank} had finished" for rank in sorted(finished)]
        lines += [f"stacks of rank {rank}:\n{self._read_stacks(rank) or '  none were written'}" for rank in unfinished]
        return RankTimeoutError("\n".join(lines))


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").rstrip() if path.exists() else ""


_CONTEXT = multiprocessing.get_context("forkserver")  # its fork server starts all ranks and forked programs


def forkserver_context() -> ForkServerContext:
    """Returns the multiprocessing context that forks processes from a server that has imported `sley_testing.preload`."""
    _CONTEXT.set_forkserver_preload(["sley_testing.preload"])
    return _CONTEXT


def kill(process: ForkServerProcess) -> None:
    """Kills the process of a rank and its child processes, even if the rank has already exited."""
    assert process.pid is not None, process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def rank_main(connection: Connection, job: Job) -> None:
    """Runs `job` in this process and sends its outcome. After a success, waits until the parent closes the connection."""
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
    """Calls the function of `job` on this rank. Returns its result, or a failure if it raises any exception."""
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
    """Kills this rank and its child processes when pytest ends. PR_SET_PDEATHSIG cannot do this: it watches the fork server,
    which outlives pytest until its ranks end.
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


_SHORT_REPR = reprlib.Repr()  # shortens the values of locals in tracebacks
_SHORT_REPR.maxother = _SHORT_REPR.maxstring = 400  # characters


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

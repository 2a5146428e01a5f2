"""Runs a function on n ranks of a real gloo world: their results in order of rank, or a failure within the limit.

Ranks are forked from a server that has imported torch once: about 0.1 s for two ranks, where a fresh interpreter takes
seconds. They meet through a file in a private folder and talk on the loopback interface alone. Whatever happens, also
when the test is interrupted, no process is left when the call is over.

Because they are forked from one process, ranks share the seed of `hash(str)`: a test here cannot find an order that
depends on it. Runs of the command line start fresh interpreters and can.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import ParamSpec, TypeVar

from sley_testing import rank_process
from sley_testing.rank_process import Job, Outcome, rank_main
from sley_testing.shipping import Packed, pack

GRACE_S = 1.0  # how long the other ranks have to finish once one has failed

_LAST_WORDS_S = 2.0

P = ParamSpec("P")
T = TypeVar("T")


class RankError(Exception):
    """A rank failed with an exception that cannot be raised here, or died without one."""


class RankTimeoutError(RankError):
    """The time limit passed; the message holds the Python stacks of every rank that was still at work."""


@dataclass(frozen=True)
class Ranks:
    """`Ranks(2)(function, *args, **kwargs)` calls `function` on two ranks; the result is the list of what they return.

    function: at module level, in any module, also one that pytest loaded by file. With `init`, the default group is up
        (gloo), and `torch.distributed.get_rank()` tells the rank; without, RANK, WORLD_SIZE, LOCAL_RANK and SLEY_STORE
        are in the environment, as they always are, and the function joins by itself.
    raises: the exception of the rank that failed first, with its traceback and a word on the others as notes;
        RankError if it cannot be raised here; RankTimeoutError after `timeout_s`.
    """

    size: int
    timeout_s: float = 60.0
    init: bool = True

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        __tracebackhide__ = True
        return [pickle.loads(value) for value in self._values(pack((function, args, kwargs)))]

    def once(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Calls a function that always gives the same on the ranks and returns its results; what this process has called before
        is not called again.

        For references that several tests compare with. Each gets results of its own. Another path, folder or environment is
        another call.
        """
        __tracebackhide__ = True
        call = pack((function, args, kwargs))
        environ = tuple(sorted((name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"))
        key = (self.size, self.init, call.data, tuple(sys.path), str(Path.cwd()), environ)
        if key not in _known:
            _known[key] = self._values(call)
        return [pickle.loads(value) for value in _known[key]]

    def _values(self, call: Packed) -> list[bytes]:
        """Returns what `call` returns on each rank, pickled."""
        __tracebackhide__ = True
        with tempfile.TemporaryDirectory(prefix="sley-ranks-") as folder, _World(folder) as world:
            world.start(self._jobs(call, folder))
            outcomes = world.collect(self.timeout_s)
        if failed := sorted((o for o in outcomes if o.failed), key=lambda outcome: outcome.ended):
            first, *others = failed
            error = pickle.loads(first.error) if first.error else None
            if not isinstance(error, BaseException) or isinstance(error, SystemExit | KeyboardInterrupt):
                error = RankError(f"rank {first.rank} of {self.size}: {first.summary}")
            error.add_note(f"rank {first.rank} of {self.size} failed first\n{first.trace}".rstrip())
            for other in sorted(others, key=lambda outcome: outcome.rank):
                error.add_note(f"rank {other.rank}: {other.summary}")
            raise error
        return [outcome.value for outcome in outcomes]

    def _jobs(self, call: Packed, folder: str) -> list[Job]:
        """Returns one job per rank, with the environment of a local launch."""
        store = Path(folder, "store").as_uri()
        filters = pack(list(warnings.filters))
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        shared = {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size), "SLEY_STORE": store}
        return [
            Job(
                rank=rank,
                size=self.size,
                init=self.init,
                timeout_s=self.timeout_s,
                call=call,
                store=store,
                folder=folder,
                cwd=str(Path.cwd()),
                sys_path=list(sys.path),
                environ={**os.environ, **shared, "GLOO_SOCKET_IFNAME": loopback, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                filters=filters,
            )
            for rank in range(self.size)
        ]


_known: dict[Hashable, list[bytes]] = {}  # what calls of `Ranks.once` returned


@dataclass
class _World:
    """The processes of one call, in order of rank. On leaving the context they are gone, and their output stands in this
    one's."""

    folder: str
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *failure: object) -> None:
        for connection in self.connections:
            connection.close()
        # Ranks that succeeded leave by themselves once told so; after a failure there is nothing to wait for.
        deadline = time.monotonic() + (0.0 if failure[0] else _LAST_WORDS_S)
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                kill(process)
        for rank in range(len(self.processes)):
            for line in _read(Path(self.folder, f"rank{rank}.out")).splitlines():
                print(f"[rank {rank}] {line}")

    def start(self, jobs: list[Job]) -> None:
        """Gives each rank its job. Slow once: the fork server comes up with the first process, outside any time limit."""
        context = preloaded_server()
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs,), name=f"rank {job.rank}")
            self.processes.append(process)
            self.connections.append(ours)
            process.start()
            theirs.close()
        # Sent only now that every process id is known: a rank without a job ends when this process forgets it.
        for connection, job in zip(self.connections, jobs, strict=True):
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(pickle.dumps(job))

    def collect(self, timeout_s: float) -> list[Outcome]:
        """Returns one outcome per rank, at the latest shortly after `timeout_s`."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(outcomes) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in outcomes]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failed:
                    raise self._timed_out(set(outcomes), timeout_s)
                break
            for connection in ready:
                rank = self.connections.index(connection)  # type: ignore[arg-type]  # wait() returns what it was given
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].failed and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank, process in enumerate(self.processes):
            if rank not in outcomes:
                kill(process)
                outcomes[rank] = Outcome.lost(rank, f"still at work {GRACE_S:g} s after that, killed", ended=float("inf"))
        return [outcomes[rank] for rank in range(len(self.processes))]

    def _receive(self, rank: int) -> Outcome:
        """Returns the outcome of a rank; if its process has ended without one, an outcome that says how."""
        try:
            outcome = pickle.loads(self.connections[rank].recv_bytes())
            assert isinstance(outcome, Outcome), outcome
            return outcome
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_LAST_WORDS_S)
            # A rank that dies silently is the cause of what its peers then say, so it comes first.
            code = self.processes[rank].exitcode
            how = "closed its connection without a result" if code is None else f"left with exit code {code} before it returned"
            if code is not None and code < 0:
                how = f"died of {signal.Signals(-code).name}"
            return Outcome.lost(rank, how, ended=0.0, trace=self._stacks(rank))

    def _stacks(self, rank: int) -> str:
        """Returns the Python stacks that faulthandler wrote in `rank`, each down to where the kit called the function."""
        kept: list[str] = []
        for thread in _read(Path(self.folder, f"rank{rank}.stacks")).split("\n\n"):
            frames = [line for line in thread.splitlines() if line.startswith(("Thread", "Current thread", "  File"))]
            kits = [index for index, line in enumerate(frames) if rank_process.__file__ in line]
            if frames and not (kits and frames[kits[0]].endswith(" in _end_with_parent")):
                kept += frames[: kits[0] if kits else None]
        return "\n".join(kept)

    def _timed_out(self, finished: set[int], timeout_s: float) -> RankTimeoutError:
        """Kills the ranks that have not finished; returns an error with their stacks."""
        hung = [(rank, process) for rank, process in enumerate(self.processes) if rank not in finished]
        for _, process in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGABRT)
        deadline = time.monotonic() + _LAST_WORDS_S
        for _, process in hung:
            process.join(max(0.0, deadline - time.monotonic()))
            kill(process)
        lines = [f"{len(hung)} of {len(self.processes)} ranks did not finish within {timeout_s:g} s"]
        lines += [f"rank {rank} had finished" for rank in sorted(finished)]
        for rank, _ in hung:
            lines.append(f"stacks of rank {rank}:\n{self._stacks(rank) or '  none were written'}")
        return RankTimeoutError("\n".join(lines))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").rstrip() if path.exists() else ""


_CONTEXT = multiprocessing.get_context("forkserver")


def preloaded_server() -> ForkServerContext:
    """Processes of this context are forked from a server that has imported what `preload` names."""
    _CONTEXT.set_forkserver_preload(["sley_testing.preload"])
    return _CONTEXT


def kill(process: ForkServerProcess) -> None:
    """Ends the rank and what it started, also where the rank itself is gone already."""
    assert process.pid is not None, process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()

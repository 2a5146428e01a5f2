"""Keeps the processes that ranks of tests are: forked from one server, and kept from one call to the next where they may be."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from sley_testing.rank_process import AGAIN, Job, rank_main

CALLS = 50
"""After as many calls the processes of a team are replaced."""

KEPT = 4
"""How many teams wait for their next call at most."""

_REST_S = 10.0
"""How long ranks may take to leave their world and say what is left, on a machine that is busy with other tests."""
_CONTEXT = multiprocessing.get_context("forkserver")


def preloaded_server() -> ForkServerContext:
    """Processes of this context are forked from a server that has imported what `preload` names."""
    _CONTEXT.set_forkserver_preload(["sley_testing.preload"])
    return _CONTEXT


@dataclass
class Team:
    """Processes in order of rank. They stay together, so that what a process counts it has counted as often as its peers."""

    environ: Mapping[str, str]
    """What they have begun with: C code reads some of it once."""
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    calls: int = 0

    def send(self, jobs: list[Job]) -> None:
        """Gives each rank its job. Slow once: the fork server comes up with the first process, outside any time limit."""
        context = preloaded_server()
        for job in jobs[len(self.processes) :]:
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs,), name=f"rank {job.rank}")
            self.processes.append(process)
            self.connections.append(ours)
            process.start()
            theirs.close()
        self.calls += 1
        # Sent only now that every process id is known: a rank without a job ends when this process forgets it.
        for connection, job in zip(self.connections, jobs, strict=True):
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(pickle.dumps(job))

    def rest(self) -> list[str]:
        """Lets ranks that have succeeded leave their world; what they have left of their call, nothing if they can go on."""
        left: list[str] = []
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(AGAIN)
        deadline = time.monotonic() + _REST_S
        for rank, connection in enumerate(self.connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    return [*left, f"rank {rank} does not answer"]
                left += [f"rank {rank}: {one}" for one in pickle.loads(connection.recv_bytes())]
            except (EOFError, OSError):
                return [*left, f"rank {rank} has ended"]
        return left

    def end(self, wait_s: float = 0.0) -> None:
        """Ends the processes and what they started, also where they are gone already; first they have `wait_s` to leave."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + wait_s
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                kill(process)


_idle: list[Team] = []
"""Teams between two calls, the last used at the end."""

_lock = threading.Lock()


def take(size: int, environ: Mapping[str, str]) -> Team:
    """Returns a team that waits for a call of as many ranks in this environment; or a new one, which has no processes yet."""
    with _lock:
        found = next((one for one in _idle if len(one.processes) == size and one.environ == environ), None)
        if found is not None:
            _idle.remove(found)
    if found is not None and all(process.is_alive() for process in found.processes):
        return found
    if found is not None:
        found.end()
    return Team(dict(environ))


def give_back(team: Team) -> None:
    """Keeps `team` for a later call, or ends it."""
    if team.calls >= CALLS:
        team.end()
        return
    with _lock:
        _idle.append(team)
        one_too_many = _idle.pop(0) if len(_idle) > KEPT else None
    if one_too_many is not None:
        one_too_many.end()


@atexit.register  # before multiprocessing waits for all processes to end: it has registered first
def end_idle() -> None:
    """Ends the teams that wait for a call."""
    while _idle:
        _idle.pop().end()


def idle_processes() -> set[int]:
    """Returns the ids of the processes that wait for a call."""
    return {process.pid for team in _idle for process in team.processes if process.pid is not None}


def kill(process: ForkServerProcess) -> None:
    """Ends the rank and what it started, also where the rank itself is gone already."""
    assert process.pid is not None, process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()

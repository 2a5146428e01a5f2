"""Elastic's agent with its own way to end the ranks: it reports which of them had to be killed, and in what state they were.

    a rank fails ──> SIGTERM to the others ──> a second SIGTERM ── all have ended ──> result
                                                └── 10 s ──> those left are noted in `silent` with their states, and killed

A rank of ours ends after SIGTERM unless it cannot run at all. Where the user asked the run to stop, ranks may save a
checkpoint, and the second SIGTERM, which makes them hurry, is left out. Elastic alone waits 30 s, and versions of torch differ
in whether that can be changed; the agent ends ranks itself, so that all versions behave alike.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from train_cli.stopping import HURRY_S

MORE_S = 2
"""Between SIGTERM and SIGKILL, beyond what a rank gives itself."""

AGAIN_S = 1.5
"""Between two SIGTERMs that a rank takes for two."""

_POLL_S = 0.05
_STATES = {
    "T": "it is stopped, as by SIGSTOP",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, for a disk or a device",
    "R": "it is running, and hears no signal",
    "S": "it sleeps, and hears no signal",
}


class Agent(LocalElasticAgent):
    """Runs the ranks of `spec` as elastic's agent does, and ends them in the way above.

    silent: after the run, the state of each rank that SIGTERM did not end. is_asked: set when the user has asked the run to
    stop. watch: called several times a second. terminated_s: how long a rank gives itself after SIGTERM.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, watch: Callable[[], None], terminated_s: float) -> None:
        self._grace_s = round(terminated_s) + MORE_S
        super().__init__(spec, logs, exit_barrier_timeout=self._grace_s)
        self.silent: dict[int, str] = {}
        self.is_asked = False
        self._watch = watch
        self._started: list[int] = []

    def pids(self) -> list[int]:
        """Returns the process ids of the ranks started so far."""
        return [worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int)]

    def end_sessions(self) -> None:
        """Kills processes that ranks have left behind, by the rank's session, which each rank leads."""
        send(self._started, signal.SIGKILL)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Starts the ranks, and puts `_end` in place of elastic's way to end them."""
        found: dict[int, Any] = super()._start_workers(worker_group)
        self._started += [pid for pid in found.values() if isinstance(pid, int)]
        context = self._pcontext
        assert context is not None, "workers without a context"
        # All ways to end ranks lead through it; elastic calls it itself where it sees the first failure.
        self._close = context.close
        context.close = self._end  # type: ignore[method-assign]
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watch()
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def _end(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """Ends all ranks: a signal, then SIGKILL after a while for those still alive, whose states go to `silent`."""
        send(self._alive().values(), signal.SIGTERM if death_sig is None else death_sig)
        if self.is_asked:
            alive = self._wait(self._grace_s)
        elif alive := self._wait(AGAIN_S):
            send(alive.values(), signal.SIGTERM)
            alive = self._wait(HURRY_S + MORE_S)
        self.silent.update({rank: state_of(pid) for rank, pid in alive.items()})
        self._close(signal.SIGKILL, self._grace_s)

    def _wait(self, seconds: float) -> dict[int, int]:
        """Waits for the ranks to end; returns the process id of each rank that has not."""
        deadline = time.monotonic() + seconds
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return alive

    def _alive(self) -> dict[int, int]:
        """Returns the process id of each rank that has not ended, without waiting."""
        context: Any = self._pcontext
        handlers = context.subprocess_handlers.items()
        return {rank: handler.proc.pid for rank, handler in handlers if handler.proc.poll() is None}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to processes that may have ended; SIGKILL goes to the whole session of each."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def state_of(pid: int) -> str:
    """Returns the state of a process in words; empty if the system does not tell."""
    try:
        # The name of the program, in parentheses, may have any character.
        letter = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return _STATES.get(letter, "")

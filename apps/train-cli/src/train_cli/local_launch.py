"""Starts the ranks of a local run and waits for them.

    launcher ─┬─> python -m train_cli MODULE:FUNCTION JSON     RANK=0     each in its own session,
              └─> python -m train_cli MODULE:FUNCTION JSON     RANK=1     with the launcher's stdout and stderr

Ranks meet in a file, so nothing listens beyond loopback. They die with their launcher, and Ctrl-C lets them finish their step.

    a rank fails ──> SIGTERM to the others ──> a second SIGTERM ── all have ended ──> the first failure is returned
                                                └── 10 s ──> the remaining ranks are recorded in `silent` and killed

A rank ends after SIGTERM unless it cannot run at all. If the user has asked the run to stop, ranks may save a checkpoint, so
there is no second SIGTERM, which would make them hurry.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from sley_core.comm.world import STORE
from sley_core.errors import EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN, EXIT_TERMINATED, EXIT_USAGE
from train_cli import environment
from train_cli.console import print_line
from train_cli.faults import ERROR_FILE, FailedRank, Fault, find_cause
from train_cli.run_folder import recorder
from train_cli.stopping import LAUNCHER, SECOND_TERM_S, Stopping

KILL_DELAY_S = 2
"""Seconds between a rank's own time limit after SIGTERM and SIGKILL."""

REPEAT_S = 1.5
"""Seconds between two SIGTERMs, so that a rank does not take them for one."""

_POLL_S = 0.05
_REFUSED_CODES = (EXIT_USAGE, EXIT_PLAN_INVALID, EXIT_PLUGIN)
"""The exit codes of a run that is refused."""

_STATES = {
    "T": "it is stopped, for example by SIGSTOP",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, for a disk or a device",
    "R": "it is running and handles no signal",
    "S": "it sleeps and handles no signal",
}


def launch(
    target: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    run_folder: Path,
    *,
    terminated_s: float,
    stop_signals: Sequence[str] = (),
) -> Fault:
    """Calls the function `target` ("module:function") with `arguments` (JSON) on `num_ranks` ranks of this machine, and waits
    until all have ended. The function returns the rank's exit code.

    Returns the diagnostics and the exit code, `EXIT_OK` on success. run_folder: gets a report of how ranks ended, if one
    failed. terminated_s: a rank's own time limit after SIGTERM. stop_signals: the stop signals of the plan.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sley-", ignore_cleanup_errors=True))
        grace_s = terminated_s + KILL_DELAY_S
        ranks = LocalRanks(Path(folder), grace_s)
        stack.callback(ranks.kill_sessions)
        stopping = stack.enter_context(
            Stopping(print_line, None, grace_s, stop_signals, exit_process=lambda _: ranks.kill_sessions())
        )
        # -P: a file in the current folder must not replace a module of the same name.
        ranks.start([sys.executable, "-P", "-m", "train_cli", target, json.dumps(arguments)], num_ranks)
        stopping.call_at_signal(lambda: ranks.ask_to_stop(signal.Signals((stopping.exit_code or EXIT_TERMINATED) - 128)))
        failed = ranks.wait()
    if stopping.exit_code is not None:
        return Fault((), stopping.exit_code)
    if not failed:
        return Fault((), EXIT_OK)
    fault = find_cause(failed, num_ranks, ranks.silent)
    if fault.exit_code not in _REFUSED_CODES:  # a refused run has not failed
        with suppress(OSError):  # the fault matters more than its report
            ends = {rank.rank: rank.code for rank in failed}
            first = min(failed, key=lambda rank: rank.failed_at_s).rank
            recorder().report_launch(run_folder, num_ranks, ends, ranks.silent, first)
    return fault


class LocalRanks:
    """The processes of the ranks. folder: for their store and error files. grace_s: seconds until SIGKILL if ranks may save.

    silent: the process state of each rank that SIGTERM did not end.
    """

    def __init__(self, folder: Path, grace_s: float) -> None:
        self.silent: dict[int, str] = {}
        self._is_asked_to_stop = False
        self._folder = folder
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        variables = {**os.environ, **rank_variables(num_ranks, os.environ), STORE: (self._folder / "store").as_uri()}
        for rank in range(num_ranks):
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(self._error_file(rank))}
            self._processes.append(subprocess.Popen(command, env=dict(variables), start_new_session=True))

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Passes a signal of the user on, so that each rank finishes its step or ends within its time limit."""
        self._is_asked_to_stop = True
        pids = [process.pid for process in self._processes]
        # Ranks have no terminal that could hang up.
        send_signal(pids, signal.SIGTERM if number == signal.SIGHUP else number)

    def wait(self) -> list[FailedRank]:
        """Waits for all ranks, and ends them if one fails. Returns the failed ranks."""
        failed: dict[int, FailedRank] = {}
        while self._alive() and not failed:
            time.sleep(_POLL_S)
            self._collect(failed)
        self._end()
        self._collect(failed)
        return list(failed.values())

    def kill_sessions(self) -> None:
        """Kills the remaining processes in the sessions of ranks."""
        send_signal([process.pid for process in self._processes], signal.SIGKILL)

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"

    def _collect(self, failed: dict[int, FailedRank]) -> None:
        """Adds the ranks that have failed since the last call."""
        for rank, process in enumerate(self._processes):
            if process.poll() and rank not in failed:
                failed[rank] = FailedRank.read(rank, process.returncode, self._error_file(rank))

    def _alive(self) -> dict[int, int]:
        """Returns the process ids, by rank, of the ranks that have not ended."""
        return {rank: process.pid for rank, process in enumerate(self._processes) if process.poll() is None}

    def _end(self) -> None:
        """Ends the remaining ranks by SIGTERM, and kills those that are still alive later; records their states in `silent`."""
        send_signal(self._alive().values(), signal.SIGTERM)
        if self._is_asked_to_stop:
            alive = self._wait(self._grace_s)
        elif alive := self._wait(REPEAT_S):
            send_signal(alive.values(), signal.SIGTERM)
            alive = self._wait(SECOND_TERM_S + KILL_DELAY_S)
        self.silent.update({rank: process_state(pid) for rank, pid in alive.items()})
        send_signal(alive.values(), signal.SIGKILL)
        self._wait(self._grace_s)

    def _wait(self, seconds: float) -> dict[int, int]:
        """Waits for the ranks to end. Returns the process ids, by rank, of those that have not."""
        deadline = time.monotonic() + seconds
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return alive


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to processes that may have ended; SIGKILL goes to the whole session of each."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def process_state(pid: int) -> str:
    """Returns a description of the process's state, or "" if it is not known."""
    with suppress(OSError, IndexError):
        # The program name, in parentheses, may contain any character.
        letter = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
        return _STATES.get(letter, "")
    return ""


def rank_variables(num_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to add for `num_ranks` local ranks. They restrict communication to loopback, and set
    OMP_NUM_THREADS unless `environ` has it.
    """
    threads = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(max(1, environment.num_cores() // num_ranks))}
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return {LAUNCHER: str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **sizes, **threads}

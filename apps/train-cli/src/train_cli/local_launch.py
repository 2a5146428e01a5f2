"""Starts the ranks of a run on this machine, and waits until the ranks have ended.

    launcher ─┬─> python -m train_cli MODULE:FUNCTION JSON     RANK=0     each in its own session,
              └─> python -m train_cli MODULE:FUNCTION JSON     RANK=1     with the launcher's stdout and stderr

Ranks find each other through a file, and listen only on the loopback interface. If their launcher dies, they die too. After
Ctrl-C, they finish their current step.

    a rank fails ──> SIGTERM to other ranks ──> a second SIGTERM ── all have ended ──> the first failure is returned
                                                 └── 8 s ───> the remaining ranks are killed; their states are reported

A rank ends after SIGTERM unless its process cannot run at all. If a signal has stopped the whole run, the launcher sends no
second SIGTERM, which would shorten the time for saving a checkpoint.
"""

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

from sley_core.comm.world import STORE_VARIABLE
from sley_core.errors import EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN, EXIT_TERMINATED, EXIT_USAGE
from train_cli import environment
from train_cli.console import print_line
from train_cli.faults import ERROR_FILE_VARIABLE, FailedRank, Fault, find_cause
from train_cli.run_folder import load_recorder
from train_cli.stopping import LAUNCHER_VARIABLE, SECOND_SIGTERM_TIMEOUT_S, SignalHandler

KILL_DELAY_S = 2
"""The time in seconds from the end of a rank's own time limit after SIGTERM until the launcher sends SIGKILL."""

SIGTERM_INTERVAL_S = 1.5
"""The time in seconds between two SIGTERMs. It exceeds `stopping.DUPLICATE_SIGNAL_S`, so that a rank counts two signals."""

_POLL_S = 0.05  # the time in seconds between two checks whether ranks have ended

_PROCESS_STATES = {
    "T": "it is stopped, for example by SIGSTOP",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, for a disk or a device",
    "R": "it is running, but handles no signal",
    "S": "it sleeps, and handles no signal",
}
"""Descriptions of a process that did not end, keyed by the letter of its state in `/proc/PID/stat`."""


def launch(
    target: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    run_folder: Path,
    *,
    sigterm_timeout_s: float,
    stop_signals: Sequence[str] = (),
) -> Fault:
    """Starts `num_ranks` ranks on this machine, each of which calls `target` with `arguments`, and waits until all have ended.
    Returns the first failure, or a fault without diagnostics if all succeeded or a signal stopped the run.

    target: "module:function", a function that returns the rank's exit code. arguments: its keyword arguments, JSON values.
    run_folder: the folder for a report on failed ranks. sigterm_timeout_s: a rank's time limit after SIGTERM, in seconds.
    stop_signals: the plan's `[run] stop_signals`.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sley-", ignore_cleanup_errors=True))
        kill_timeout_s = sigterm_timeout_s + KILL_DELAY_S
        ranks = _LocalRanks(Path(folder), kill_timeout_s)
        stack.callback(ranks.kill_process_groups)
        signal_handler = stack.enter_context(
            SignalHandler(print_line, None, kill_timeout_s, stop_signals, exit_now=lambda _: ranks.kill_process_groups())
        )
        # With -P, a file in the current folder cannot replace a module of the same name.
        ranks.start([sys.executable, "-P", "-m", "train_cli", target, json.dumps(arguments)], num_ranks)
        signal_handler.call_on_signal(lambda: ranks.forward_signal((signal_handler.exit_code or EXIT_TERMINATED) - 128))
        failed_ranks = ranks.wait()
    if signal_handler.exit_code is not None or not failed_ranks:
        return Fault((), signal_handler.exit_code or EXIT_OK)
    fault = find_cause(failed_ranks, num_ranks, ranks.killed_states)
    if fault.exit_code not in (EXIT_USAGE, EXIT_PLAN_INVALID, EXIT_PLUGIN):  # a run that was refused has not failed
        with suppress(OSError):  # the fault matters more than its report
            exit_codes = {rank.rank: rank.exit_code for rank in failed_ranks}
            first = min(failed_ranks, key=lambda rank: rank.failed_at_s).rank
            load_recorder().report_launch(run_folder, num_ranks, exit_codes, ranks.killed_states, first)
    return fault


class _LocalRanks:
    """Starts, signals and ends the processes of the ranks. folder: contains the ranks' store and error files. kill_timeout_s:
    the time in seconds from a forwarded signal until SIGKILL. killed_states: the process state of each killed rank, by rank.
    """

    def __init__(self, folder: Path, kill_timeout_s: float) -> None:
        self.killed_states: dict[int, str] = {}
        self._has_forwarded_signal = False
        self._folder = folder
        self._kill_timeout_s = kill_timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        """Starts a process of `command` for each rank, in its own session, and with its rank in the environment."""
        environ = make_rank_environment(num_ranks, os.environ) | {STORE_VARIABLE: (self._folder / "store").as_uri()}
        for rank in range(num_ranks):
            environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE_VARIABLE: str(self._error_file(rank))}
            self._processes.append(subprocess.Popen(command, env=environ, start_new_session=True))

    def forward_signal(self, signum: int) -> None:
        """Sends all ranks a signal that the launcher has received. Each rank then finishes its step within its time limit."""
        self._has_forwarded_signal = True
        pids = [process.pid for process in self._processes]
        # Ranks have no terminal, so SIGHUP becomes SIGTERM.
        _send_signal(pids, signal.SIGTERM if signum == signal.SIGHUP else signum)

    def wait(self) -> list[FailedRank]:
        """Waits until all ranks have ended, and returns the failed ranks. After the first failure, ends the other ranks."""
        failed_ranks: dict[int, FailedRank] = {}
        while self._running_pids() and not failed_ranks:
            time.sleep(_POLL_S)
            self._add_failed_ranks(failed_ranks)
        self._terminate()
        self._add_failed_ranks(failed_ranks)
        return list(failed_ranks.values())

    def kill_process_groups(self) -> None:
        """Kills the process group of each rank."""
        _send_signal([process.pid for process in self._processes], signal.SIGKILL)

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"

    def _add_failed_ranks(self, failed_ranks: dict[int, FailedRank]) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() and rank not in failed_ranks:
                failed_ranks[rank] = FailedRank.read(rank, process.returncode, self._error_file(rank))

    def _running_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in enumerate(self._processes) if process.poll() is None}

    def _terminate(self) -> None:
        """Ends the remaining ranks by SIGTERM. Kills ranks that do not end, and adds their states to `killed_states`."""
        _send_signal(self._running_pids().values(), signal.SIGTERM)
        if self._has_forwarded_signal:
            pids = self._wait_for_end(self._kill_timeout_s)
        elif pids := self._wait_for_end(SIGTERM_INTERVAL_S):
            _send_signal(pids.values(), signal.SIGTERM)
            pids = self._wait_for_end(SECOND_SIGTERM_TIMEOUT_S + KILL_DELAY_S)
        self.killed_states.update({rank: _describe_process_state(pid) for rank, pid in pids.items()})
        _send_signal(pids.values(), signal.SIGKILL)
        self._wait_for_end(self._kill_timeout_s)

    def _wait_for_end(self, timeout_s: float) -> dict[int, int]:
        """Waits at most `timeout_s` seconds for all ranks to end. Returns the process ids of running ranks, by rank."""
        deadline_s = time.monotonic() + timeout_s
        while (pids := self._running_pids()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return pids


def _send_signal(pids: Iterable[int], signum: int) -> None:
    """Sends a signal to each process, or SIGKILL to its whole process group. Ignores processes that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if signum == signal.SIGKILL else os.kill)(pid, signum)


def _describe_process_state(pid: int) -> str:
    """Returns a description of the state of the process `pid`, or "" if the state is not known."""
    with suppress(OSError, IndexError):
        # The program name, in parentheses, may contain any character.
        letter = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
        return _PROCESS_STATES.get(letter, "")
    return ""


def make_rank_environment(num_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` with the variables that each of `num_ranks` local ranks needs. Keeps OMP_NUM_THREADS if it is set."""
    return {
        "OMP_NUM_THREADS": str(max(1, environment.num_cores() // num_ranks)),
        **environ,
        LAUNCHER_VARIABLE: str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }

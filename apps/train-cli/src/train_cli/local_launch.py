"""Starts the ranks of a local run and waits for them, with torch.distributed.elastic's agent in this process.

    launcher ──> agent ──> python -m train_cli MODULE:FUNCTION JSON     RANK=0     each in its own session,
                     └───> python -m train_cli MODULE:FUNCTION JSON     RANK=1     with the launcher's stdout and stderr

The agent is that of torchrun. Differences: nothing listens beyond loopback, ranks die with their launcher, Ctrl-C lets them
finish their step, and the first failure is printed once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not where type checkers look
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from sley_core.comm.world import STORE
from sley_core.errors import EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN, EXIT_TERMINATED, EXIT_USAGE
from train_cli import environment
from train_cli.faults import Fault, find_cause
from train_cli.run_folder import lock, recorder
from train_cli.stopping import LAUNCHER, REMIND_MESSAGE, REMIND_S, SECOND_TERM_S, STOP_MESSAGE, WARNINGS, exit_codes

KILL_DELAY_S = 2
"""Seconds between a rank's own time limit after SIGTERM and SIGKILL."""

REPEAT_S = 1.5
"""Seconds between two SIGTERMs, so that a rank does not take them for one."""

_END_POLL_S, _POLL_S = 0.05, 0.1
_REFUSED_CODES = (EXIT_USAGE, EXIT_PLAN_INVALID, EXIT_PLUGIN)
"""The exit codes of a run that is refused."""

_ELASTIC_SIGNALS = (signal.SIGQUIT,)
"""The signals that torchelastic handles: it passes them on and waits for the ranks."""

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
    print_line: Callable[[str], None],
    terminated_s: float,
    stop_signals: Sequence[str] = (),
) -> Fault:
    """Calls the function `target` ("module:function") with `arguments` (JSON) on `num_ranks` ranks of this machine, and waits
    until all have ended. The function returns the rank's exit code.

    Returns the diagnostics and the exit code, `EXIT_OK` on success. run_folder: gets a report of how ranks ended, if one
    failed. print_line: prints a line for the user. terminated_s: a rank's own time limit after SIGTERM. stop_signals: the stop
    signals of the plan.
    """
    with _scratch_folder() as folder, _environment(num_ranks), _no_elastic_logs():
        signals = _SignalForwarder(print_line, exit_codes(stop_signals))
        logs = folder / "logs"
        logs.mkdir()
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            rdzv_handler=FileRendezvous(folder, run_id="local"),
            # -P: a file in the current folder must not replace a module of the same name.
            entrypoint=sys.executable,
            args=("-P", "-m", "train_cli", target, json.dumps(arguments)),
            max_restarts=0,
            monitor_interval=_POLL_S,
            local_addr="127.0.0.1",
        )
        agent = signals.agent = Agent(spec, DefaultLogsSpecs(log_dir=str(logs)), signals.remind, terminated_s)
        try:
            with signals:
                result = agent.run()
        except SignalException as error:
            return Fault((), 128 + error.sigval)
        finally:
            agent.end_sessions()
        if signals.first is not None:
            return Fault((), signals.exit_codes[signals.first])
        if not result.is_failed():
            return Fault((), EXIT_OK)
        failures = result.failures
        fault = find_cause(failures, num_ranks, agent.silent)
        if fault.exit_code not in _REFUSED_CODES:  # a refused run has not failed
            with suppress(OSError):  # the fault matters more than its report
                ends = {rank: failure.exitcode for rank, failure in failures.items()}
                first = min(failures, key=lambda rank: (failures[rank].timestamp, rank), default=None)
                recorder().launched(run_folder, num_ranks, ends, agent.silent, first)
        return fault


class Agent(LocalElasticAgent):
    """Runs the ranks of `spec` as elastic's agent does, but ends them in the same way with every version of torch.

    silent: the process state of each rank that SIGTERM did not end. is_asked: whether the user has asked the run to stop.
    watch: called several times a second. terminated_s: a rank's own time limit after SIGTERM.

        a rank fails ──> SIGTERM to the others ──> a second SIGTERM ── all have ended ──> result
                                                    └── 10 s ──> the remaining ranks are recorded in `silent` and killed

    A rank ends after SIGTERM unless it cannot run at all. If the user has asked the run to stop, ranks may save a checkpoint,
    so there is no second SIGTERM, which would make them hurry.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, watch: Callable[[], None], terminated_s: float) -> None:
        self._grace_s = round(terminated_s) + KILL_DELAY_S
        super().__init__(spec, logs, exit_barrier_timeout=self._grace_s)
        self.silent: dict[int, str] = {}
        self.is_asked = False
        self._watch = watch
        self._started: list[int] = []

    def pids(self) -> list[int]:
        """Returns the process ids of the ranks started so far."""
        return [worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int)]

    def end_sessions(self) -> None:
        """Kills the remaining processes in the sessions of ranks."""
        send_signal(self._started, signal.SIGKILL)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._started += [pid for pid in pids.values() if isinstance(pid, int)]
        context = self._pcontext
        assert context is not None, "workers without a context"
        # The agent ends ranks only through `close`, also when it sees the first failure.
        self._close = context.close
        context.close = self._end  # type: ignore[method-assign]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watch()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _end(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """Ends all ranks by a signal, and kills those that are still alive later; records their states in `silent`."""
        send_signal(self._alive().values(), signal.SIGTERM if death_sig is None else death_sig)
        if self.is_asked:
            alive = self._wait(self._grace_s)
        elif alive := self._wait(REPEAT_S):
            send_signal(alive.values(), signal.SIGTERM)
            alive = self._wait(SECOND_TERM_S + KILL_DELAY_S)
        self.silent.update({rank: process_state(pid) for rank, pid in alive.items()})
        self._close(signal.SIGKILL, self._grace_s)

    def _wait(self, seconds: float) -> dict[int, int]:
        """Waits for the ranks to end. Returns the process ids, by rank, of those that have not."""
        deadline = time.monotonic() + seconds
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        return alive

    def _alive(self) -> dict[int, int]:
        """Returns the process ids, by rank, of the ranks that have not ended."""
        context: Any = self._pcontext
        handlers = context.subprocess_handlers.items()
        return {rank: handler.proc.pid for rank, handler in handlers if handler.proc.poll() is None}


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


class FileRendezvous(RendezvousHandler):
    """The rendezvous of a single agent. `next_rendezvous` also sets the new attempt's store in this process's environment,
    which the ranks inherit.

    torchelastic's own rendezvous backends use a TCPStore, which listens on all interfaces; and a store that is used twice
    gives gloo the addresses of ended ranks.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._num_attempts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        attempt = self._folder / f"attempt-{self._num_attempts}"
        attempt.mkdir()
        self._num_attempts += 1
        os.environ[STORE] = (attempt / "ranks").as_uri()
        # Ranks use the store, not this address, which torchelastic puts into their environment.
        address = RendezvousStoreInfo("127.0.0.1", 0)
        # The agent's own store, for agents on other machines, stays in memory.
        return RendezvousInfo(HashStore(), 0, 1, address)

    def get_backend(self) -> str:
        return "sley-file"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Yields a private temporary folder, locked so that cleaners of temporary files do not delete it."""
    with tempfile.TemporaryDirectory(prefix="sley-", ignore_cleanup_errors=True) as name:
        folder = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                lock(folder)
            yield Path(name)
        finally:
            os.close(folder)


def rank_variables(num_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to add for `num_ranks` local ranks. They restrict communication to loopback, and set
    OMP_NUM_THREADS unless `environ` has it.
    """
    threads = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(max(1, environment.num_cores() // num_ranks))}
    return {LAUNCHER: str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **threads}


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Sets the environment variables of the agent and its ranks within the block."""
    # STORE is set by the rendezvous; it is listed here so that it is restored.
    agent_variables = {STORE: "", "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in _ELASTIC_SIGNALS)}
    variables = rank_variables(num_ranks, os.environ) | agent_variables
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _SignalForwarder:
    """Handles the signals in `exit_codes`, which maps signals to the launcher's exit codes, while its ranks run.

    The first signal is passed on, so that each rank finishes its step or ends within its time limit. The second kills the
    ranks. The warning signals of batch systems do not count as a first signal.
    """

    agent: Agent

    def __init__(self, print_line: Callable[[str], None], exit_codes: Mapping[int, int]) -> None:
        self._print_line = print_line
        self.exit_codes = exit_codes
        self._is_ending = False
        self._first_signal_s = self._last_reminder_s = 0.0
        self._old_handlers = {number: signal.getsignal(number) for number in (*exit_codes, *_ELASTIC_SIGNALS)}
        self.first: signal.Signals | None = None

    def __enter__(self) -> None:
        for number in self.exit_codes:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def remind(self) -> None:
        """Prints a line every REMIND_S seconds if a step has not been finished since the first signal."""
        time_s = time.monotonic()
        if self.first is not None and time_s - self._last_reminder_s > REMIND_S:
            self._last_reminder_s = time_s
            self._print_line(REMIND_MESSAGE.format(time_s - self._first_signal_s))

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Passes the first signal on to the ranks, and kills them at the second. Raises if no rank runs yet."""
        pids = self.agent.pids()
        if not pids:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_codes.get(number, EXIT_TERMINATED))
        if self.first is None:
            self.first = signal.Signals(number)
            self.agent.is_asked = True
            self._first_signal_s = self._last_reminder_s = time.monotonic()
            self._print_line(STOP_MESSAGE)
        if not self._is_ending:
            self._is_ending = number not in WARNINGS
            # Ranks have no terminal: SIGTERM makes them finish their step.
            send_signal(pids, signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
        elif number != signal.SIGHUP and number not in WARNINGS:  # a shell and the kernel may both send SIGHUP
            send_signal(pids, signal.SIGKILL)


@contextmanager
def _no_elastic_logs() -> Iterator[None]:
    """Turns off torchelastic's logs within the block: they print every failure at length, which our diagnostics report."""
    names = [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

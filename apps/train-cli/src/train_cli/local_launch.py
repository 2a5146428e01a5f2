"""Starts the ranks of a local run and waits for them: torch.distributed.elastic's agent, in this process.

    launcher ──> agent ──> python -m train_cli run plan.toml     RANK=0     each in a session of its own,
                     └───> python -m train_cli run plan.toml     RANK=1     stdout and stderr as the launcher's

It is the engine behind torchrun, and ranks run the same command as under torchrun. Differences: nothing listens beyond
loopback, ranks die with their launcher, Ctrl-C lets them finish their step, and the first failure is shown once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from sley_core.comm.occasions import STORE
from sley_core.errors import EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN, EXIT_TERMINATED, EXIT_USAGE
from train_cli import surroundings
from train_cli.agent import Agent, send
from train_cli.blame import blame
from train_cli.faults import Fault
from train_cli.folder_lock import lock
from train_cli.recorder import recorder
from train_cli.rendezvous import FileRendezvous
from train_cli.stopping import HEARD, REMIND_S, STILL, WARNINGS, codes

_POLL_S = 0.1
_REFUSED = (EXIT_USAGE, EXIT_PLAN_INVALID, EXIT_PLUGIN)
"""Exit codes of what does not begin."""

_ELASTICS = (signal.SIGQUIT,)
"""Left to elastic, which passes it on and waits for the ranks to end."""


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    run_folder: Path,
    *,
    say: Callable[[str], None],
    terminated_s: float,
    stop_signals: Sequence[str] = (),
    verbose: bool = False,
) -> Fault:
    """Runs `python -m train_cli` with `arguments` on `num_ranks` ranks of this machine; blocks until all have ended.

    Returns what to show and the exit code, `EXIT_OK` on success. run_folder: gets the report of how ranks ended, if one failed.
    say: prints a line for the user. terminated_s: how long a rank gives itself after SIGTERM. stop_signals: of the plan.
    verbose: lets elastic log.
    """
    with (
        _scratch() as folder,
        surroundings.environment(_variables(num_ranks)),
        _logging(verbose),
    ):
        signals = _Signals(say, codes(stop_signals))
        agent = signals.agent = _agent(folder, arguments, num_ranks, signals.remind, terminated_s)
        try:
            with signals:
                result = agent.run()
        except SignalException as error:
            return Fault((), 128 + error.sigval)
        finally:
            agent.end_sessions()
        if signals.first is not None:
            return Fault((), signals.codes[signals.first])
        if not result.is_failed():
            return Fault((), EXIT_OK)
        fault = blame(result.failures, num_ranks, agent.silent)
        if fault.exit_code not in _REFUSED:  # which is no failure of the run whose folder it is
            with suppress(OSError):  # the fault itself is worth more than its report
                _record(run_folder, result.failures, num_ranks, agent)
        return fault


def _record(run_folder: Path, failures: Mapping[int, ProcessFailure], num_ranks: int, agent: Agent) -> None:
    """Records how the ranks ended, for `train-cli doctor`."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    first = min(failures, key=lambda rank: (failures[rank].timestamp, rank), default=None)
    recorder().launched(run_folder, num_ranks, codes, agent.silent, first)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yields a private folder while the ranks run, locked so that cleaners of temporary files leave it alone."""
    with tempfile.TemporaryDirectory(prefix="sley-", ignore_cleanup_errors=True) as name:
        folder = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                lock(folder)
            yield Path(name)
        finally:
            os.close(folder)


def _variables(num_ranks: int) -> dict[str, str]:
    """Returns the environment variables of the launcher's agent and its ranks."""
    added = surroundings.of_ranks(num_ranks, os.environ, os.getpid())
    # The rendezvous sets the store; named here so that the environment is put back afterwards.
    return {**added, STORE: "", "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(each.name for each in _ELASTICS)}


def _agent(
    folder: Path, arguments: Sequence[str], num_ranks: int, watch: Callable[[], None], terminated_s: float
) -> Agent:
    """Returns elastic's agent for the ranks; `watch` is called several times a second."""
    logs = folder / "logs"
    logs.mkdir()
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=FileRendezvous(folder, run_id="local"),
        # -P: a file of the current folder that is named like a module must not take its place.
        entrypoint=sys.executable,
        args=("-P", "-m", "train_cli", *arguments),
        max_restarts=0,
        monitor_interval=_POLL_S,
        local_addr="127.0.0.1",
    )
    return Agent(spec, DefaultLogsSpecs(log_dir=str(logs)), watch, terminated_s)


class _Signals:
    """The launcher's handlers of the signals in `codes` while its ranks run.

    The first signal is passed on: each rank finishes its step, or at least ends within its limit. The second kills the
    ranks; the agent then finds them dead. A warning is not the first one of these two.
    """

    agent: Agent

    def __init__(self, say: Callable[[str], None], codes: Mapping[int, int]) -> None:
        self._say = say
        self.codes = codes
        self._is_ending = False
        self._heard = self._reminded = 0.0
        self._before = {number: signal.getsignal(number) for number in (*codes, *_ELASTICS)}
        self.first: signal.Signals | None = None

    def __enter__(self) -> None:
        for number in self.codes:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def remind(self) -> None:
        """Tells the user every REMIND_S seconds that a step has not been finished since the first signal."""
        now = time.monotonic()
        if self.first is not None and now - self._reminded > REMIND_S:
            self._reminded = now
            self._say(STILL.format(now - self._heard))

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Passes the first signal on to the ranks; kills them at the second. Raises if no rank runs yet."""
        pids = self.agent.pids()
        if not pids:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.codes.get(number, EXIT_TERMINATED))
        if self.first is None:
            self.first = signal.Signals(number)
            self.agent.is_asked = True
            self._heard = self._reminded = time.monotonic()
            self._say(HEARD)
        if not self._is_ending:
            self._is_ending = number not in WARNINGS
            # A rank has no terminal to lose; what ends it in order is SIGTERM.
            send(pids, signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
        elif number != signal.SIGHUP and number not in WARNINGS:  # a shell and the kernel may both tell of one terminal
            send(pids, signal.SIGKILL)


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Turns off elastic's logs, which print every failure at length, unless `verbose`; our diagnostics name the cause."""
    loggers = [logging.getLogger(name) for name in _elastic_loggers()]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if verbose else logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _elastic_loggers() -> list[str]:
    return [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]

"""Starts the ranks of a local run and stays with them: torch.distributed.elastic's agent, in this process.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from sley_core.comm.world import STORE
from sley_core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from train_cli import surroundings
from train_cli.blame import blame
from train_cli.faults import Fault
from train_cli.rendezvous import FileRendezvous

_POLL_S = 0.1
_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
_ELASTICS = (signal.SIGHUP, signal.SIGQUIT)
"""Left to elastic, which passes them on and waits for the ranks to end."""


def launch(arguments: Sequence[str], num_ranks: int, *, say: Callable[[str], None], verbose: bool = False) -> Fault:
    """Runs `python -m train_cli` with `arguments` on `num_ranks` ranks of this machine until they are all gone.

    The fault says what to show and the exit code; it is `EXIT_OK` where all went well. say: tells the user something.
    verbose: lets elastic log.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sley-", ignore_cleanup_errors=True) as folder,
        surroundings.environment(_variables(num_ranks)),
        _logging(verbose),
    ):
        agent = _agent(Path(folder), arguments, num_ranks)
        signals = _Signals(agent, say)
        try:
            with signals:
                result = agent.run()
        except SignalException as error:
            return Fault((), 128 + error.sigval)
        if signals.first is not None:
            return Fault((), _CODES[signals.first])
        return blame(result.failures, num_ranks) if result.is_failed() else Fault((), EXIT_OK)


def _variables(num_ranks: int) -> dict[str, str]:
    added = surroundings.of_ranks(num_ranks, os.environ, os.getpid())
    # The rendezvous sets the store; named here so that the environment is put back afterwards.
    return {**added, STORE: "", "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(each.name for each in _ELASTICS)}


def _agent(folder: Path, arguments: Sequence[str], num_ranks: int) -> LocalElasticAgent:
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
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(logs)), shutdown_timeout=10)


class _Signals:
    """What Ctrl-C and SIGTERM do to the launcher while its ranks run.

    The first is passed on: each rank finishes its step, or at least ends within its limit. The second ends the ranks
    at once; the agent then finds them dead.
    """

    def __init__(self, agent: LocalElasticAgent, say: Callable[[str], None]) -> None:
        self._agent = agent
        self._say = say
        self._before = {number: signal.getsignal(number) for number in (*_CODES, *_ELASTICS)}
        self.first: signal.Signals | None = None

    def __enter__(self) -> None:
        for number in _CODES:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        pids = [worker.id for worker in self._agent.get_worker_group().workers if isinstance(worker.id, int)]
        if not pids:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_CODES[signal.SIGTERM])
        if self.first is None:
            self.first = signal.Signals(number)
            self._say("stopping after this step; Ctrl-C again stops at once")
            _send(pids, self.first)
        else:
            _send(pids, signal.SIGKILL)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            # Its own session, so that what the rank started is reached too when it must end at once.
            (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Elastic tells every failure at length; what matters of it is in our diagnostics."""
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

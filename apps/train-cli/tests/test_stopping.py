"""The effect of signals on one process. Small programs wait for them."""

import os
import signal
import threading
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1
from textwrap import dedent

import pytest

from sley_testing.processes import ForkedProgram, assert_none_left, descendants
from train_cli.stopping import STOP_MESSAGE, SignalHandler

HEADER = """
import multiprocessing, os, signal, sys, time
from train_cli import stopping
from train_cli.stopping import SignalHandler
sys.stdout.reconfigure(line_buffering=True)
stopping.CLEANUP_TIMEOUT_S = stopping.SIGTERM_TIMEOUT_S = 0.3
lines = []
stops = []
def stop_run():
    stops.append(time.monotonic())
"""

WAITS = """
with SignalHandler(lines.append) as stop:
    stop.call_on_signal(stop_run)
    print("ready")
    while not stops:
        time.sleep(0.01)
    print(lines)
    sys.exit(stop.exit_code)
"""

HANGS = """
with SignalHandler(lines.append, report_timeout=lambda: print("late")) as stop:
    stop.call_on_signal(stop_run)
    print("ready")
    time.sleep(3600)
"""

WARNED = """
with SignalHandler(lines.append, warning_signals=("SIGUSR1", "SIGXCPU")) as stop:
    stop.call_on_signal(stop_run)
    print("ready")
    while not stops:
        time.sleep(0.01)
    time.sleep(0.6)  # beyond the limit that SIGTERM sets
    print(len(stops))
    sys.exit(stop.exit_code)
"""

WITHOUT_WORK = """
stopping.CLEANUP_TIMEOUT_S = 10.0  # on a busy machine, the cleanup must not run into its time limit
with SignalHandler():
    try:
        print("ready")
        time.sleep(3600)
    except (KeyboardInterrupt, stopping.TerminationInterrupt) as error:
        print(type(error).__name__)
"""

RANK = """
with SignalHandler() as stop:  # says nothing, as a rank, whose launcher does
    stop.call_on_signal(stop_run)
    print("ready")
    time.sleep(0.5)
    print(len(stops))
    sys.exit(stop.exit_code)
"""

HURRIES = """
stopping.SECOND_SIGTERM_TIMEOUT_S, stopping.DUPLICATE_SIGNAL_S = 0.2, 0.05
with SignalHandler(sigterm_timeout_s=1.0) as stop:
    stop.call_on_signal(stop_run)
    stopping._kill_children = lambda: print(time.monotonic() - stops[0] < 0.9)
    print("ready")
    time.sleep(3600)
"""

FORKS = """
with SignalHandler(lines.append, warning_signals=("SIGUSR1",)):
    worker = os.fork()
    if not worker:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(7)
    print("ready", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""

TEARS_DOWN = """
with SignalHandler() as stop:
    print("ready")
    stop.limit_cleanup(3)
    time.sleep(3600)
"""

WORKER = """
with SignalHandler() as stop:
    fork = multiprocessing.get_context("fork")
    is_at_work = fork.Event()
    def work():
        is_at_work.set()
        time.sleep(3600)
    worker = fork.Process(target=work, daemon=True)
    stop.call_on_signal(stop_run)
    worker.start()
    is_at_work.wait()
    print(f"ready {worker.pid}")
    time.sleep(3600)
"""


def run(folder: Path, body: str, *signals: int) -> tuple[int, str]:
    """Returns the exit code and the output of a program that gets `signals` when it has printed "ready". The output excludes
    that word.
    """
    (folder / "waiting_program.py").write_text(HEADER + body, "utf-8")
    process = ForkedProgram("waiting_program", [], cwd=folder, env=os.environ)
    with process.stdout, process.stderr:
        try:
            ready, _, first = process.stdout.readline().strip().partition(" ")
            assert ready == "ready"
            for number in signals:
                os.kill(process.pid, number)
                time.sleep(0.1)
            code = process.wait(20)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        return code, first + process.stdout.read()


STOP_LINE = f"['{STOP_MESSAGE}']\n"
IGNORES = "\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("body", "signals", "code", "out"),
    [
        pytest.param(WAITS, [SIGINT], 130, STOP_LINE, id="SIGINT stops the run"),
        pytest.param(WAITS, [SIGTERM], 143, STOP_LINE, id="SIGTERM stops the run"),
        pytest.param(IGNORES + WAITS, [SIGHUP, SIGTERM], 143, STOP_LINE, id="SIGHUP is ignored under nohup"),
        pytest.param(HANGS, [SIGINT, SIGINT], 130, "", id="a second SIGINT ends at once"),
        pytest.param(HANGS, [SIGINT, SIGTERM], 130, "late\n", id="SIGTERM has a time limit"),
        pytest.param(TEARS_DOWN, [], 3, "", id="cleanup has a time limit"),
        pytest.param(RANK, [SIGINT, SIGINT], 130, "1\n", id="two signals at the same time count as one"),
        pytest.param(HURRIES, [SIGTERM, SIGTERM], 143, "True\n", id="a second SIGTERM shortens the time limit"),
        pytest.param(WARNED, [SIGUSR1], 138, "1\n", id="a warning has no time limit"),
        pytest.param(WARNED, [SIGUSR1, SIGTERM], 138, "", id="SIGTERM after a warning has a time limit"),
        pytest.param(FORKS, [], 0, "7", id="a forked worker survives a warning to the whole job"),
        pytest.param(WITHOUT_WORK, [SIGINT], 0, "KeyboardInterrupt\n", id="SIGINT raises before there is work"),
    ],
)
def test_signals_end_a_process(tmp_path: Path, body: str, signals: list[int], code: int, out: str) -> None:
    assert run(tmp_path, dedent(body), *signals) == (code, out)


def test_a_worker_ends_with_a_terminated_process(tmp_path: Path) -> None:
    code, pid = run(tmp_path, WORKER, SIGTERM)
    assert code == 143
    assert_none_left(lambda: [process for process in descendants(1) if process.pid == int(pid)], within_s=5)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (SIGINT, SIGTERM)]
    with SignalHandler() as stopping:
        assert signal.getsignal(SIGINT) != before[0]
        assert stopping.exit_code is None
    assert [signal.getsignal(number) for number in (SIGINT, SIGTERM)] == before
    assert not any(thread.name == "sley-signals" for thread in threading.enumerate())

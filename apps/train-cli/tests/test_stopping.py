"""What a signal does to one process, without torch: small programs that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU
from textwrap import dedent

import pytest

from sley_testing.processes import assert_none_left, descendants
from train_cli.stopping import STOP_MESSAGE, Stopping

BEGIN = """
import multiprocessing, os, signal, sys, time
from train_cli import stopping
from train_cli.stopping import Stopping
stopping.CLEANUP_S = stopping.TERMINATED_S = 0.3
stopping.REMIND_S = 0.05
said = []
asked = []
def ask():
    asked.append(time.monotonic())
"""

ASKED = """
with Stopping(said.append) as stop:
    stop.working(ask)
    print("ready")
    while not asked:
        time.sleep(0.01)
    print(said)
    sys.exit(stop.exit_code)
"""

HANGS = """
with Stopping(said.append, report_stuck=lambda: print("late")) as stop:
    stop.working(ask)
    print("ready")
    time.sleep(3600)
"""

WARNED = """
with Stopping(said.append, warnings=("SIGUSR1", "SIGXCPU")) as stop:
    stop.working(ask)
    print("ready")
    while not asked:
        time.sleep(0.01)
    time.sleep(1)  # beyond the limit that SIGTERM sets
    print(len(asked))
    sys.exit(stop.exit_code)
"""

WITHOUT_WORK = """
with Stopping():
    try:
        print("ready")
        time.sleep(3600)
    except (KeyboardInterrupt, stopping.Terminated) as error:
        print(type(error).__name__)
"""

RANK = """
with Stopping() as stop:  # says nothing, as a rank, whose launcher does
    stop.working(ask)
    print("ready")
    time.sleep(0.5)
    print(len(asked))
    sys.exit(stop.exit_code)
"""

HURRIES = """
stopping.SECOND_TERM_S, stopping.TOGETHER_S = 0.2, {together}
with Stopping(terminated_s=1.0) as stop:
    stop.working(ask)
    stopping._kill_workers = lambda: print(time.monotonic() - asked[0] < 0.9)
    print("ready")
    time.sleep(3600)
"""

FORKS = """
with Stopping(said.append, warnings=("SIGUSR1",)):
    worker = os.fork()
    if not worker:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(7)
    print("ready", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""

TEARS_DOWN = """
with Stopping() as stop:
    print("ready")
    stop.limit_cleanup(3)
    time.sleep(3600)
"""

WORKER = """
with Stopping() as stop:
    fork = multiprocessing.get_context("fork")
    is_at_work = fork.Event()
    def work():
        is_at_work.set()
        time.sleep(3600)
    worker = fork.Process(target=work, daemon=True)
    stop.working(ask)
    worker.start()
    is_at_work.wait()
    print(f"ready {worker.pid}")
    time.sleep(3600)
"""


def run(body: str, *signals: int) -> tuple[int, str]:
    """Exit code and output of a program that gets `signals`, one after the other, once it has printed "ready".

    The output is what follows that word, on its line and after it.
    """
    process = subprocess.Popen([sys.executable, "-u", "-c", BEGIN + body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready, _, first = process.stdout.readline().strip().partition(" ")
        assert ready == "ready"
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.1)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    return process.returncode, first + out


SAID = f"['{STOP_MESSAGE}']\n"
SLOW = ASKED.replace("while not asked", "while len(said) < 4").replace("print(said)", "print(said[1])")
REMIND_MESSAGE = "still in this step after 0 s; Ctrl-C again stops at once\n"
IGNORES = "\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("body", "signals", "code", "out"),
    [
        pytest.param(ASKED, [SIGINT], 130, SAID, id="the first signal asks"),
        pytest.param(ASKED, [SIGTERM], 143, SAID, id="so does SIGTERM"),
        pytest.param(ASKED, [SIGHUP], 129, SAID, id="and a closed terminal"),
        pytest.param(IGNORES + ASKED, [SIGHUP, SIGTERM], 143, SAID, id="but not under nohup"),
        pytest.param(SLOW, [SIGINT], 130, REMIND_MESSAGE, id="a step that does not end is reported"),
        pytest.param(HANGS, [SIGINT, SIGINT], 130, "", id="the second ends at once"),
        pytest.param(HANGS, [SIGINT, SIGTERM], 130, "late\n", id="SIGTERM has a limit"),
        pytest.param(HANGS, [SIGTERM], 143, "late\n", id="and says when it is over"),
        pytest.param(TEARS_DOWN, [], 3, "", id="tearing down has one"),
        pytest.param(RANK, [SIGINT, SIGINT], 130, "1\n", id="twice at once, from terminal and launcher, is one"),
        pytest.param(HURRIES.format(together=0.05), [SIGTERM, SIGTERM], 143, "True\n", id="a second SIGTERM hurries"),
        pytest.param(HURRIES.format(together=0.5), [SIGTERM, SIGTERM], 143, "False\n", id="not one that came with the first"),
        pytest.param(WARNED, [SIGUSR1], 138, "1\n", id="a warning asks without a limit"),
        pytest.param(WARNED, [SIGXCPU, SIGXCPU, SIGUSR1], 152, "1\n", id="however often"),
        pytest.param(WARNED, [SIGUSR1, SIGTERM], 138, "", id="the SIGTERM after it has one"),
        pytest.param(FORKS, [], 0, "7", id="a forked worker survives a warning to the whole job"),
        pytest.param(WITHOUT_WORK, [SIGINT], 0, "KeyboardInterrupt\n", id="before there is work, Ctrl-C raises"),
        pytest.param(WITHOUT_WORK, [SIGTERM], 0, "Terminated\n", id="and so does SIGTERM"),
    ],
)
def test_a_process_ends_as_it_is_told(body: str, signals: list[int], code: int, out: str) -> None:
    assert run(dedent(body), *signals) == (code, out)


def test_a_worker_ends_with_a_process_that_is_ended_within_its_limit() -> None:
    code, pid = run(WORKER, SIGTERM)
    assert code == 143
    assert_none_left(lambda: [process for process in descendants(1) if process.pid == int(pid)], within_s=5)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (SIGINT, SIGTERM)]
    with Stopping() as stopping:
        assert signal.getsignal(SIGINT) != before[0]
        assert stopping.exit_code is None
    assert [signal.getsignal(number) for number in (SIGINT, SIGTERM)] == before
    assert not any(thread.name == "sley-signals" for thread in threading.enumerate())


def test_in_another_thread_it_does_nothing() -> None:
    codes: list[object] = []

    def work() -> None:
        with Stopping() as stopping:
            stopping.limit_cleanup(3)
            codes.append(stopping.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [None]

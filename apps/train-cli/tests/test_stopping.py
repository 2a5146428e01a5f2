"""What a signal does to one process, without torch: small programs that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from textwrap import dedent

import pytest

from sley_testing.processes import assert_none_left, descendants
from train_cli.stopping import Stopping

BEGIN = """
import sys, time
from train_cli import stopping
stopping.TEAR_DOWN_S = stopping.TERMINATED_S = 0.3
stopping.REMIND_S = 0.05
said = []
asked = []
with stopping.Stopping(said.append) as stop:
"""


def run(body: str, *signals: int) -> tuple[int, str]:
    """Exit code and output of a program that gets `signals`, one after the other, once it has printed "ready".

    The output is what follows that word, on its line and after it.
    """
    program = dedent(BEGIN) + "\n".join(f"    {line}" for line in dedent(body).strip().splitlines())
    process = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True)
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


FINISHES = """
    stop.working(lambda: asked.append(1))
    print("ready")
    while not asked:
        time.sleep(0.01)
    print(said)
    sys.exit(stop.exit_code)
"""

HANGS = """
    stop.working(lambda: asked.append(1))
    print("ready")
    time.sleep(3600)
"""


WARNED = """
    with stopping.Stopping(said.append, warnings=("SIGUSR1", "SIGXCPU")) as rank:
        rank.working(lambda: asked.append(1))
        print("ready")
        while not asked:
            time.sleep(0.01)
        time.sleep(1)  # beyond the limit that SIGTERM sets
        print(len(asked))
        sys.exit(rank.exit_code)
"""


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGUSR1,), 138),
        ((signal.SIGXCPU, signal.SIGXCPU, signal.SIGUSR1), 152),
        ((signal.SIGUSR1, signal.SIGTERM), 138),
    ],
)
def test_a_warning_of_a_batch_system_asks_without_a_limit(signals: tuple[int, ...], code: int) -> None:
    """Each is sent to a job minutes before its end; the SIGTERM at that end has a limit as ever."""
    asked = "" if signal.SIGTERM in signals else "1\n"
    assert run(WARNED, *signals) == (code, asked)


def test_a_forked_worker_survives_a_warning_to_the_whole_job() -> None:
    body = """
    import os, signal
    with stopping.Stopping(said.append, warnings=("SIGUSR1",)) as rank:
        worker = os.fork()
        if not worker:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(7)
        print("ready", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    """
    assert run(body) == (0, "7")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_asks(number: int, code: int) -> None:
    assert run(FINISHES, number) == (code, "['stopping after this step; Ctrl-C again stops at once']\n")


def test_a_step_that_does_not_end_is_said_to() -> None:
    slow = FINISHES.replace("while not asked", "while len(said) < 4").replace("print(said)", "print(said[1])")
    assert run(slow, signal.SIGINT) == (130, "still in this step after 0 s; Ctrl-C again stops at once\n")


def test_an_interrupt_that_comes_twice_at_once_is_one() -> None:
    """To a rank, which its launcher tells too; whoever presses Ctrl-C again is heard by the launcher."""
    body = """
    with stopping.Stopping(late=lambda: print("late")) as rank:
        rank.working(lambda: asked.append(1))
        print("ready")
        time.sleep(0.5)
        print(asked)
        sys.exit(rank.exit_code)
    """
    assert run(body, signal.SIGINT, signal.SIGINT) == (130, "[1]\n")
    hangs = body.replace("time.sleep(0.5)", "time.sleep(3600)")
    assert run(hangs, signal.SIGTERM) == (143, "late\n")


def test_a_second_sigterm_lets_it_hurry() -> None:
    """As from a launcher of which a rank has failed; not one that came with the first, to a whole job."""
    body = """
    stopping.HURRY_S, stopping.TOGETHER_S = 0.2, {together}
    with stopping.Stopping(terminated_s=1.0) as rank:
        rank.working(lambda: asked.append(time.monotonic()))
        stopping._kill_workers = lambda: print(time.monotonic() - asked[0] < 0.9)
        print("ready")
        time.sleep(3600)
    """
    assert run(body.format(together=0.05), signal.SIGTERM, signal.SIGTERM) == (143, "True\n")
    assert run(body.format(together=0.5), signal.SIGTERM, signal.SIGTERM) == (143, "False\n")


WORKER = """
    import multiprocessing
    fork = multiprocessing.get_context("fork")
    is_at_work = fork.Event()
    def work():
        is_at_work.set()
        time.sleep(3600)
    worker = fork.Process(target=work, daemon=True)
    stop.working(lambda: asked.append(1))
    worker.start()
    is_at_work.wait()
    print(f"ready {worker.pid}")
"""


def assert_ended(pid: str) -> None:
    assert_none_left(lambda: [process for process in descendants(1) if process.pid == int(pid)], within_s=5)


def test_a_worker_ends_with_a_process_that_is_ended_within_its_limit() -> None:
    code, pid = run(WORKER + "    time.sleep(3600)", signal.SIGTERM)
    assert code == 143
    assert_ended(pid)


def test_every_end_has_a_limit() -> None:
    assert run(HANGS, signal.SIGINT, signal.SIGINT)[0] == 130
    assert run(HANGS, signal.SIGTERM)[0] == 143
    assert run(HANGS, signal.SIGINT, signal.SIGTERM)[0] == 130
    assert run('print("ready"); stop.tearing_down(3); time.sleep(3600)')[0] == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_there_is_work_a_signal_raises(number: int, code: int) -> None:
    body = f"""
    try:
        print("ready")
        time.sleep(3600)
    except (KeyboardInterrupt, stopping.Terminated) as error:
        print(type(error).__name__)
        sys.exit({code})
    """
    name = "KeyboardInterrupt" if number == signal.SIGINT else "Terminated"
    assert run(body, number) == (code, f"{name}\n")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stopping() as stopping:
        assert signal.getsignal(signal.SIGINT) != before[0]
        assert stopping.exit_code is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not any(thread.name == "sley-signals" for thread in threading.enumerate())


def test_in_another_thread_it_does_nothing() -> None:
    codes: list[object] = []

    def work() -> None:
        with Stopping() as stopping:
            stopping.tearing_down(3)
            codes.append(stopping.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [None]

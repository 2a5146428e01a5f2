"""A forked program is one that `python -m` starts, for those who read its output, wait for it or kill it; and what a test
leaves behind is found, and who may come in.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from ipaddress import ip_address
from pathlib import Path

import pytest

from sley_testing.forked import ForkedProgram
from sley_testing.processes import assert_none_left, descendants, listening_sockets, processes_with

READS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def program(tmp_path):
    """`program(source, *arguments, **environ)` runs it as a module of the folder; whatever happens, it ends with the test."""
    started = []

    def start(source, *arguments, **environ):
        (tmp_path / "tried.py").write_text(source, "utf-8")
        started.append(ForkedProgram("tried", arguments, cwd=tmp_path, env={**os.environ, **environ}))
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            os.kill(each.pid, signal.SIGKILL)
            each.wait(10)
        each.stdout.close()
        each.stderr.close()


SURROUNDINGS = """
import os, sys
print(__name__, sys.argv[1:], os.environ["TOLD"], os.path.basename(os.getcwd()), os.getsid(0) == os.getpid())
print("torch" in sys.modules, file=sys.stderr)
sys.exit(7)
"""


def test_it_has_its_own_surroundings_and_torch_already(program, tmp_path):
    begun = program(SURROUNDINGS, "a", "b c", TOLD="this")
    assert begun.stdout.read() == f"__main__ ['a', 'b c'] this {tmp_path.name} True\n"
    assert begun.stderr.read() == "True\n"
    assert begun.wait(10) == begun.poll() == 7
    assert "TOLD" not in os.environ


def test_an_error_is_shown_as_the_interpreter_shows_it(program):
    begun = program("raise ValueError('no good')")
    assert begun.stderr.read().endswith("ValueError: no good\n")
    assert begun.wait(10) == 1


def test_what_runs_on_can_be_killed(program):
    begun = program("import time\nprint('here', flush=True)\ntime.sleep(600)")
    assert begun.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        begun.wait(0.01)
    assert begun.poll() is None
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait(10) == -signal.SIGKILL


KILLED = """
import multiprocessing, os
from pathlib import Path
from sley_testing import forked
from sley_testing.forked import ForkedProgram
if __name__ == "__main__":
    forked.preloaded_server = lambda: multiprocessing.get_context("forkserver")  # which imports no torch
    begun = ForkedProgram("said", [], cwd=Path.cwd(), env=dict(os.environ))
    print(begun.pid, begun.stdout.readline(), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program outlives whoever is killed")
def test_it_ends_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "said.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")
    (tmp_path / "killed.py").write_text(KILLED)
    ended = subprocess.run([sys.executable, "killed.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    pid, said = ended.stdout.split()
    assert (said, ended.returncode) == ("here", -signal.SIGKILL)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(int(pid), signal.SIGKILL)
    raise AssertionError("the program runs on")


LAUNCHES = """
import os, subprocess, sys
import mine
mine.values.append(1)
{before}
command = [sys.executable, "-m", "launched", "a"]
options = {{"env": {{**os.environ, "TOLD": "child"}}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}}
done = subprocess.run(command, start_new_session=True, check=False, **options)
print(done.returncode, done.stdout, done.stderr[-40:])
"""
LAUNCHED = """
import os, signal, sys
print("torch" in sys.modules, sys.argv[1:], os.environ["TOLD"], os.getsid(0) == os.getpid(), end=" ", flush=True)
import mine
print(mine.values, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, open("/proc/self/comm").read().strip(), flush=True)
{end}
"""


@READS_PROC
@pytest.mark.parametrize(
    ("before", "end", "said"),
    [
        ("signal = __import__('signal'); signal.signal(signal.SIGTERM, print)", "sys.exit(3)", "3 True"),
        ("", "raise ValueError('no good')", "1 True"),
        ("", "os.kill(os.getpid(), signal.SIGTERM)", "-15 True"),
        ("", "sys.exit('told')", "1 True"),
    ],
    ids=["a handler", "an error", "a signal", "a last word"],
)
def test_what_it_starts_is_forked_too_and_begins_as_if_it_were_fresh(program, tmp_path, before, end, said):
    """Without the modules and handlers of the program."""
    (tmp_path / "mine.py").write_text("values = []", "utf-8")
    (tmp_path / "launched.py").write_text(LAUNCHED.format(end=end), "utf-8")
    begun = program(LAUNCHES.format(before=before), SLEY_TEST_PROGRAM="0123456789abcdefghij")
    told = begun.stdout.read()
    assert told.startswith(f"{said} ['a'] child True [] True 56789abcdefghij"), told + begun.stderr.read()
    assert ("ValueError: no good" in told) == ("ValueError" in end)
    assert ("told" in told) == ("told" in end)
    assert begun.wait(20) == 0


# -- what is left behind -----------------------------------------------------------------------------------------------

ONE_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.fixture
def family():
    """A process with one child of its own; both are gone afterwards."""
    mark = uuid.uuid4().hex
    parent = subprocess.Popen([sys.executable, "-c", ONE_CHILD], env={**os.environ, "SLEY_TEST_MARK": mark})
    deadline = time.monotonic() + 10
    while len(processes_with("SLEY_TEST_MARK", mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    yield parent, mark
    for process in processes_with("SLEY_TEST_MARK", mark):
        os.kill(process.pid, 9)
    parent.wait()


@READS_PROC
def test_descendants_are_found_to_the_last_grandchild(family):
    parent, _ = family
    assert len(descendants()) >= 2
    (child,) = descendants(parent.pid)
    assert child.parent == parent.pid
    assert "time.sleep(60)" in child.command
    with pytest.raises(AssertionError, match=r"left after 0\.1 s\n(.*\n)*.*time\.sleep"):
        assert_none_left(within_s=0.1)


@READS_PROC
def test_an_orphan_is_found_by_what_it_was_started_with(family):
    parent, mark = family
    parent.kill()
    parent.wait()
    (orphan,) = processes_with("SLEY_TEST_MARK", mark)
    assert orphan.parent != parent.pid
    os.kill(orphan.pid, 9)
    assert_none_left(lambda: processes_with("SLEY_TEST_MARK", mark))


@READS_PROC
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_listening_sockets_are_reported(family, address):
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    with server:
        listener = ip_address(address), server.getsockname()[1]
        assert listener in listening_sockets(os.getpid())
    assert listener not in listening_sockets(os.getpid())

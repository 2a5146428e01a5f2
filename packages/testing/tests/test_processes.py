"""Tests that a forked program behaves like `python -m`, and that remaining processes are reported."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from sley_testing.processes import ForkedProgram, assert_none_left, descendants, processes_with

READS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def program(tmp_path):
    """Returns `program(source, *arguments, **environ)`, which runs the source as a module. All programs end with the test."""
    programs = []

    def start(source, *arguments, **environ):
        (tmp_path / "program.py").write_text(source, "utf-8")
        programs.append(ForkedProgram("program", arguments, cwd=tmp_path, env={**os.environ, **environ}))
        return programs[-1]

    yield start
    for running in programs:
        if running.poll() is None:
            os.kill(running.pid, signal.SIGKILL)
            running.wait(10)
        running.stdout.close()
        running.stderr.close()


PRINTS_ENVIRONMENT = """
import os, sys
print(__name__, sys.argv[1:], os.environ["VALUE"], os.path.basename(os.getcwd()), os.getsid(0) == os.getpid())
print("torch" in sys.modules, file=sys.stderr)
sys.exit(7)
"""


def test_program_has_its_environment_and_torch(program, tmp_path):
    started = program(PRINTS_ENVIRONMENT, "a", "b c", VALUE="this")
    assert started.stdout.read() == f"__main__ ['a', 'b c'] this {tmp_path.name} True\n"
    assert started.stderr.read() == "True\n"
    assert started.wait(10) == started.poll() == 7
    assert "VALUE" not in os.environ


LAUNCHES = """
import os, subprocess, sys
import mine
mine.values.append(1)
{before}
command = [sys.executable, "-m", "launched", "a"]
options = {{"env": {{**os.environ, "VALUE": "child"}}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}}
done = subprocess.run(command, start_new_session=True, check=False, **options)
print(done.returncode, done.stdout, done.stderr[-40:])
"""
LAUNCHED = """
import os, signal, sys
print("torch" in sys.modules, sys.argv[1:], os.environ["VALUE"], os.getsid(0) == os.getpid(), end=" ", flush=True)
import mine
print(mine.values, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, open("/proc/self/comm").read().strip(), flush=True)
{end}
"""


@READS_PROC
@pytest.mark.parametrize(
    ("before", "end", "expected"),
    [
        ("signal = __import__('signal'); signal.signal(signal.SIGTERM, print)", "sys.exit(3)", "3 True"),
        ("", "raise ValueError('no good')", "1 True"),
        ("", "os.kill(os.getpid(), signal.SIGTERM)", "-15 True"),
        ("", "sys.exit('a message')", "1 True"),
    ],
    ids=["a handler", "an error", "a signal", "an exit message"],
)
def test_subprocess_is_forked_without_modules_and_handlers(program, tmp_path, before, end, expected):
    (tmp_path / "mine.py").write_text("values = []", "utf-8")
    (tmp_path / "launched.py").write_text(LAUNCHED.format(end=end), "utf-8")
    started = program(LAUNCHES.format(before=before), SLEY_TEST_PROGRAM="0123456789abcdefghij")
    output = started.stdout.read()
    assert output.startswith(f"{expected} ['a'] child True [] True 56789abcdefghij"), output + started.stderr.read()
    assert ("ValueError: no good" in output) == ("ValueError" in end)
    assert ("a message" in output) == ("a message" in end)
    assert started.wait(20) == 0


# -- remaining processes -----------------------------------------------------------------------------------------------

ONE_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.fixture
def family():
    """Yields a process with one child and a unique mark. Both end with the test."""
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
def test_descendants_include_grandchildren(family):
    parent, _ = family
    assert len(descendants()) >= 2
    (child,) = descendants(parent.pid)
    assert child.parent == parent.pid
    assert "time.sleep(60)" in child.command
    with pytest.raises(AssertionError, match=r"left after 0\.1 s\n(.*\n)*.*time\.sleep"):
        assert_none_left(within_s=0.1)


@READS_PROC
def test_orphan_is_found_by_its_environment(family):
    parent, mark = family
    parent.kill()
    parent.wait()
    (orphan,) = processes_with("SLEY_TEST_MARK", mark)
    assert orphan.parent != parent.pid
    os.kill(orphan.pid, 9)
    assert_none_left(lambda: processes_with("SLEY_TEST_MARK", mark))

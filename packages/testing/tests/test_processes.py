"""What a test leaves behind, and who may come in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid

import pytest

from sley_testing.processes import assert_none_left, descendants, listening_sockets, processes_with

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

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


def test_descendants_are_found_to_the_last_grandchild(family):
    parent, _ = family
    assert len(descendants()) >= 2
    (child,) = descendants(parent.pid)
    assert child.parent == parent.pid
    assert "time.sleep(60)" in child.command
    with pytest.raises(AssertionError, match=r"left after 0\.1 s\n(.*\n)*.*time\.sleep"):
        assert_none_left(within_s=0.1)


def test_an_orphan_is_found_by_what_it_was_started_with(family):
    parent, mark = family
    parent.kill()
    parent.wait()
    (orphan,) = processes_with("SLEY_TEST_MARK", mark)
    assert orphan.parent != parent.pid
    os.kill(orphan.pid, 9)
    assert_none_left(lambda: processes_with("SLEY_TEST_MARK", mark))


@pytest.mark.parametrize(
    ("family_of_address", "address", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_listening_socket_is_found_and_judged(family_of_address, address, loopback):
    try:
        door = socket.create_server((address, 0), family=family_of_address)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    with door:
        found = [each for each in listening_sockets(os.getpid()) if each.port == door.getsockname()[1]]
        assert [(str(each.address), each.is_loopback) for each in found] == [(address, loopback)]
    assert all(each.port != found[0].port for each in listening_sockets(os.getpid()))

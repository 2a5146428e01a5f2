"""Finds processes that a test has left running, and listening sockets. Reads /proc, so it works only on Linux."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_PROC = Path("/proc")
_PYTHON_SERVERS = ("from multiprocessing.forkserver import", "from multiprocessing.resource_tracker import")
"""Servers of Python, which live as long as the interpreter that started them."""

MARK = "SLEY_TEST_PROGRAM"
"""The variable that names a forked program, since /proc shows the environment of its fork server."""

_LISTEN = "0A"
_PR_SET_NAME = 15
_NAME_LENGTH = 15


@dataclass(frozen=True)
class Process:
    """Describes a running process."""

    pid: int
    parent: int
    command: str


def descendants(pid: int | None = None) -> list[Process]:
    """Returns all descendants of `pid` (default: this process), except fork servers and resource trackers of Python."""
    root, everything = os.getpid() if pid is None else pid, list(_processes())
    # Forked processes show the command line of their fork server. Only the servers themselves are excluded.
    root_commands = [process.command for process in everything if process.pid == root]
    servers = {
        process.pid
        for process in everything
        if process.command not in root_commands and any(server in process.command for server in _PYTHON_SERVERS)
    }
    result: list[Process] = []
    parents = [root]
    while parents:
        children = [process for process in everything if process.parent in parents]
        result += [process for process in children if not (parents == [root] and process.pid in servers)]
        parents = [process.pid for process in children]
    return result


def processes_with(variable: str, value: str) -> list[Process]:
    """Returns every process that was started with `variable=value` in its environment, including orphans. A test sets a unique
    variable for a program and calls this function after the end of the program.
    """
    entry = f"{variable}={value}".encode()
    name = f"{value[-_NAME_LENGTH:]}\n" if variable == MARK else None
    result = []
    for process in _processes():
        folder = _PROC / str(process.pid)
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0") or (folder / "comm").read_text("utf-8") == name:
                result.append(process)
    return result


def set_process_name(env: Mapping[str, str]) -> None:
    """Names this process by the `MARK` in `env`, if any, so that `processes_with` finds it and its forks."""
    if sys.platform == "linux" and MARK in env:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, env[MARK][-_NAME_LENGTH:].encode(), 0, 0, 0)


def assert_none_left(find: Callable[[], list[Process]] = descendants, *, within_s: float = 1.0) -> None:
    """Asserts that `find()` returns no process within `within_s`; the message lists the remaining processes."""
    deadline = time.monotonic() + within_s
    while processes := find():
        lines = "\n".join(f"  {process.pid}: {process.command}" for process in processes)
        assert time.monotonic() < deadline, f"{len(processes)} processes are left after {within_s:g} s\n{lines}"
        time.sleep(0.02)


def listening_sockets(pid: int) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Returns address and port of the TCP sockets on which process `pid` listens, or none if the process has ended."""
    sockets = set()
    with suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                sockets.add(str(descriptor.readlink()))
    listeners = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / str(pid) / "net" / table).read_text("ascii").splitlines()[1:]:
                _, local, _, state, *columns = line.split()
                if state == _LISTEN and f"socket:[{columns[5]}]" in sockets:
                    # In hex: the address as 32-bit words in the byte order of the host, a colon, the port.
                    address, port = local.split(":")
                    words = (int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8))
                    listeners.append((ip_address(b"".join(words)), int(port, 16)))
    return listeners


def _processes() -> Iterator[Process]:
    """Yields all living processes of this machine, from /proc."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # "pid (name) state parent ...", where the name may contain any character, such as blanks and brackets
                state, parent, *_ = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if state not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    yield Process(int(folder.name), int(parent), command.strip())

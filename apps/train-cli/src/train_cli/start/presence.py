"""Notices ranks that die while others wait for them or build: each other rank keeps a connection to rank 0 open, which the
system closes when a process ends. Heartbeats would be late wherever code holds Python's lock for seconds.

    rank 0   Door ── port and token, in the store ──> Tether   rank n
             closed: rank n has ended                 closed: rank 0 has ended

The rank sends its name, and the door answers with one byte, since a proxy before a closed port also accepts connections, and
closes them. A host that is gone, or cut off, is found by the system's probes of idle connections. A process that a rank has
forked holds its connection too, and the rank counts as alive until that process has ended as well.
"""

from __future__ import annotations

import resource
import secrets
import socket
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector

_BACKLOG = 4096
_HELLO_BYTES = 300
_SHARE_OF_FILES = 4
"""At most this fraction (1 / 4) of the files that a process may open are connections to other ranks."""

_KNOWN = b"\x06"
"""The door's answer to a rank of its run."""

_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4}
"""Gives up a host that no longer answers after 12 s; if the system lacks these options, after its own time."""


class Door:
    """Is rank 0's end of all connections. Closed by `close`, or when it is garbage-collected. address: where others connect, a
    name or a number; "" for all networks.
    """

    def __init__(self, address: str = "") -> None:
        """Opens the port. Raises OSError if the address is not of this machine."""
        self._socket = _listening(address) if address else _listening_to_all()
        self._socket.setblocking(False)
        self.token = secrets.token_hex(16)
        self.port: int = self._socket.getsockname()[1]
        self._selector = DefaultSelector()
        self._selector.register(self._socket, EVENT_READ)
        self._heard: dict[socket.socket, bytes] = {}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = files // _SHARE_OF_FILES if files != resource.RLIM_INFINITY else sys.maxsize
        self._gone: dict[int, str] = {}
        self._finalizer = weakref.finalize(self, _close, self._selector, [self._socket], self._heard)

    def close(self) -> None:
        """Closes the port and all connections. May be called twice; `gone` is not called after it."""
        self._finalizer()

    def gone(self) -> dict[int, str]:
        """Returns the ranks that have ended, with their hosts. Does not block. Must be called by one thread at a time."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._let_in()
            else:
                assert isinstance(key.fileobj, socket.socket), key
                self._hear(key.fileobj)
        return self._gone

    def _let_in(self) -> None:
        """Accepts waiting connections while there is room. Of ranks for which there is none, the end is not noticed."""
        with suppress(OSError):  # it has left again
            while len(self._heard) < self._most:
                caller, _ = self._socket.accept()
                caller.setblocking(False)
                _probe(caller)
                self._heard[caller] = b""
                self._selector.register(caller, EVENT_READ)
                self._hear(caller)  # a rank sends its name right after it connects

    def _hear(self, caller: socket.socket) -> None:
        """Reads from a caller: answers a rank that has named itself; drops a connection that is closed or says too much, and
        records its rank as gone.
        """
        try:
            text = caller.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        self._heard[caller] += text
        who = self._named(self._heard[caller])
        if text and len(self._heard[caller]) < _HELLO_BYTES:
            if who is not None:
                with suppress(OSError):  # it has left again, which the next call notices
                    caller.send(_KNOWN)
            return
        self._selector.unregister(caller)
        del self._heard[caller]
        caller.close()
        if who is not None:
            rank, host = who
            self._gone[rank] = host

    def _named(self, heard: bytes) -> tuple[int, str] | None:
        """Returns rank and host of a caller whose name is complete and whose token is right; else None."""
        token, _, who = heard.decode("utf-8", "replace").partition(" ")
        rank, _, host = who.partition(" ")
        is_known = token == self.token and rank.isdecimal() and host.endswith("\n")
        return (int(rank), host.strip()) if is_known else None


class Tether:
    """Is another rank's end of its connection to rank 0. Closed by `close`, or when it is garbage-collected."""

    def __init__(self, address: str, port: int, who: str, timeout_s: float) -> None:
        """Connects. who: the door's token, the rank and its host. Raises OSError, for example behind a firewall."""
        self._socket = socket.create_connection((address, port), timeout=timeout_s)
        self._finalizer = weakref.finalize(self, self._socket.close)
        _probe(self._socket)
        self._socket.sendall(f"{who}\n".encode())
        self._socket.setblocking(False)
        self._is_known = False

    def close(self) -> None:
        """Closes the connection. May be called twice; `is_cut` must not be read after it."""
        self._finalizer()

    @property
    def is_cut(self) -> bool:
        """Whether the connection is closed, i.e. rank 0 has ended; False before the door has answered. Does not block."""
        try:
            while text := self._socket.recv(1):
                self._is_known = self._is_known or text == _KNOWN
        except BlockingIOError:
            return False
        except OSError:
            pass
        return self._is_known


def _listening_to_all() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _listening(address: str) -> socket.socket:
    """Returns a listening socket at the first address to which `address` resolves and that can be bound: callers try them in
    the same order.
    """
    failure: OSError | None = None
    for family, _, _, _, found in socket.getaddrinfo(address, 0, 0, socket.SOCK_STREAM):
        try:
            return socket.create_server((str(found[0]), 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            failure = error
    raise failure or OSError(f"{address} leads nowhere")


def _probe(connection: socket.socket) -> None:
    """Turns on the system's keep-alive probes, which find out whether the other host still answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close(selector: DefaultSelector, *every: Iterable[socket.socket]) -> None:
    """Closes the selector and all sockets."""
    selector.close()
    for sockets in every:
        for one in sockets:
            one.close()

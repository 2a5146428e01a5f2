"""Connects a process to the store in which all ranks of a run meet, at the address that its launcher names.

What can be known at once is reported at once: a name that cannot be resolved, a port that another program uses. What may still
come is waited for: a port that refuses, a host that does not answer, a listener that closes connections.
"""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from errno import ECONNRESET

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch exports them

from sley_core.comm.guard import first_line
from sley_core.errors import RunError

CODE = "preflight"
"""The code of a start that is refused."""

PATIENCE_S = 8.0
"""Seconds for what is there at once or not at all: a name, a free port, a store's answer, another process of this machine."""

_PAUSE_S = 0.3
"""Seconds between two tries."""

_STAYS_S = 0.1
"""Seconds for which a real listener must keep a connection open."""


@dataclass(frozen=True)
class Reached:
    """Holds a store. is_held: whether this process serves it. address: of rank 0's host. is_local: whether only this machine
    can reach that. timeout_s: for other ranks to come.
    """

    store: Store
    is_held: bool
    address: str
    is_local: bool
    timeout_s: float


def reach(environ: Mapping[str, str], timeout_s: float) -> Reached:
    """Returns the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves unless a launcher's agent does. Blocks until it is
    there.

    Raises RunError "preflight", with this host and a remedy: within about PATIENCE_S if the name cannot be resolved, the port
    is taken, or something else answers; after `timeout_s` if nobody answers.
    """
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        hint = "a launcher sets them alike on all hosts: rank 0's host, and a port that is free there"
        raise refused(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}", hint)
    is_local = _is_loopback(address)
    if is_local and int(environ.get("LOCAL_WORLD_SIZE", size)) < size:
        timeout_s = min(timeout_s, PATIENCE_S)  # a loopback address for several hosts: waiting is in vain
    if rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return Reached(_held(address, int(port), size), True, address, is_local, timeout_s)
    return Reached(_joined(address, int(port), size, timeout_s), False, address, is_local, timeout_s)


def refused(what: str, hint: str) -> RunError:
    """Returns RunError "preflight", with the name of this host before `what`."""
    return RunError(CODE, f"on {platform.node()}: {what}", hint=hint)


def _is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach `address`. Raises RunError "preflight" if the name is not resolved within
    PATIENCE_S.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
        except OSError as error:
            if time.monotonic() > until:
                hint = "MASTER_ADDR must be a name or address of rank 0's host that all hosts know"
                raise refused(f"the name `{address}` cannot be resolved: {error.strerror or error}", hint) from error
            time.sleep(_PAUSE_S)  # names of pods are known a little after the pods start
        else:
            return all(one == "::1" or one.startswith("127.") for one in found)


def _held(address: str, port: int, size: int) -> Store:
    """Starts the store and returns it. Raises RunError "preflight" if another program keeps the port for PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while True:
        store, why = _tried(address, port, size, is_held=True)
        if store is not None:
            return store
        if why is None or time.monotonic() > until:
            hint = "choose another MASTER_PORT; `ss -ltnp` on that host tells who has it"
            raise refused(f"port {port} cannot be had: {why or 'it does not answer'}", hint)
        time.sleep(_PAUSE_S)  # the store of a run that has just ended may still hold the port


def _joined(address: str, port: int, size: int, timeout_s: float) -> Store:
    """Connects to the store as soon as it is there. Raises RunError "preflight" after `timeout_s`; sooner if another program
    answers.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            _knock(address, port)
        except OSError as error:
            what, hint = (
                f"nobody answers at {address}:{port} after {timeout_s:g} s: {error.strerror or error}",
                ("MASTER_ADDR must be rank 0's host, on all hosts, and not localhost; is it up, and the port open?"),
            )
        else:
            store, why = _tried(address, port, size, is_held=False)
            if store is not None:
                return store
            hint = "choose another MASTER_PORT: another program has this one"
            what = f"what listens at {address}:{port} is no meeting of ranks: {why or 'it does not answer'}"
            if why is None:
                raise refused(what, hint)
        if time.monotonic() > until:
            raise refused(what, hint)
        time.sleep(_PAUSE_S)


def _knock(address: str, port: int) -> None:
    """Returns if something listens there and keeps connections open; raises OSError if not.

    torch's own connecting cannot be interrupted by a signal, and prints its stack each time that the connection is closed, as
    by a proxy whose host is not there yet.
    """
    with socket.create_connection((address, port), timeout=PATIENCE_S) as caller:
        caller.settimeout(_STAYS_S)
        with suppress(TimeoutError):
            if not caller.recv(1):
                raise ConnectionResetError(ECONNRESET, "it closes connections at once")


def _tried(address: str, port: int, size: int, *, is_held: bool) -> tuple[Store | None, str | None]:
    """Tries once to serve or join the store; returns it, or the reason, None if the listener did not answer within
    PATIENCE_S.
    """
    made: list[Store] = []
    failed: list[str] = []

    def make() -> None:
        limit = timedelta(seconds=PATIENCE_S / 2)
        try:
            made.append(TCPStore(address, port, size, is_held, limit, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            failed.append(first_line(error))

    # In a thread: torch waits without a limit for the answer of a program that listens there and says nothing.
    thread = threading.Thread(target=make, name="sley-meeting", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return (made[0] if made else None), (failed[0] if failed else None)

"""The rendezvous of ranks that torchrun, SLURM or another engine has started: in the store at MASTER_ADDR they compare plan and
versions before they wait for one another anywhere else, and all ranks start or none does.

    rank 0      facts ──> "first"                  all ranks have come, or the time is over ──> "verdict" ──> all ranks
    rank n      compares its own with "first" ──> "rank n", or, if it differs or cannot begin, "verdict"

The first verdict counts. A rank that dies without a word is missing when the time limit is over, and is named then, with the
hosts that did come; its own launcher usually ends the others long before.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch exports them

from sley_core.comm import startup
from sley_core.comm.collectives import differing
from sley_core.comm.guard import first_line
from sley_core.errors import RunError, SleyError
from train_cli.preflight import PREFLIGHT

PATIENCE_S = 8.0
"""Seconds for what is there at once or not at all: a name, a free port, the store's answer, other processes of this machine."""

STRAGGLERS_S = 10.0
BUILDERS_S = 60.0
"""Seconds for which rank 0 keeps its store so that others can read why none starts: ranks that are on their way, or that
build.
"""

_POLL_S, _MAX_POLL_S, _RETRY_S = 0.02, 0.3, 0.3

Verdict = dict[str, Any]
"""{} if all ranks have come and agree; else `message` and `hint`."""

CAME = (
    "did not come",
    "start all hosts, with a MASTER_ADDR that all reach, not localhost; [limits] start_timeout_s waits longer",
)
BUILT = (
    "had not opened their data and built their model",
    "see what these do there, such as reading from a slow disk; [limits] collective_timeout_s waits longer",
)
"""What ranks that do not answer have failed to do, and the hint."""


@dataclass
class Rendezvous:
    """Represents one rank at the rendezvous.

    timeout_s: for ranks that have not come. ends_store: whether the store may end soon after this process. job: the launcher's
    name for this run, which tells it from another at the same port. num_rounds: how often all ranks have agreed.
    """

    rank: int
    size: int
    store: Store
    timeout_s: float
    ends_store: bool = False
    job: str = ""
    num_rounds: int = 0
    host: str = field(default_factory=platform.node)

    @classmethod
    def at(cls, environ: Mapping[str, str], *, timeout_s: float) -> Rendezvous:
        """Returns this rank's rendezvous in the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves unless torchrun's
        agent does. Blocks until the store is there.

        Raises RunError "preflight", with this host and a hint: within about PATIENCE_S if the name cannot be resolved or the
        port is taken, twice that if a program says nothing there; after `timeout_s` if nobody answers. All ranks call it
        equally often.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            hint = "a launcher sets them alike on all hosts: rank 0's host, and a port that is free there"
            raise _refused(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}", hint)
        if _is_loopback(address) and int(environ.get("LOCAL_WORLD_SIZE", size)) < size:
            timeout_s = min(timeout_s, PATIENCE_S)  # a loopback address for several hosts: waiting is in vain
        serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _open_store(address, int(port), size, timeout_s, serves=serves)
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        # One of several torchrun agents ends, with its store, when one of its ranks has ended.
        ends_store = rank == 0 and (serves or not startup.is_one_host(environ))
        own = startup.fresh(store, environ, "rendezvous")
        return cls(rank, size, own, timeout_s, ends_store, f"{job} of {size} ranks")

    def agree(self, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `facts` of all ranks with those of rank 0; returns when all ranks have come and agree.

        parts: by name of a fact, its parts by name, so that the part that differs is named. Raises RunError "preflight" on all
        ranks alike, with the rank that differs, its host, its value, and a hint.
        """
        if self.rank == 0:
            first = self._self | {"facts": {**facts}, "parts": {**parts}}
            if self._claim("first", first) is not None:
                raise _used_before()
        else:
            first = self._first()
            if self._find("verdict") == {}:
                raise _used_before()
            self._answer(self._difference(first, facts, parts) if "facts" in first else {})
        self._finish(CAME, self.timeout_s)

    @contextmanager
    def all_or_none(self, timeout_s: float) -> Iterator[None]:
        """Returns a context manager whose end all ranks pass, or none: if the block raises on any rank, that one raises its own
        error, and the others RunError "preflight".

        timeout_s: for ranks that are still in the block when this one has left it.
        """
        try:
            yield
        except Exception as error:
            diagnostic = error.diagnostics[0] if isinstance(error, SleyError) else None
            self.give_up(
                diagnostic.message if diagnostic else f"{type(error).__name__}: {first_line(error)}",
                diagnostic.hint if diagnostic else None,
            )
            raise
        if self.rank:
            self._answer({})
        self._finish(BUILT, timeout_s)

    def give_up(self, reason: str, hint: str | None) -> None:
        """Tells all ranks why this one does not begin; rank 0 returns when they know, or after a time limit."""
        try:
            if self.rank == 0 and not self.num_rounds:
                self._claim("first", self._self)
            elif not self.num_rounds:
                self._first()
            message = f"rank {self.rank} on {self.host} cannot begin: {reason}"
            self._claim("verdict", {"message": message, "hint": hint})
            self._leave(self.size - 1)
        except RunError:
            return  # nobody is there, or another run

    @property
    def _self(self) -> dict[str, Any]:
        """The fields by which others know this process."""
        return {"host": self.host, "job": self.job, "process": f"{os.getpid()} {id(self)}"}

    def _first(self) -> dict[str, Any]:
        """Waits for the facts of rank 0. Raises RunError "preflight" if they are of another run, or do not come."""
        first = self._await("first", "rank 0", self.timeout_s)
        if first["job"] != self.job:
            hint = "give each of the runs that share a host a MASTER_PORT of its own, and all ranks of one run the same"
            raise _refused(f"another run meets at this port (job {first['job']}, on {first['host']})", hint)
        return first

    def _difference(self, first: dict[str, Any], facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> Verdict:
        """Returns the verdict if this rank differs from rank 0, else {}."""
        here, there = f"rank {self.rank} on {self.host}", f"rank 0 on {first['host']}"
        if self.rank >= self.size:
            message = f"a process on {self.host} says that it is rank {self.rank} of {self.size}"
            return {
                "message": message,
                "hint": "ranks count from 0: RANK must be below WORLD_SIZE, and another one in each process",
            }
        for name, value in facts.items():
            other = first["facts"].get(name, "none")
            if value != other:
                message = f"{here} has {name} {value}, {there} has {other}"
                if name in parts and (pieces := differing(parts[name], first["parts"][name])):
                    message = f"{here} has another {name.removeprefix('the ')} than {there}: {pieces}"
                return {"message": message, "hint": "install the same versions and give the same plan on every host"}
        return {}

    def _answer(self, verdict: Verdict) -> None:
        """Adds this rank to those that have come, or writes `verdict`, if there is one or another process is this rank too."""
        other = self._claim(f"rank {self.rank}", self._self)
        if other is not None and not verdict:
            message = f"two processes, on {other['host']} and {self.host}, say that they are rank {self.rank}"
            hint = "RANK must be another number in each process; torchrun's --node-rank on each host"
            verdict = {"message": message, "hint": hint}
        if verdict:
            self._claim("verdict", verdict)
        else:
            self._add("come")

    def _finish(self, occasion: tuple[str, str], timeout_s: float) -> None:
        """Ends a round: waits for the verdict, which rank 0 writes when all have come or the time is over, and raises RunError
        "preflight" if it names a failure.
        """
        num_readers = self.size - 1
        if self.rank == 0:
            for _ in _looks(timeout_s):
                if self._find("verdict") is not None or self._add("come", 0) == self.size - 1:
                    self._claim("verdict", {})
                    break
            else:
                self._claim("verdict", self._missing(occasion, timeout_s))
                num_readers = self._add("come", 0)
        # Rank 0, which may have come a little later, names missing ranks after its own limit.
        verdict = self._await("verdict", "rank 0 to hear of all ranks", timeout_s + PATIENCE_S)
        if verdict:
            self._leave(num_readers)
            raise RunError(PREFLIGHT, verdict["message"], hint=verdict.get("hint"))
        self.num_rounds += 1

    def _leave(self, num_readers: int) -> None:
        """Notes that this rank knows of a failure. Rank 0 keeps the store, if that ends with this process, until so many others
        do.
        """
        if self.rank != 0:
            self._add("readers")
        elif self.ends_store:
            for _ in _looks(BUILDERS_S if self.num_rounds else STRAGGLERS_S):
                if self._add("readers", 0) >= num_readers:
                    break

    def _missing(self, occasion: tuple[str, str], timeout_s: float) -> Verdict:
        hosts = {rank: card["host"] for rank in range(1, self.size) if (card := self._find(f"rank {rank}")) is not None}
        hosts[0] = self.host
        absent = [rank for rank in range(self.size) if rank not in hosts]
        names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        message = f"of {self.size} ranks these {occasion[0]} within {timeout_s:g} s: {names}"
        return {"message": f"{message} (hosts that did: {', '.join(sorted(set(hosts.values())))})", "hint": occasion[1]}

    def _await(self, key: str, what: str, timeout_s: float) -> dict[str, Any]:
        for _ in _looks(timeout_s):
            if (value := self._find(key)) is not None:
                return value
        raise _refused(f"rank {self.rank} waited in vain for {what}", _OTHERS_HINT)

    def _find(self, key: str) -> dict[str, Any] | None:
        """Returns the value that a rank has written under `key` in this round; None if none has."""
        name = f"{self.num_rounds} {key}"
        with self._in_store():
            value: dict[str, Any] | None = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return value

    def _claim(self, key: str, value: Mapping[str, Any]) -> dict[str, Any] | None:
        """Writes `value` under `key` and returns None; if there is another value already, that stays and is returned."""
        text = json.dumps(value)
        with self._in_store():
            stored = self.store.compare_set(f"{self.num_rounds} {key}", "", text).decode()
        return None if stored == text else json.loads(stored)

    def _add(self, key: str, amount: int = 1) -> int:
        with self._in_store():
            return int(self.store.add(f"{self.num_rounds} {key}", amount))

    @contextmanager
    def _in_store(self) -> Iterator[None]:
        """Turns torch's error into RunError "preflight": the process that serves the store has ended."""
        try:
            yield
        except RuntimeError as error:
            raise _refused(f"rank {self.rank} has lost the others: {first_line(error)}", _OTHERS_HINT) from error


_OTHERS_HINT = "what rank 0 printed, or its launcher, says why"


def _refused(message: str, hint: str) -> RunError:
    return RunError(PREFLIGHT, f"on {platform.node()}: {message}", hint=hint)


def _used_before() -> RunError:
    hint = "torchrun's agents keep their store over restarts: give `--max-restarts=0` on several hosts, and submit again"
    return _refused("the ranks of this run have met before, and their launcher has kept what they said", hint)


def _looks(timeout_s: float) -> Iterator[None]:
    """Yields now, and then at growing intervals until `timeout_s` are over: `store.wait` blocks in C, where no signal is
    handled.
    """
    until, pause_s = time.monotonic() + timeout_s, _POLL_S
    yield
    while time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
        yield


def _is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach `address`. Raises RunError "preflight" if the name is not resolved within
    PATIENCE_S: names of pods are known a little after the pods start.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
            return all(ip == "::1" or ip.startswith("127.") for ip in addresses)
        except OSError as error:
            if time.monotonic() > until:
                hint = "MASTER_ADDR must be a name or address of rank 0's host that all hosts know"
                raise _refused(f"the name `{address}` cannot be resolved: {error.strerror or error}", hint) from error
            time.sleep(_RETRY_S)


def _open_store(address: str, port: int, size: int, timeout_s: float, *, serves: bool) -> Store:
    """Serves the store, or connects to it as soon as it is there; raises RunError "preflight" as `Rendezvous.at` describes."""
    until = time.monotonic() + (PATIENCE_S if serves else timeout_s)  # an earlier run's store may still hold the port
    num_silent = 0
    while True:
        answers = serves
        try:
            if not serves:  # first, as torch's own connecting hears no signal
                socket.create_connection((address, port), timeout=PATIENCE_S).close()
                answers = True
            return _tcp_store(address, port, size, serves)
        except (OSError, RuntimeError) as error:
            why = first_line(error)
            # Once may be torch's own retry, with a trace of C++ frames, after a listener that has closed: 12 s at a limit of 4.
            num_silent += isinstance(error, _SilentError)
            if time.monotonic() > until or num_silent == 2:
                break
        time.sleep(_RETRY_S)
    if serves:
        raise _refused(
            f"port {port} cannot be had: {why}", "choose another MASTER_PORT; `ss -ltnp` on that host tells who has it"
        )
    if answers:
        hint = "choose another MASTER_PORT: another program has this one"
        raise _refused(f"what listens at {address}:{port} is no store of ranks: {why}", hint)
    hint = "MASTER_ADDR must be rank 0's host, on all hosts, and not localhost; is it up, and the port open?"
    raise _refused(f"nobody answers at {address}:{port} after {timeout_s:g} s: {why}", hint)


class _SilentError(RuntimeError):
    """Raised if a program listens at the port and says nothing."""


def _tcp_store(address: str, port: int, size: int, serves: bool) -> Store:
    """Makes the store in a thread, since torch waits without a limit for the answer of a program that says nothing."""
    outcomes: list[Store | RuntimeError] = []

    def make() -> None:
        limit = timedelta(seconds=PATIENCE_S / 2)
        try:
            outcomes.append(TCPStore(address, port, size, serves, limit, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            outcomes.append(error)

    thread = threading.Thread(target=make, name="sley-store", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not outcomes:
        raise _SilentError("it does not answer")
    if isinstance(outcomes[0], RuntimeError):
        raise outcomes[0]
    return outcomes[0]

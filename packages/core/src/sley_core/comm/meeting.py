"""Where the processes of a run meet, before they wait for one another in anything else: the store of their launcher, and a roll
call in it, by which all ranks start or none does.

    rank 0      its facts ──────> first ──┐                                 verdict ──> all ranks
    rank n      reads them, compares, and adds itself to the list ──> rank 0 reads the list as it grows

Whoever could not even begin (no plan there, a broken plugin) adds itself too, with its reason. So a host that differs is named
within seconds on all hosts, and nobody waits for a rank that has given up. Rank 0 reads one line per rank, and each rank the
facts of one.
"""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch exports them

from sley_core.comm.agree import differing
from sley_core.comm.guard import first_line
from sley_core.errors import RunError, SleyError

PATIENCE_S = 8.0
"""For what is there at once or not at all: a name, a free port, a store that answers, another process of this machine."""

LINGER_S = 2.0
"""For others to read why nobody starts, where the store ends with this process."""

_POLL_S, _MOST_POLL_S = 0.02, 0.3
"""Between two looks: at first, and while a host takes long, so that thousands of ranks do not keep the store busy."""

_OTHERS_HINT = "what rank 0 printed, or its launcher, says why"
_FIRST, _COUNT, _LINE, _VERDICT = "first", "lines", "line {}", "verdict"
CODE = "preflight"


@dataclass
class Meeting:
    """One rank at the meeting. timeout_s: for ranks that have not come. is_held: whether this process holds the store, which
    ends with it. job: what tells this run from another that uses the same port, where the launcher has a name for it.
    num_calls: roll calls that all ranks have answered.
    """

    rank: int
    size: int
    store: Store
    timeout_s: float
    is_held: bool = False
    job: str = ""
    num_calls: int = 0
    host: str = field(default_factory=platform.node)

    @classmethod
    def at(cls, environ: Mapping[str, str], *, timeout_s: float) -> Meeting:
        """Returns this rank's place at the meeting that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        Blocks until rank 0 is there.

        Raises RunError "preflight", with this host and a remedy, if the name cannot be resolved, the port is taken, or nobody
        answers there: within PATIENCE_S, or `timeout_s` where rank 0 may still come.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            hint = "a launcher sets them alike on all hosts: rank 0's host, and a port that is free there"
            raise _refused(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}", hint)
        is_alone = _is_loopback(address)
        if is_alone and int(environ.get("LOCAL_WORLD_SIZE", size)) < size:
            timeout_s = min(timeout_s, PATIENCE_S)  # of several hosts each would wait for itself
        is_held = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_held:
            _await(address, int(port), timeout_s)
        store = _store(address, int(port), size, is_held)
        # torchrun on one host starts ranks again with the store that they had.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if environ.get("GROUP_WORLD_SIZE", "1") == "1" else "0"
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        return cls(rank, size, PrefixStore(f"roll call {attempt}", store), timeout_s, is_held, job)

    def agree(self, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `facts` of all ranks with those of rank 0; returns when all ranks have come and agree.

        parts: of a fact, what it is made of, to name the piece that differs. Raises RunError "preflight" on all ranks alike,
        with the rank, its host, what it has, and a remedy.
        """
        if self.rank == 0:
            self._set(_FIRST, {"host": self.host, "job": self._job, "facts": dict(facts), "parts": {**parts}})
            self._conclude(self._collected())
        else:
            self._add(self._difference(facts, parts))
            # rank 0, which may have come a little later, says after its own limit who is missing
            self._conclude(self._get(_VERDICT, "rank 0 to hear of all ranks", self.timeout_s + PATIENCE_S))

    @contextmanager
    def all_or_none(self, timeout_s: float) -> Iterator[None]:
        """Goes on behind the block when all ranks have left it; if it raises on any, raises on all: there its own error, on the
        others RunError "preflight". timeout_s: for ranks that are still in it.
        """
        self.timeout_s = timeout_s
        try:
            yield
        except Exception as error:
            found = error.diagnostics[0] if isinstance(error, SleyError) else None
            reason = found.message if found else f"{type(error).__name__}: {first_line(error)}"
            self.give_up(reason, found.hint if found else None)
            raise
        self.agree({}, {})

    def give_up(self, reason: str, hint: str | None) -> None:
        """Tells all ranks why this one does not begin; returns when they know, or after a while. reason: a message."""
        told = {"message": f"rank {self.rank} on {self.host} cannot begin: {reason}", "hint": hint}
        try:
            if self.rank == 0:
                self._set(_FIRST, {"host": self.host, "job": self._job, "failed": told})
                self._set(_VERDICT, told)
                self._linger()
            elif self.num_calls or self._get(_FIRST, "rank 0")["job"] == self._job:  # else it is another run's list
                self._add(told)
                self._get(_VERDICT, "rank 0", PATIENCE_S)
        except RunError:
            return  # nobody is there to be told

    @property
    def _job(self) -> str:
        return f"{self.job} of {self.size} ranks"

    def _difference(self, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Returns what is to be told of this rank: nothing, or in what it differs from rank 0."""
        first = self._get(_FIRST, "rank 0")
        if first["job"] != self._job:  # no line in its list: that run is none of ours
            hint = "give each of the runs that share a host a MASTER_PORT of its own, and all ranks of one run the same"
            raise _refused(f"another run meets at this port (job {first['job']}, on {first['host']})", hint)
        if "failed" in first:
            return {}
        if self.rank >= self.size:
            who = f"a process on {self.host} says that it is rank {self.rank} of {self.size}"
            return {
                "message": who,
                "hint": "ranks count from 0: RANK must be below WORLD_SIZE, and another one in each process",
            }
        theirs = first["facts"]
        name = next((one for one in facts if facts[one] != theirs.get(one)), None)
        if name is None:
            return {}
        here, there = f"rank {self.rank} on {self.host}", f"rank 0 on {first['host']}"
        if name in parts and (pieces := differing(parts[name], first["parts"][name])):
            message = f"{here} has another {name.removeprefix('the ')} than {there}: {pieces}"
        else:
            message = f"{here} has {name} {facts[name]}, {there} has {theirs.get(name, 'none')}"
        return {"message": message, "hint": "install the same versions and give the same plan on every host"}

    def _collected(self) -> dict[str, Any]:
        """Reads the list of ranks as it grows and returns the verdict: nothing if all came and agree."""
        hosts = {0: self.host}
        begun = time.monotonic()
        for number in range(1, self.size):
            try:
                line = self._get(_LINE.format(number), "the next rank", self.timeout_s - (time.monotonic() - begun))
            except RunError:
                return self._missing(hosts)
            if line["rank"] in hosts:
                who = f"{hosts[line['rank']]} and {line['host']}"
                hint = "RANK must be another number in each process; torchrun's --node-rank on each host"
                return {"message": f"two processes, on {who}, say that they are rank {line['rank']}", "hint": hint}
            if "message" in line:
                return dict(line)
            hosts[line["rank"]] = line["host"]
        return {}

    def _missing(self, hosts: Mapping[int, str]) -> dict[str, Any]:
        absent = [rank for rank in range(self.size) if rank not in hosts]
        named = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        came = ", ".join(sorted(set(hosts.values())))
        message = (
            f"of {self.size} ranks these did not come within {self.timeout_s:.0f} s: {named} (hosts that did: {came})"
        )
        hint = (
            "start all hosts, with a MASTER_ADDR that all reach, not localhost; [limits] start_timeout_s waits longer"
        )
        return {"message": message, "hint": hint}

    def _conclude(self, verdict: Mapping[str, Any]) -> None:
        """Raises what the verdict says, if anything; on rank 0 after all have been told."""
        if self.rank == 0:
            self._set(_VERDICT, verdict)
        if verdict:
            self._linger()
            raise RunError(CODE, verdict["message"], hint=verdict.get("hint"))
        self.num_calls += 1

    def _linger(self) -> None:
        """Keeps the store for a moment, where it would end with this process before others have read it."""
        if self.is_held:
            time.sleep(LINGER_S)

    def _add(self, told: Mapping[str, Any]) -> None:
        with self._in_store():
            number = self.store.add(f"{self.num_calls} {_COUNT}", 1)
        self._set(_LINE.format(number), {"rank": self.rank, "host": self.host, **told})

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        with self._in_store():
            self.store.set(f"{self.num_calls} {key}", json.dumps(value))

    def _get(self, key: str, what: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Returns what some rank sets under `key`, when it does. Raises RunError if that takes longer than `timeout_s`."""
        until = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        pause_s = _POLL_S
        name = f"{self.num_calls} {key}"
        with self._in_store():
            # Not `store.wait`: it blocks in torch, where a signal to end is not heard.
            while not self.store.check([name]):
                if time.monotonic() > until:
                    raise _refused(f"rank {self.rank} waited in vain for {what}", _OTHERS_HINT)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
            found: dict[str, Any] = json.loads(self.store.get(name))
        return found

    @contextmanager
    def _in_store(self) -> Iterator[None]:
        """Turns torch's error into RunError "preflight": whoever holds the store has ended."""
        try:
            yield
        except RuntimeError as error:
            raise _refused(f"rank {self.rank} has lost the others: {first_line(error)}", _OTHERS_HINT) from error


def _is_loopback(address: str) -> bool:
    """Returns whether `address` is this machine's alone. Raises RunError "preflight" if no such name is found in PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
        except OSError as error:
            if time.monotonic() > until:
                hint = "MASTER_ADDR must be a name or address of rank 0's host that all hosts know"
                raise _refused(f"the name `{address}` cannot be resolved: {error.strerror or error}", hint) from error
            time.sleep(_MOST_POLL_S)  # names of pods come a little after them
        else:
            return all(one == "::1" or one.startswith("127.") for one in found)


def _await(address: str, port: int, timeout_s: float) -> None:
    """Waits until something listens there. Raises RunError "preflight" after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=PATIENCE_S).close()
        except OSError as error:
            if time.monotonic() > until:
                why = error.strerror or str(error)
                hint = (
                    "MASTER_ADDR must be rank 0's host, on all hosts, and not localhost; is it up, and the port open?"
                )
                raise _refused(f"nobody answers at {address}:{port} after {timeout_s:.0f} s: {why}", hint) from error
            time.sleep(_MOST_POLL_S)
        else:
            return


def _store(address: str, port: int, size: int, is_held: bool) -> Store:
    """Returns the store there, held by this process if `is_held`. Raises RunError "preflight" for a port that something else
    has, of this host or of that one.
    """
    made: list[Store] = []
    failed: list[str] = []

    def make() -> None:
        limit = timedelta(seconds=PATIENCE_S)
        try:
            made.append(TCPStore(address, port, size, is_held, limit, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            failed.append(first_line(error))

    # In a thread: torch waits without a limit for the answer of a program that listens there and says nothing.
    thread = threading.Thread(target=make, name="sley-meeting", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if made:
        return made[0]
    why = failed[0] if failed else "it does not answer"
    if is_held:
        hint = "choose another MASTER_PORT; `ss -ltnp` on that host tells who has it"
        raise _refused(f"port {port} cannot be had: {why}", hint)
    hint = "choose another MASTER_PORT: another program has this one"
    raise _refused(f"what listens at {address}:{port} is no meeting of ranks: {why}", hint)


def _refused(what: str, hint: str) -> RunError:
    return RunError(CODE, f"on {platform.node()}: {what}", hint=hint)

"""The rendezvous of ranks that torchrun, SLURM or another launcher has started. Before the ranks wait for each other in a
collective, they compare their plans and versions in the store at MASTER_ADDR. All ranks start, or none does.

    rank 0      info ──> "first"                   all ranks have arrived, or the time is over ──> "verdict" ──> all ranks
    rank n      compares its info with "first" ──> "rank n", or, if it differs or cannot start, "verdict"

Only the first verdict counts. When the time limit is over, the verdict lists the missing ranks and the hosts that have arrived.
"""

import json
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch exports them

from sley_core.comm.exchanges import first_line
from sley_core.comm.world import is_single_host, make_prefix_store
from sley_core.engine.agreement import describe_differences
from sley_core.errors import Diagnostic, RunError, shorten_names
from train_cli.faults import Fault
from train_cli.preflight import PREFLIGHT

RESPONSE_TIMEOUT_S = 8.0
"""The time limit, in seconds, of operations that fail for good if they take longer: resolving a name, opening a port, and an
answer of the store.
"""

ARRIVAL_GRACE_S = 10.0
BUILD_GRACE_S = 60.0
"""Seconds for which rank 0 keeps its store after a failure, so that the other ranks can read the reason: those that are still
arriving (`ARRIVAL_GRACE_S`), or building their model (`BUILD_GRACE_S`).
"""

_POLL_S, _MAX_POLL_S, _RETRY_S = 0.02, 0.3, 0.3

Verdict = dict[str, Any]
"""{} if all ranks have arrived and agree; else `message` and `hint`."""

_ARRIVAL_TEXTS = (
    "did not connect",
    "start all hosts, with a MASTER_ADDR that all can reach, not localhost; raise [limits] start_timeout_s to wait longer",
)
_BUILD_TEXTS = (
    "did not open their data and build their model",
    "check whether they read from a slow disk, for example; raise [limits] collective_timeout_s to wait longer",
)
"""For each of the two rounds, the part of a message that says what the missing ranks did not do, and the hint."""


@dataclass
class Rendezvous:
    """One rank at the rendezvous.

    timeout_s: the time limit of a wait for ranks. ends_store: whether the store may end soon after this process. job: the
    launcher's name for this run, which distinguishes runs that use the same port. num_rounds: the number of completed rounds,
    in each of which all ranks have agreed. process: a random id, which a restarted rank does not use again.
    """

    rank: int
    size: int
    store: Store
    timeout_s: float
    ends_store: bool = False
    job: str = ""
    num_rounds: int = 0
    host: str = field(default_factory=platform.node)
    process: str = field(default_factory=partial(token_hex, 8))

    @classmethod
    def join(cls, environ: Mapping[str, str], *, timeout_s: float) -> "Rendezvous":
        """Returns this rank's rendezvous in the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves unless torchrun's
        agent does. Blocks until the store exists. All ranks must call it the same number of times.

        Raises RunError "preflight" with this host and a hint: after about RESPONSE_TIMEOUT_S if the name cannot be resolved or
        the port is in use, after twice that if a program at the port is silent, and after `timeout_s` if nothing listens.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            hint = "set both to the same values on all hosts, the host of rank 0 and a free port on it"
            raise _preflight_error(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}", hint)
        if _is_loopback(address) and int(environ.get("LOCAL_WORLD_SIZE", size)) < size:
            timeout_s = min(timeout_s, RESPONSE_TIMEOUT_S)  # a loopback address cannot connect several hosts
        serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _open_store(address, int(port), size, timeout_s, serves=serves)
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        # With several torchrun agents, an agent ends, with its store, when one of its ranks has ended.
        ends_store = rank == 0 and (serves or not is_single_host(environ))
        keys = make_prefix_store(store, environ, "rendezvous")
        return cls(rank, size, keys, timeout_s, ends_store, f"{job} of {size} ranks")

    def agree(self, info: Mapping[str, str], details: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `info`, values by name, with that of rank 0. Returns when all ranks have arrived and agree.

        details: for some names in `info`, the parts of that value by name, so that messages show only those that differ. Raises
        RunError "preflight" on all ranks, with the rank that differs, its host, its value and a hint.
        """
        if self.rank == 0:
            first = self._identity | {"info": {**info}, "details": {**details}}
            if self._write_once("first", first) is not None:
                raise _reused_store_error()
        else:
            first = self._read_rank_0()
            if self._read_key("verdict") == {}:
                raise _reused_store_error()
            self._record_arrival(self._compare(first, info, details) if "info" in first else {})
        self._end_round(_ARRIVAL_TEXTS, self.timeout_s)

    @contextmanager
    def all_or_none(self, timeout_s: float) -> Iterator[None]:
        """Returns a context manager that all ranks leave together. If the block raises on a rank, that rank raises its error,
        and the others raise RunError "preflight". timeout_s: the time limit of the wait at the end of the block.
        """
        try:
            yield
        except Exception as error:
            self.report_failure(Fault.from_error(error).diagnostics[0])
            raise
        if self.rank:
            self._record_arrival({})
        self._end_round(_BUILD_TEXTS, timeout_s)

    def report_failure(self, diagnostic: Diagnostic) -> None:
        """Tells all ranks why this rank cannot start. Rank 0 waits until they have read the reason, or until a time limit."""
        try:
            if self.rank == 0 and not self.num_rounds:
                self._write_once("first", self._identity)
            elif not self.num_rounds:
                self._read_rank_0()
            location = f"{diagnostic.place}: " if diagnostic.place else ""
            message = f"rank {self.rank} on {self.host} cannot start: {location}{diagnostic.message}"
            self._write_once("verdict", {"message": message, "hint": diagnostic.hint})
            self._acknowledge_failure(self.size - 1)
        except RunError:
            return  # there is no store, or it belongs to another run

    @property
    def _identity(self) -> dict[str, Any]:
        """The fields that identify this process to other ranks."""
        return {"host": self.host, "job": self.job, "process": self.process}

    def _read_rank_0(self) -> dict[str, Any]:
        """Waits for the info of rank 0. Raises RunError "preflight" if the info belongs to another run, or does not arrive."""
        first = self._wait_for("first", "rank 0", self.timeout_s)
        if first["job"] != self.job:
            hint = "set a different MASTER_PORT for each run on a host, and the same one on all ranks of a run"
            raise _preflight_error(f"another run uses this port (job {first['job']}, on {first['host']})", hint)
        return first

    def _compare(self, first: dict[str, Any], info: Mapping[str, str], details: Mapping[str, Mapping[str, str]]) -> Verdict:
        """Returns a verdict that names the first difference from rank 0, or {} if there is none. first: the info of rank 0."""
        rank, rank_0 = f"rank {self.rank} on {self.host}", f"rank 0 on {first['host']}"
        if self.rank >= self.size:
            message = f"a process on {self.host} has RANK {self.rank}, but WORLD_SIZE is {self.size}"
            return {"message": message, "hint": "set RANK to a different number from 0 to WORLD_SIZE - 1 in each process"}
        for name, value in info.items():
            expected = first["info"].get(name, "none")
            if value != expected:
                message = f"{rank} has {name} {value}, but {rank_0} has {expected}"
                if name in details and (differing_details := describe_differences(details[name], first["details"][name])):
                    message = f"{rank} has another {name.removeprefix('the ')} than {rank_0}: {differing_details}"
                return {"message": message, "hint": "install the same versions and use the same plan on every host"}
        return {}

    def _record_arrival(self, verdict: Verdict) -> None:
        """Records that this rank has arrived, or writes `verdict` if it is not empty or another process has the same rank."""
        duplicate = self._write_once(f"rank {self.rank}", self._identity)
        if duplicate is not None and not verdict:
            message = f"two processes, on {duplicate['host']} and {self.host}, have RANK {self.rank}"
            hint = "set a different RANK in each process, or torchrun's --node-rank on each host"
            verdict = {"message": message, "hint": hint}
        if verdict:
            self._write_once("verdict", verdict)
        else:
            self._add_count("arrived")

    def _end_round(self, texts: tuple[str, str], timeout_s: float) -> None:
        """Waits for the verdict, which rank 0 writes when the round ends. Raises RunError "preflight" if it is a failure."""
        num_readers = self.size - 1
        if self.rank == 0:
            for _ in _poll_until(timeout_s):
                if self._read_key("verdict") is not None or self._add_count("arrived", 0) == self.size - 1:
                    self._write_once("verdict", {})
                    break
            else:
                self._write_once("verdict", self._list_missing_ranks(texts, timeout_s))
                num_readers = self._add_count("arrived", 0)
        # Rank 0 may have arrived later, and its time limit, after which it names the missing ranks, ends later too.
        verdict = self._wait_for("verdict", "rank 0's verdict on all ranks", timeout_s + RESPONSE_TIMEOUT_S)
        if verdict:
            self._acknowledge_failure(num_readers)
            raise RunError(PREFLIGHT, verdict["message"], hint=verdict.get("hint"))
        self.num_rounds += 1

    def _acknowledge_failure(self, num_readers: int) -> None:
        """Records that this rank has read the verdict of a failure. If the store ends with this process, rank 0 waits until
        `num_readers` other ranks have read the verdict.
        """
        if self.rank != 0:
            self._add_count("readers")
        elif self.ends_store:
            for _ in _poll_until(BUILD_GRACE_S if self.num_rounds else ARRIVAL_GRACE_S):
                if self._add_count("readers", 0) >= num_readers:
                    break

    def _list_missing_ranks(self, texts: tuple[str, str], timeout_s: float) -> Verdict:
        hosts = {rank: card["host"] for rank in range(1, self.size) if (card := self._read_key(f"rank {rank}")) is not None}
        hosts[0] = self.host
        missing_ranks = [str(rank) for rank in range(self.size) if rank not in hosts]
        message = f"of {self.size} ranks, these {texts[0]} within {timeout_s:g} s: {shorten_names(missing_ranks, 8)}"
        return {"message": f"{message} (hosts that did: {', '.join(sorted(set(hosts.values())))})", "hint": texts[1]}

    def _wait_for(self, key: str, description: str, timeout_s: float) -> dict[str, Any]:
        for _ in _poll_until(timeout_s):
            if (value := self._read_key(key)) is not None:
                return value
        raise _preflight_error(f"rank {self.rank} did not receive {description} in time", _RANK_0_HINT)

    def _read_key(self, key: str) -> dict[str, Any] | None:
        """Returns the value under `key` in this round; None if no rank has written it."""
        name = f"{self.num_rounds} {key}"
        with self._store_errors():
            value: dict[str, Any] | None = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return value

    def _write_once(self, key: str, value: Mapping[str, Any]) -> dict[str, Any] | None:
        """Writes `value` under `key` and returns None. If `key` has another value, keeps and returns that."""
        text = json.dumps(value)
        with self._store_errors():
            stored = self.store.compare_set(f"{self.num_rounds} {key}", "", text).decode()
        return None if stored == text else json.loads(stored)

    def _add_count(self, key: str, amount: int = 1) -> int:
        with self._store_errors():
            return int(self.store.add(f"{self.num_rounds} {key}", amount))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turns torch's errors, which mean that the process that serves the store has ended, into RunError "preflight"."""
        try:
            yield
        except RuntimeError as error:
            raise _preflight_error(
                f"rank {self.rank} has lost the connection to the store: {first_line(error)}", _RANK_0_HINT
            ) from error


_RANK_0_HINT = "check the output of rank 0, or of its launcher, for the reason"


def _preflight_error(message: str, hint: str) -> RunError:
    return RunError(PREFLIGHT, f"on {platform.node()}: {message}", hint=hint)


def _reused_store_error() -> RunError:
    hint = (
        "use `--max-restarts=0` on several hosts, since torchrun's agents keep their store when they "
        "restart; then submit the job again"
    )
    return _preflight_error("the launcher's store contains keys of an earlier attempt of this run", hint)


def _poll_until(timeout_s: float) -> Iterator[None]:
    """Yields at once, and then at growing intervals until `timeout_s` seconds have passed. Used in place of `store.wait`, which
    blocks in C, where Python handles no signals.
    """
    until, pause_s = time.monotonic() + timeout_s, _POLL_S
    yield
    while time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
        yield


def _is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach `address`; False for an unknown name."""
    with suppress(OSError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
        return all(ip == "::1" or ip.startswith("127.") for ip in addresses)
    return False


def _open_store(address: str, port: int, size: int, timeout_s: float, *, serves: bool) -> Store:
    """Serves the store, or connects to it when it exists. Raises RunError "preflight" as `Rendezvous.join` describes."""
    start_s = time.monotonic()
    num_silent = 0
    while True:
        has_answered = serves
        limit_s = RESPONSE_TIMEOUT_S if serves else timeout_s  # an earlier run's store may still hold the port
        try:
            socket.getaddrinfo(address, port)
            if not serves:  # first, since torch handles no signals while it connects
                socket.create_connection((address, port), timeout=RESPONSE_TIMEOUT_S).close()
                has_answered = True
            return _tcp_store(address, port, size, serves)
        except (OSError, RuntimeError) as error:
            reason = first_line(error)
            is_unknown = isinstance(error, socket.gaierror)  # the name of a pod may resolve only some time after the pod starts
            limit_s = RESPONSE_TIMEOUT_S if is_unknown else limit_s
            # A listener that has closed may cause one silent attempt: torch then retries for 12 s with a time limit of 4 s.
            num_silent += has_answered and isinstance(error, TimeoutError)
            if time.monotonic() - start_s > limit_s or num_silent == 2:
                break
        time.sleep(_RETRY_S)
    if is_unknown:
        hint = "set MASTER_ADDR to a name or address of rank 0's host that all hosts can resolve"
        raise _preflight_error(f"the name `{address}` cannot be resolved: {reason}", hint)
    if serves:
        hint = "set another MASTER_PORT; `ss -ltnp` on that host shows the program that uses it"
        raise _preflight_error(f"port {port} is in use: {reason}", hint)
    if has_answered:
        hint = "set another MASTER_PORT, since another program uses this one"
        raise _preflight_error(f"the program at {address}:{port} is not a rendezvous store: {reason}", hint)
    hint = "set MASTER_ADDR to rank 0's host on all hosts, not to localhost; check that it runs and that the port is open"
    raise _preflight_error(f"nothing answered at {address}:{port} within {timeout_s:g} s: {reason}", hint)


def _tcp_store(address: str, port: int, size: int, is_server: bool) -> Store:
    """Creates the store in a thread, since torch waits forever for a server that does not respond. Raises TimeoutError for such
    a server.
    """
    outcomes: list[Store | RuntimeError] = []

    def create_store() -> None:
        timeout = timedelta(seconds=RESPONSE_TIMEOUT_S / 2)
        try:
            outcomes.append(TCPStore(address, port, size, is_server, timeout, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            outcomes.append(error)

    thread = threading.Thread(target=create_store, name="sley-store", daemon=True)
    thread.start()
    thread.join(RESPONSE_TIMEOUT_S)
    if not outcomes:
        raise TimeoutError("it does not respond")
    if isinstance(outcomes[0], RuntimeError):
        raise outcomes[0]
    return outcomes[0]

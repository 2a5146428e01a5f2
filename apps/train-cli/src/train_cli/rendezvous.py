"""The rendezvous of ranks that torchrun, SLURM or another launcher has started. Before the first collective, the ranks compare
their plans and versions in the store at MASTER_ADDR. Either all ranks start, or none of them does.

    rank 0      info ──> "first"                   all ranks have arrived, or the time is over ──> "verdict" ──> all ranks
    rank n      compares its info with "first" ──> "rank n", or, if it differs or cannot start, "verdict"

Only the first verdict counts. After the time limit, the verdict lists the missing ranks and the hosts that have arrived.
"""

import json
import os
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

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch exports them

from sley_core.comm.exchanges import first_line
from sley_core.comm.world import is_single_host, make_prefix_store
from sley_core.engine.agreement import describe_differences
from sley_core.errors import Diagnostic, RunError, shorten_names
from sley_core.plan.plan import Plan, format_values
from train_cli.faults import PREFLIGHT, Fault

RESPONSE_TIMEOUT_S = 8.0
"""The time limit in seconds for resolving a name, for opening a port, and for an answer from the store."""

_NOTIFICATION_TIMEOUT_S = 30.0  # how long in seconds a failed rank tries to reach rank 0, which may start later

ARRIVAL_GRACE_S = 10.0
BUILD_GRACE_S = 60.0
"""The time in seconds for which rank 0 keeps its store after a failure, so that other ranks can read the reason: ranks that
have not arrived yet (`ARRIVAL_GRACE_S`), or that are still building their model (`BUILD_GRACE_S`).
"""

_POLL_S, _MAX_POLL_S, _RETRY_S = 0.02, 0.3, 0.3  # in seconds: a poll's first and longest pause; the pause before a retry

Verdict = dict[str, Any]
"""The result of a round: {} if all ranks have arrived and agree; else `message` and `hint` of the error on all ranks."""


def open_rendezvous(plan: Plan) -> "Rendezvous":
    """Checks that all ranks have the same plan and versions, and returns this rank's rendezvous. All ranks must call it. Raises
    RunError "preflight" on all ranks, or only on this rank if it does not find the other ranks.
    """
    rendezvous = Rendezvous.join(os.environ, timeout_s=plan.limits.start_timeout_s)
    info = {"the plan": plan.digest, "torch": torch.__version__}
    if plan.run.device != "cpu":  # ranks with different devices would wait for each other in different backends
        info["CUDA devices"] = "some" if torch.cuda.is_available() else "none"
    info |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    rendezvous.agree(info, {"the plan": format_values(plan)})
    return rendezvous


def notify_peers(fault: Fault) -> None:
    """Sends `fault`, the reason why this rank cannot start, to the ranks that wait for this rank."""
    if fault.diagnostics:
        with suppress(RunError, KeyError, ValueError):  # this rank's own error matters more
            Rendezvous.join(os.environ, timeout_s=_NOTIFICATION_TIMEOUT_S).report_failure(fault.diagnostics[0])


_ARRIVAL_TEXTS = (
    "did not connect",
    "start all hosts, with a MASTER_ADDR that all can reach, not localhost; raise [limits] start_timeout_s to wait longer",
)
"""What the missing ranks of the first round did not do, as part of an error message, and the hint of that error."""

_BUILD_TEXTS = (
    "did not open their data and build their model",
    "check whether they read from a slow disk, for example; raise [limits] collective_timeout_s to wait longer",
)
"""What the missing ranks of the second round did not do, as part of an error message, and the hint of that error."""


@dataclass
class Rendezvous:
    """One rank's part in the rendezvous, in which the ranks agree to start or to fail.

    timeout_s: the time limit of a wait for ranks. is_store_owner: whether the store may end soon after this process. job: the
    launcher's name for this run, which distinguishes runs that use the same port. num_rounds: the number of completed rounds,
    in each of which all ranks have agreed. process: a random id, which a restarted rank does not use again.
    """

    rank: int
    size: int
    store: Store
    timeout_s: float
    is_store_owner: bool = False
    job: str = ""
    num_rounds: int = 0
    host: str = field(default_factory=platform.node)
    process: str = field(default_factory=partial(token_hex, 8))

    @classmethod
    def join(cls, environ: Mapping[str, str], *, timeout_s: float) -> "Rendezvous":
        """Returns this rank's rendezvous in the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves unless torchrun's
        agent does. Blocks until the store exists. All ranks must call it the same number of times.

        Raises RunError "preflight" with this host and a hint: after about RESPONSE_TIMEOUT_S if the name cannot be resolved or
        the port is in use, after twice this time if a program at the port is silent, and after `timeout_s` if nothing listens.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            hint = "set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port on it, the same on all hosts"
            raise _preflight_error(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}", hint)
        if _is_loopback(address) and int(environ.get("LOCAL_WORLD_SIZE", size)) < size:
            timeout_s = min(timeout_s, RESPONSE_TIMEOUT_S)  # a loopback address cannot connect several hosts
        is_server = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _open_store(address, int(port), size, timeout_s, is_server=is_server)
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        # With several torchrun agents, an agent ends, with its store, when one of its ranks has ended.
        is_store_owner = rank == 0 and (is_server or not is_single_host(environ))
        prefix_store = make_prefix_store(store, environ, "rendezvous")
        return cls(rank, size, prefix_store, timeout_s, is_store_owner, f"{job} of {size} ranks")

    def agree(self, info: Mapping[str, str], details: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `info`, values by name, with the values of rank 0. Returns when all ranks have arrived and agree. details:
        for some names in `info`, the parts of the value by name, so that messages show only the differing parts. Raises
        RunError "preflight" on all ranks, with the rank that differs, its host, its value and a hint.
        """
        if self.rank == 0:
            rank_0 = self._identity | {"info": {**info}, "details": {**details}}
            is_store_reused = self._write_once("first", rank_0) is not None
        else:
            rank_0 = self._read_rank_0()
            is_store_reused = self._read_key("verdict") == {}
        if is_store_reused:
            hint = (
                "use `--max-restarts=0` on several hosts, since torchrun's agents keep their store when they "
                "restart; then submit the job again"
            )
            raise _preflight_error("the launcher's store contains keys of an earlier attempt of this run", hint)
        if self.rank:
            self._record_arrival(self._compare(rank_0, info, details) if "info" in rank_0 else {})
        self._end_round(_ARRIVAL_TEXTS, self.timeout_s)

    @contextmanager
    def all_or_none(self, timeout_s: float) -> Iterator[None]:
        """Returns a context manager that all ranks leave together. If the block fails on a rank, this rank raises its error,
        and all other ranks raise RunError "preflight". timeout_s: the time limit of the wait at the end of the block.
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
        """Tells all ranks why this rank cannot start. Rank 0 then waits, for a limited time, until all ranks have read it."""
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
        """The host, job and process id, which identify this process to other ranks."""
        return {"host": self.host, "job": self.job, "process": self.process}

    def _read_rank_0(self) -> dict[str, Any]:
        """Waits for and returns the first value of rank 0. Raises RunError "preflight" if it is missing or from another run."""
        rank_0 = self._wait_for("first", "the data of rank 0", self.timeout_s)
        if rank_0["job"] != self.job:
            hint = "set a different MASTER_PORT for each run on a host, and the same MASTER_PORT on all ranks of a run"
            raise _preflight_error(f"another run uses this port (job {rank_0['job']}, on {rank_0['host']})", hint)
        return rank_0

    def _compare(self, rank_0: dict[str, Any], info: Mapping[str, str], details: Mapping[str, Mapping[str, str]]) -> Verdict:
        """Returns a verdict on the first difference between this rank and rank 0, or {}. rank_0: the first value of rank 0."""
        rank_name, rank_0_name = f"rank {self.rank} on {self.host}", f"rank 0 on {rank_0['host']}"
        if self.rank >= self.size:
            message = f"a process on {self.host} has RANK {self.rank}, but WORLD_SIZE is {self.size}"
            return {"message": message, "hint": "set RANK to a different number from 0 to WORLD_SIZE - 1 in each process"}
        for name, value in info.items():
            expected = rank_0["info"].get(name, "none")
            if value != expected:
                message = f"{rank_name} has {name} {value}, but {rank_0_name} has {expected}"
                if name in details and (differences := describe_differences(details[name], rank_0["details"][name])):
                    message = f"{rank_name} has a different {name.removeprefix('the ')} from {rank_0_name}: {differences}"
                return {"message": message, "hint": "install the same versions and use the same plan on every host"}
        return {}

    def _record_arrival(self, verdict: Verdict) -> None:
        """Records that this rank has arrived, or writes a verdict if `verdict` is not empty or another process has the rank."""
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
        """Waits for this round's verdict. Raises RunError "preflight" if it is a failure. texts: what was not done; a hint."""
        num_readers = self.size - 1
        if self.rank == 0:
            for _ in _poll_for(timeout_s):
                if self._read_key("verdict") is not None or self._add_count("arrived", 0) == self.size - 1:
                    self._write_once("verdict", {})
                    break
            else:
                self._write_once("verdict", self._describe_missing_ranks(texts, timeout_s))
                num_readers = self._add_count("arrived", 0)
        # Rank 0 may have arrived later, and its time limit, after which it names the missing ranks, ends later too.
        verdict = self._wait_for("verdict", "rank 0's verdict on all ranks", timeout_s + RESPONSE_TIMEOUT_S)
        if verdict:
            self._acknowledge_failure(num_readers)
            raise RunError(PREFLIGHT, verdict["message"], hint=verdict.get("hint"))
        self.num_rounds += 1

    def _acknowledge_failure(self, num_readers: int) -> None:
        """Records that this rank has read a failure. If the store ends with rank 0, rank 0 waits for `num_readers` ranks."""
        if self.rank != 0:
            self._add_count("readers")
        elif self.is_store_owner:
            for _ in _poll_for(BUILD_GRACE_S if self.num_rounds else ARRIVAL_GRACE_S):
                if self._add_count("readers", 0) >= num_readers:
                    break

    def _describe_missing_ranks(self, texts: tuple[str, str], timeout_s: float) -> Verdict:
        identities = {rank: self._read_key(f"rank {rank}") for rank in range(1, self.size)}
        hosts = {0: self.host, **{rank: identity["host"] for rank, identity in identities.items() if identity is not None}}
        missing_ranks = [str(rank) for rank in range(self.size) if rank not in hosts]
        message = f"of {self.size} ranks, these {texts[0]} within {timeout_s:g} s: {shorten_names(missing_ranks, 8)}"
        return {"message": f"{message} (hosts of the other ranks: {', '.join(sorted(set(hosts.values())))})", "hint": texts[1]}

    def _wait_for(self, key: str, description: str, timeout_s: float) -> dict[str, Any]:
        """Returns the value under `key`. Raises RunError "preflight" with `description` if it is missing after `timeout_s`."""
        for _ in _poll_for(timeout_s):
            if (value := self._read_key(key)) is not None:
                return value
        raise _preflight_error(f"rank {self.rank} did not receive {description} in time", _RANK_0_HINT)

    def _read_key(self, key: str) -> dict[str, Any] | None:
        """Returns the value under `key` in this round, without waiting; None if no rank has written it yet."""
        name = f"{self.num_rounds} {key}"
        with self._store_errors():
            value: dict[str, Any] | None = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return value

    def _write_once(self, key: str, value: Mapping[str, Any]) -> dict[str, Any] | None:
        """Writes `value` under `key` and returns None. If `key` already has another value, returns this value instead."""
        text = json.dumps(value)
        with self._store_errors():
            stored = self.store.compare_set(f"{self.num_rounds} {key}", "", text).decode()
        return None if stored == text else json.loads(stored)

    def _add_count(self, key: str, amount: int = 1) -> int:
        with self._store_errors():
            return int(self.store.add(f"{self.num_rounds} {key}", amount))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turns torch's RuntimeError after the end of the process that serves the store into RunError "preflight"."""
        try:
            yield
        except RuntimeError as error:
            raise _preflight_error(
                f"rank {self.rank} has lost the connection to the store: {first_line(error)}", _RANK_0_HINT
            ) from error


_RANK_0_HINT = "check the output of rank 0, or of its launcher, for the reason"


def _preflight_error(message: str, hint: str) -> RunError:
    return RunError(PREFLIGHT, f"on {platform.node()}: {message}", hint=hint)


def _poll_for(timeout_s: float) -> Iterator[None]:
    """Yields once, and then again after growing pauses until `timeout_s` seconds have passed."""
    # `store.wait` would block in C, where Python handles no signals.
    deadline_s, pause_s = time.monotonic() + timeout_s, _POLL_S
    yield
    while time.monotonic() < deadline_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
        yield


def _is_loopback(address: str) -> bool:
    """Returns whether `address` is a loopback address, which only this machine can reach; False for an unknown name."""
    with suppress(OSError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
        return all(ip == "::1" or ip.startswith("127.") for ip in addresses)
    return False


def _open_store(address: str, port: int, size: int, timeout_s: float, *, is_server: bool) -> Store:
    """Returns the store that this rank serves, or to which it connects. Raises the errors of `Rendezvous.join`."""
    start_s = time.monotonic()
    num_silent_attempts = 0
    while True:
        has_answered = is_server
        limit_s = RESPONSE_TIMEOUT_S if is_server else timeout_s  # an earlier run's store may still hold the port
        try:
            socket.getaddrinfo(address, port)
            if not is_server:  # first, since torch handles no signals while it connects
                socket.create_connection((address, port), timeout=RESPONSE_TIMEOUT_S).close()
                has_answered = True
            return _make_store(address, port, size, is_server)
        except (OSError, RuntimeError) as error:
            reason = first_line(error)
            is_unknown = isinstance(error, socket.gaierror)  # the name of a pod may resolve only some time after the pod starts
            limit_s = RESPONSE_TIMEOUT_S if is_unknown else limit_s
            # A listener that has closed may cause one silent attempt: torch then retries for 12 s with a time limit of 4 s.
            num_silent_attempts += has_answered and isinstance(error, TimeoutError)
            if time.monotonic() - start_s > limit_s or num_silent_attempts == 2:
                break
        time.sleep(_RETRY_S)
    if is_unknown:
        message = f"the name `{address}` cannot be resolved: {reason}"
        hint = "set MASTER_ADDR to a name or address of rank 0's host that all hosts can resolve"
    elif is_server:
        message = f"port {port} is in use: {reason}"
        hint = "set another MASTER_PORT; `ss -ltnp` on that host shows the program that uses it"
    elif has_answered:
        message = f"the program at {address}:{port} is not a rendezvous store: {reason}"
        hint = "set another MASTER_PORT, since another program uses this one"
    else:
        message = f"nothing answered at {address}:{port} within {timeout_s:g} s: {reason}"
        hint = "set MASTER_ADDR to rank 0's host on all hosts, not to localhost; check that it runs and that the port is open"
    raise _preflight_error(message, hint)


def _make_store(address: str, port: int, size: int, is_server: bool) -> Store:
    """Creates a TCPStore in a thread, and returns it. Raises TimeoutError if the server is silent; torch would wait forever."""
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
        raise TimeoutError("no response")
    if isinstance(outcomes[0], RuntimeError):
        raise outcomes[0]
    return outcomes[0]

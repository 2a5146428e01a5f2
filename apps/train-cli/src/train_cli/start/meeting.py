"""The rendezvous of a run: ranks meet in their launcher's store before they wait for one another anywhere else, and a roll call
in it decides that all ranks start or none does.

    rank 0      its facts ──────> first ──┐                                 verdict ──> all ranks
    rank n      reads them, compares, and adds itself to the list ──> rank 0 reads the list as it grows

A rank that could not even begin (no plan there, a broken plugin) adds itself too, with its reason. So a host that differs is
named within seconds on all hosts, and nobody waits for a rank that has given up, or has died (`presence`). Rank 0 reads one
line per rank, and each other rank reads the facts of rank 0.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm import startup
from sley_core.comm.collectives import differing
from sley_core.comm.guard import first_line
from sley_core.errors import RunError, SleyError
from train_cli.start import reach as reaching
from train_cli.start.presence import Door, Tether
from train_cli.start.reach import CODE, reach, refused
from train_cli.start.roll_call import BUILT, CAME, Board, EarlyVerdict, Occasion, Patience, RollCall, used_before

STRAGGLERS_S = 10.0
"""Seconds for ranks that may not have come yet to read the verdict, before the store ends with this process or its agent."""

BUILDERS_S = 60.0
"""Seconds for ranks that have come and still build to read the verdict."""

_FIRST = "first"
_REACHABLE_S = 3.0
"""Seconds for a connection to rank 0; behind a firewall there is no answer at all."""


@dataclass
class Meeting:
    """Represents one rank at the rendezvous.

    timeout_s: for ranks that have not come. address: of rank 0's host; is_local: whether only this machine can reach that
    address. ends_store: whether the store may end soon after this process. job: tells this run from another that uses the same
    port, if the launcher has a name for it. num_calls: roll calls that all ranks have answered.
    """

    rank: int
    size: int
    store: Store
    timeout_s: float
    address: str
    is_local: bool
    ends_store: bool = False
    job: str = ""
    num_calls: int = 0
    host: str = field(default_factory=platform.node)
    _door: Door | None = None
    _tether: Tether | None = None

    @classmethod
    def at(cls, environ: Mapping[str, str], *, timeout_s: float) -> Meeting:
        """Returns this rank's meeting in the store that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        Blocks until rank 0 is there, and raises RunError "preflight", as `reach` does. All ranks call it equally often: a
        program that meets again begins a new list.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        found = reach(environ, timeout_s)
        store = startup.fresh(found.store, environ, "meeting")
        # One of several torchrun agents ends, with its store, when one of its ranks has ended.
        ends_store = rank == 0 and (found.is_held or not startup.is_one_host(environ))
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        return cls(rank, size, store, found.timeout_s, found.address, found.is_local, ends_store, job)

    def agree(self, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `facts` of all ranks with those of rank 0; returns when all ranks have come and agree.

        parts: by name of a fact, what it is made of, to name the piece that differs. Raises RunError "preflight" on all ranks
        alike, with the rank, its host, its value, and a remedy. From its return to the end of the first `all_or_none`, ranks
        notice when another one ends.
        """
        try:
            self._meet(self._call(CAME), facts, parts)
        except BaseException:
            self._part()
            raise

    def _meet(self, call: RollCall, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        """Publishes the facts on rank 0, compares with them on others; raises RunError "preflight" unless all ranks have come
        and agree.
        """
        if self.rank == 0:
            if call.board.find(_FIRST) is not None:
                raise used_before()
            with suppress(OSError):  # without a door, dead ranks are noticed only by the time limit
                self._door = Door(self.address if self.is_local else "")
            door = [self._door.port, self._door.token] if self._door is not None else None
            first = {"host": self.host, "job": self._job, "facts": dict(facts), "parts": {**parts}}
            call.board.set(_FIRST, first | {"door": door})
            self._conclude(call, call.verdict(Patience().begin(self.timeout_s), self._door))
        else:
            call.answer(self._difference(call, facts, parts))
            self._conclude(call, self._heard(call, self.timeout_s))

    @contextmanager
    def all_or_none(self, timeout_s: float) -> Iterator[None]:
        """Returns a context manager whose end all ranks pass, or none: if the block raises on any rank, that one raises its own
        error, and the others RunError "preflight".

        The same if a rank dies in it; in a second such block that is noticed only after the time limit, since ranks keep
        connections only to the end of the first. timeout_s: for ranks that are still in the block when this one has left it.
        """
        try:
            with self._built(timeout_s):
                yield
        finally:
            self._part()  # after all have been told

    @contextmanager
    def _built(self, timeout_s: float) -> Iterator[None]:
        """Runs the block of `all_or_none`, reports its result in a roll call, and raises if any rank failed."""
        call = self._call(BUILT)
        # Rank 0 reads the list while it builds, so that a failure reaches waiting ranks before it is done.
        early = EarlyVerdict(call, self._door) if self.rank == 0 else None
        try:
            yield
        except Exception as error:
            if early is not None:
                early.stop()
            found = error.diagnostics[0] if isinstance(error, SleyError) else None
            reason = found.message if found else f"{type(error).__name__}: {first_line(error)}"
            self.give_up(reason, found.hint if found else None)
            raise
        except BaseException:
            if early is not None:
                early.stop()
            raise
        if early is not None:
            self._conclude(call, early.verdict(timeout_s))
        else:
            call.answer({})
            self._conclude(call, self._heard(call, timeout_s))

    def give_up(self, reason: str, hint: str | None) -> None:
        """Tells all ranks why this one does not begin; returns when they know, or after a timeout. reason: a message."""
        told = {"message": f"rank {self.rank} on {self.host} cannot begin: {reason}", "hint": hint}
        call = self._call(BUILT if self.num_calls else CAME)
        try:
            if self.rank == 0:
                if not self.num_calls:
                    call.board.set(_FIRST, {"host": self.host, "job": self._job, "failed": told})
                call.conclude(told)
                self._linger(call)
            elif self.num_calls or call.board.get(_FIRST, "rank 0", self.timeout_s)["job"] == self._job:
                call.answer(told)  # not if the list is of another run
                call.heard(reaching.PATIENCE_S)
        except RunError:
            return  # nobody is there to be told

    def _part(self) -> None:
        """Closes the connections by which ranks notice each other's end."""
        for one in (self._door, self._tether):
            if one is not None:
                one.close()
        self._door = self._tether = None

    @property
    def _job(self) -> str:
        return f"{self.job} of {self.size} ranks"

    def _call(self, occasion: Occasion) -> RollCall:
        return RollCall(Board(self.store, self.rank, self.num_calls), self.size, self.host, occasion)

    def _difference(self, call: RollCall, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Compares with the facts of rank 0, and connects to its door. Returns what to report: {}, or the message and hint of a
        difference.
        """
        first = call.board.get(_FIRST, "rank 0", self.timeout_s)
        if first["job"] != self._job:  # another run: do not add a line to its list
            hint = "give each of the runs that share a host a MASTER_PORT of its own, and all ranks of one run the same"
            raise refused(f"another run meets at this port (job {first['job']}, on {first['host']})", hint)
        if "failed" in first:
            return {}
        if self.rank >= self.size:
            who = f"a process on {self.host} says that it is rank {self.rank} of {self.size}"
            return {
                "message": who,
                "hint": "ranks count from 0: RANK must be below WORLD_SIZE, and another one in each process",
            }
        if first["door"] is not None:
            port, token = first["door"]
            with suppress(OSError):  # e.g. a firewall: then dead ranks are noticed only by the time limit
                self._tether = Tether(self.address, port, f"{token} {self.rank} {self.host}", _REACHABLE_S)
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

    def _heard(self, call: RollCall, timeout_s: float) -> dict[str, Any]:
        """Waits for the verdict and returns it. Rank 0, which may have come a little later, names missing ranks after its own
        limit.
        """
        return call.heard(timeout_s + reaching.PATIENCE_S, self._tether)

    def _conclude(self, call: RollCall, verdict: Mapping[str, Any]) -> None:
        """Raises RunError "preflight" for a verdict that is not empty; rank 0 first writes it for all."""
        if self.rank == 0:
            call.conclude(verdict)
            if verdict:
                self._linger(call)
        if verdict:
            raise RunError(CODE, verdict["message"], hint=verdict.get("hint"))
        self.num_calls += 1

    def _linger(self, call: RollCall) -> None:
        """Keeps the store until other ranks have read the verdict, if the store would end with this process."""
        if self.ends_store:
            call.await_readers(BUILDERS_S if self.num_calls else STRAGGLERS_S, self._door)

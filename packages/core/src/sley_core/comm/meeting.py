"""Where the processes of a run meet, before they wait for one another in anything else: the store of their launcher, and a roll
call in it, by which all ranks start or none does.

    rank 0      its facts ──────> first ──┐                                 verdict ──> all ranks
    rank n      reads them, compares, and adds itself to the list ──> rank 0 reads the list as it grows

Whoever could not even begin (no plan there, a broken plugin) adds itself too, with its reason. So a host that differs is named
within seconds on all hosts, and nobody waits for a rank that has given up, or has died (`presence`). Rank 0 reads one line per
rank, and each rank the facts of one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm import occasions
from sley_core.comm import reach as reaching
from sley_core.comm.agree import differing
from sley_core.comm.guard import first_line
from sley_core.comm.presence import Door, Tether
from sley_core.comm.reach import CODE, reach, refused
from sley_core.comm.roll_call import BUILT, CAME, Board, EarlyVerdict, Occasion, Patience, RollCall, used_before
from sley_core.errors import RunError, SleyError

STRAGGLERS_S = 10.0
"""For ranks that may not have come yet to read why nobody starts, before the store ends with this process or its agent."""

BUILDERS_S = 60.0
"""For ranks that have come and still build."""

_FIRST = "first"
_REACHABLE_S = 3.0
"""For a connection to rank 0; a port that is closed to other hosts does not answer at all."""


@dataclass
class Meeting:
    """One rank at the meeting. timeout_s: for ranks that have not come. address: of rank 0's host; is_local: whether that is
    this machine's alone. ends_store: whether the store may end soon after this process. job: what tells this run from another
    that uses the same port, where the launcher has a name for it. num_calls: roll calls that all ranks have answered.
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
        """Returns this rank's place at the meeting that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        Blocks until rank 0 is there, and raises RunError "preflight", as `reach` does. All ranks meet there equally often:
        a program that meets again begins a new list.
        """
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        found = reach(environ, timeout_s)
        store = occasions.fresh(found.store, environ, "meeting")
        # An agent of several ends, and its store with it, when one of its ranks has.
        ends_store = rank == 0 and (found.is_held or not occasions.is_one_host(environ))
        job = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
        return cls(rank, size, store, found.timeout_s, found.address, found.is_local, ends_store, job)

    def agree(self, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        """Compares `facts` of all ranks with those of rank 0; returns when all ranks have come and agree.

        parts: of a fact, what it is made of, to name the piece that differs. Raises RunError "preflight" on all ranks alike,
        with the rank, its host, what it has, and a remedy. When it returns, ranks notice each other's end, to the end of the
        first `all_or_none`.
        """
        try:
            self._meet(self._call(CAME), facts, parts)
        except BaseException:
            self._part()
            raise

    def _meet(self, call: RollCall, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]) -> None:
        if self.rank == 0:
            if call.board.find(_FIRST) is not None:
                raise used_before()
            with suppress(OSError):  # without it only time tells who has died
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
        """Goes on behind the block when all ranks have left it; if it raises on any, raises on all: there its own error, on the
        others RunError "preflight". So it is where a rank dies in it, in a second such block only after the time limit: nobody
        keeps a connection behind the first. timeout_s: for ranks that are still in it when this one has left it.
        """
        try:
            with self._built(timeout_s):
                yield
        finally:
            self._part()  # after all have been told

    @contextmanager
    def _built(self, timeout_s: float) -> Iterator[None]:
        call = self._call(BUILT)
        # Rank 0 hears the others while it builds too, so that those who wait need not wait for it to be told.
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
        """Tells all ranks why this one does not begin; returns when they know, or after a while. reason: a message."""
        told = {"message": f"rank {self.rank} on {self.host} cannot begin: {reason}", "hint": hint}
        call = self._call(BUILT if self.num_calls else CAME)
        try:
            if self.rank == 0:
                if not self.num_calls:
                    call.board.set(_FIRST, {"host": self.host, "job": self._job, "failed": told})
                call.conclude(told)
                self._linger(call)
            elif self.num_calls or call.board.get(_FIRST, "rank 0", self.timeout_s)["job"] == self._job:
                call.answer(told)  # in no list of another run
                call.heard(reaching.PATIENCE_S)
        except RunError:
            return  # nobody is there to be told

    def _part(self) -> None:
        """Closes what tells of the end of other ranks."""
        for one in (self._door, self._tether):
            if one is not None:
                one.close()
        self._door = self._tether = None

    @property
    def _job(self) -> str:
        return f"{self.job} of {self.size} ranks"

    def _call(self, occasion: Occasion) -> RollCall:
        return RollCall(Board(self.store, self.rank, self.num_calls), self.size, self.host, occasion)

    def _difference(
        self, call: RollCall, facts: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]
    ) -> dict[str, Any]:
        """Returns what is to be told of this rank: nothing, or in what it differs from rank 0; ties it to that one."""
        first = call.board.get(_FIRST, "rank 0", self.timeout_s)
        if first["job"] != self._job:  # no line in its list: that run is none of ours
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
            with suppress(OSError):  # as behind a firewall, where again only time tells
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
        """Returns the verdict, when it is there. rank 0, which may have come a little later, says after its own limit who is
        missing.
        """
        return call.heard(timeout_s + reaching.PATIENCE_S, self._tether)

    def _conclude(self, call: RollCall, verdict: Mapping[str, Any]) -> None:
        """Raises what the verdict says, if anything; on rank 0 after all have been told."""
        if self.rank == 0:
            call.conclude(verdict)
            if verdict:
                self._linger(call)
        if verdict:
            raise RunError(CODE, verdict["message"], hint=verdict.get("hint"))
        self.num_calls += 1

    def _linger(self, call: RollCall) -> None:
        """Keeps the store, where it would end with this process, until others have read why nobody starts."""
        if self.ends_store:
            call.await_readers(BUILDERS_S if self.num_calls else STRAGGLERS_S, self._door)

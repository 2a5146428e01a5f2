"""One roll call of a meeting: the list in the store on which each rank puts itself, and the verdict that rank 0 makes of it."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm.guard import first_line
from sley_core.comm.presence import Door, Tether
from sley_core.comm.reach import refused
from sley_core.errors import RunError

_POLL_S, _MOST_POLL_S = 0.02, 0.3
"""Between two looks: at first, and while a host takes long, so that thousands of ranks do not keep the store busy."""

_OTHERS_HINT = "what rank 0 printed, or its launcher, says why"
_COUNT, _LINE, _VERDICT = "lines", "line {}", "verdict"
_READERS, _READER = "readers", "reader {}"


@dataclass(frozen=True)
class Occasion:
    """What of a rank that does not answer is to be said, and done."""

    lacks: str
    hint: str


CAME = Occasion(
    "did not come",
    "start all hosts, with a MASTER_ADDR that all reach, not localhost; [limits] start_timeout_s waits longer",
)
BUILT = Occasion(
    "had not opened their data and built their model",
    "see what these do there, such as reading from a slow disk; [limits] collective_timeout_s waits longer",
)


@dataclass(frozen=True)
class Board:
    """The keys of one roll call in the store, with JSON values."""

    store: Store
    rank: int
    number: int

    def set(self, key: str, value: Mapping[str, Any]) -> None:
        with self._in_store():
            self.store.set(self._name(key), json.dumps(value))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns it."""
        with self._in_store():
            return int(self.store.add(self._name(key), amount))

    def find(self, key: str) -> dict[str, Any] | None:
        """Returns what some rank has set under `key`; None if none has."""
        with self._in_store():
            if not self.store.check([self._name(key)]):
                return None
            found: dict[str, Any] = json.loads(self.store.get(self._name(key)))
        return found

    def get(self, key: str, what: str, timeout_s: float, tether: Tether | None = None) -> dict[str, Any]:
        """Returns what some rank sets under `key`, when it does. Raises RunError if that takes longer than `timeout_s`, or if
        rank 0 ends meanwhile, as its `tether` tells.
        """
        for _ in looks(timeout_s):
            is_cut = tether is not None and tether.is_cut  # before the look: what it set last counts
            if (found := self.find(key)) is not None:
                return found
            if is_cut:
                raise refused(f"rank {self.rank} waited for {what}, but rank 0 has ended", _OTHERS_HINT)
        raise refused(f"rank {self.rank} waited in vain for {what}", _OTHERS_HINT)

    def _name(self, key: str) -> str:
        return f"{self.number} {key}"

    @contextmanager
    def _in_store(self) -> Iterator[None]:
        """Turns torch's error into RunError "preflight": whoever holds the store has ended."""
        try:
            yield
        except RuntimeError as error:
            raise refused(f"rank {self.rank} has lost the others: {first_line(error)}", _OTHERS_HINT) from error


def looks(timeout_s: float) -> Iterator[None]:
    """Yields now, and then at longer and longer intervals until `timeout_s` are over.

    Not `store.wait`: it blocks in torch, where a signal to end is not heard.
    """
    until, pause_s = time.monotonic() + timeout_s, _POLL_S
    yield
    while time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_POLL_S)
        yield


class Patience:
    """How long somebody waits: without end, until `begin`."""

    timeout_s = math.inf
    _until = math.inf

    def begin(self, timeout_s: float) -> Patience:
        """Sets the limit, from now on. Returns itself."""
        self.timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        return self

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until


@dataclass(frozen=True)
class RollCall:
    """One roll call as a rank on `host` sees it. size: the number of ranks."""

    board: Board
    size: int
    host: str
    occasion: Occasion

    def answer(self, told: Mapping[str, Any]) -> None:
        """Puts this rank on the list. told: nothing, or `message` and `hint` of why it does not begin.

        Raises RunError "preflight" where all ranks have agreed before this one has answered: in another run.
        """
        if self.board.find(_VERDICT) == {}:
            raise used_before()
        number = self.board.add(_COUNT, 1)
        self.board.set(_LINE.format(number), {"rank": self.board.rank, "host": self.host, **told})

    def heard(self, timeout_s: float, tether: Tether | None = None) -> dict[str, Any]:
        """Returns the verdict, when rank 0 has one. Raises RunError "preflight" after `timeout_s`, or if rank 0 has ended."""
        verdict = self.board.get(_VERDICT, "rank 0 to hear of all ranks", timeout_s, tether)
        if verdict:
            self.board.set(_READER.format(self.board.add(_READERS, 1)), {"rank": self.board.rank})
        return verdict

    def conclude(self, verdict: Mapping[str, Any]) -> None:
        """Tells all ranks the verdict. Rank 0 calls it."""
        self.board.set(_VERDICT, verdict)

    def await_readers(self, timeout_s: float, door: Door | None) -> None:
        """Waits until all ranks that have not died have read the verdict, or `timeout_s` are over. Rank 0 calls it."""
        done = {0}
        number = 1
        for _ in looks(timeout_s):
            done |= door.gone().keys() if door is not None else set()
            while (reader := self.board.find(_READER.format(number))) is not None:
                done.add(reader["rank"])
                number += 1
            if len(done) >= self.size:
                return

    def verdict(self, patience: Patience, door: Door | None) -> dict[str, Any]:
        """Reads the list of ranks as it grows and returns the verdict: nothing if all came and agree. Rank 0 calls it.

        patience: for ranks that are not on the list; none is had for those that have left `door`.
        """
        hosts = {0: self.host}
        number, pause_s = 1, _POLL_S
        while True:
            gone = dict(door.gone()) if door is not None else {}  # before the list: what it said last counts
            while (line := self.board.find(_LINE.format(number))) is not None:
                if wrong := _wrong(line, hosts):
                    return wrong
                hosts[line["rank"]] = line["host"]
                number, pause_s = number + 1, _POLL_S
            if len(hosts) == self.size:
                if door is not None:
                    door.gone()  # answers who came last
                return {}
            if gone:
                rank = min(gone)
                message = f"rank {rank} on {gone[rank]} has ended without a word, and others wait for it"
                return {"message": message, "hint": "see what its launcher says there, and the system's log (`dmesg`)"}
            if patience.is_over:
                return self._missing(hosts, patience.timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)

    def _missing(self, hosts: Mapping[int, str], timeout_s: float) -> dict[str, Any]:
        absent = [rank for rank in range(self.size) if rank not in hosts]
        named = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        came = ", ".join(sorted(set(hosts.values())))
        message = (
            f"of {self.size} ranks these {self.occasion.lacks} within {timeout_s:g} s: {named} (hosts that did: {came})"
        )
        return {"message": message, "hint": self.occasion.hint}


def _wrong(line: Mapping[str, Any], hosts: Mapping[int, str]) -> dict[str, Any]:
    """Returns what is wrong with a line of the list, nothing if it is right. hosts: of the ranks that are on it already."""
    if line["rank"] in hosts:
        who = f"{hosts[line['rank']]} and {line['host']}"
        hint = "RANK must be another number in each process; torchrun's --node-rank on each host"
        return {"message": f"two processes, on {who}, say that they are rank {line['rank']}", "hint": hint}
    return dict(line) if "message" in line else {}


def used_before() -> RunError:
    """Returns the error for a store that has the roll call of an earlier start."""
    hint = (
        "torchrun's agents keep their store over restarts: give `--max-restarts=0` on several hosts, and submit again"
    )
    return refused("the ranks of this run have met before, and their launcher has kept what they said", hint)


class EarlyVerdict:
    """Hears the ranks in a thread, on rank 0, and tells all what keeps them from starting as soon as there is something."""

    def __init__(self, call: RollCall, door: Door | None) -> None:
        self._call = call
        self._door = door
        self._patience = Patience()
        self._is_stopped = False
        self._has_ended = (
            threading.Event()
        )  # a `join` that a signal breaks off takes the thread for ended, in Python 3.11
        self._verdict: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._listen, name="sley-roll-call", daemon=True)
        self._thread.start()

    def verdict(self, timeout_s: float) -> dict[str, Any]:
        """Returns the verdict, when there is one. timeout_s: for ranks that are not on the list by now.

        Raises whatever kept the thread from hearing the others.
        """
        try:
            self._patience.begin(timeout_s)
            self._has_ended.wait()
        except BaseException:  # of a signal
            self.stop()
            raise
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._verdict is not None, "the thread ended without a verdict"
        return self._verdict

    def stop(self) -> None:
        """Ends the thread, whoever is on the list."""
        self._is_stopped = True
        self._patience.begin(0.0)
        self._has_ended.wait()
        self._thread.join()

    def _listen(self) -> None:
        try:
            self._verdict = self._call.verdict(self._patience, self._door)
            if self._verdict and not self._is_stopped:
                self._call.conclude(self._verdict)
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()

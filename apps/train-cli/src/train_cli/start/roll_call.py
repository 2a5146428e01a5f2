"""One roll call of a meeting: the list in the store to which each rank adds itself, and the verdict that rank 0 derives from
it.
"""

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
from sley_core.errors import RunError
from train_cli.start.presence import Door, Tether
from train_cli.start.reach import refused

_POLL_S, _MOST_POLL_S = 0.02, 0.3
"""Seconds between two reads: at first, and at most, so that thousands of ranks do not overload the store."""

_OTHERS_HINT = "what rank 0 printed, or its launcher, says why"
_COUNT, _LINE, _VERDICT = "lines", "line {}", "verdict"
_READERS, _READER = "readers", "reader {}"


@dataclass(frozen=True)
class Occasion:
    """Describes what ranks that do not answer have failed to do, and the hint for it."""

    lacks: str
    hint: str


CAME = Occasion(
    "did not come", "start all hosts, with a MASTER_ADDR that all reach, not localhost; [limits] start_timeout_s waits longer"
)
BUILT = Occasion(
    "had not opened their data and built their model",
    "see what these do there, such as reading from a slow disk; [limits] collective_timeout_s waits longer",
)


@dataclass(frozen=True)
class Board:
    """Reads and writes the keys of one roll call in the store, with JSON values."""

    store: Store
    rank: int
    number: int

    def set(self, key: str, value: Mapping[str, Any]) -> None:
        with self._in_store():
            self.store.set(self._name(key), json.dumps(value))

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to a counter, and returns its new value."""
        with self._in_store():
            return int(self.store.add(self._name(key), amount))

    def find(self, key: str) -> dict[str, Any] | None:
        """Returns what a rank has set under `key`; None if none has."""
        with self._in_store():
            if not self.store.check([self._name(key)]):
                return None
            found: dict[str, Any] = json.loads(self.store.get(self._name(key)))
        return found

    def get(self, key: str, what: str, timeout_s: float, tether: Tether | None = None) -> dict[str, Any]:
        """Waits until a rank has set `key`, and returns the value. Raises RunError if that takes longer than `timeout_s`, or if
        rank 0 ends meanwhile, as its `tether` shows. what: what is awaited, for the error.
        """
        for _ in looks(timeout_s):
            is_cut = tether is not None and tether.is_cut  # read before the key, so that its last write is seen
            if (found := self.find(key)) is not None:
                return found
            if is_cut:
                raise refused(f"rank {self.rank} waited for {what}, but rank 0 has ended", _OTHERS_HINT)
        raise refused(f"rank {self.rank} waited in vain for {what}", _OTHERS_HINT)

    def _name(self, key: str) -> str:
        return f"{self.number} {key}"

    @contextmanager
    def _in_store(self) -> Iterator[None]:
        """Returns a context manager that turns torch's error into RunError "preflight": the process that serves the store has
        ended.
        """
        try:
            yield
        except RuntimeError as error:
            raise refused(f"rank {self.rank} has lost the others: {first_line(error)}", _OTHERS_HINT) from error


def looks(timeout_s: float) -> Iterator[None]:
    """Yields now, and then at growing intervals until `timeout_s` are over.

    Used instead of `store.wait`, which blocks in torch, where a signal to end is not handled.
    """
    until, pause_s = time.monotonic() + timeout_s, _POLL_S
    yield
    while time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_POLL_S)
        yield


class Patience:
    """Holds a time limit that is infinite until `begin` sets it."""

    timeout_s = math.inf
    _until = math.inf

    def begin(self, timeout_s: float) -> Patience:
        """Sets the limit to `timeout_s` from now; returns itself."""
        self.timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        return self

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until


@dataclass(frozen=True)
class RollCall:
    """Represents one roll call for a rank on `host`. size: the number of ranks."""

    board: Board
    size: int
    host: str
    occasion: Occasion

    def answer(self, told: Mapping[str, Any]) -> None:
        """Adds this rank to the list. told: {}, or `message` and `hint` of why it does not begin.

        Raises RunError "preflight" if there is a verdict that all agree before this rank has answered: that is of an earlier
        start.
        """
        if self.board.find(_VERDICT) == {}:
            raise used_before()
        number = self.board.add(_COUNT, 1)
        self.board.set(_LINE.format(number), {"rank": self.board.rank, "host": self.host, **told})

    def heard(self, timeout_s: float, tether: Tether | None = None) -> dict[str, Any]:
        """Waits for the verdict of rank 0 and returns it. Raises RunError "preflight" after `timeout_s`, or if rank 0 has
        ended.
        """
        verdict = self.board.get(_VERDICT, "rank 0 to hear of all ranks", timeout_s, tether)
        if verdict:
            self.board.set(_READER.format(self.board.add(_READERS, 1)), {"rank": self.board.rank})
        return verdict

    def conclude(self, verdict: Mapping[str, Any]) -> None:
        """Publishes the verdict to all ranks. Rank 0 calls it."""
        self.board.set(_VERDICT, verdict)

    def await_readers(self, timeout_s: float, door: Door | None) -> None:
        """Waits until all living ranks have read the verdict, or `timeout_s` are over. Rank 0 calls it."""
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
        """Reads the list as it grows until all ranks are on it, and returns the verdict: {} if all came and agree, else message
        and hint. Rank 0 calls it.

        patience: limits the wait for ranks that are not on the list; for ranks that have closed their connection to `door` it
        does not wait.
        """
        hosts = {0: self.host}
        number, pause_s = 1, _POLL_S
        while True:
            gone = dict(door.gone()) if door is not None else {}  # read before the list, so that last lines are seen
            while (line := self.board.find(_LINE.format(number))) is not None:
                if wrong := _wrong(line, hosts):
                    return wrong
                hosts[line["rank"]] = line["host"]
                number, pause_s = number + 1, _POLL_S
            if len(hosts) == self.size:
                if door is not None:
                    door.gone()  # answers ranks that connected since
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
        """Returns the verdict that names the ranks which did not answer. hosts: of those that did."""
        absent = [rank for rank in range(self.size) if rank not in hosts]
        named = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        came = ", ".join(sorted(set(hosts.values())))
        message = f"of {self.size} ranks these {self.occasion.lacks} within {timeout_s:g} s: {named} (hosts that did: {came})"
        return {"message": message, "hint": self.occasion.hint}


def _wrong(line: Mapping[str, Any], hosts: Mapping[int, str]) -> dict[str, Any]:
    """Returns what is wrong with a line of the list, {} if nothing is. hosts: of the ranks that are on it already."""
    if line["rank"] in hosts:
        who = f"{hosts[line['rank']]} and {line['host']}"
        hint = "RANK must be another number in each process; torchrun's --node-rank on each host"
        return {"message": f"two processes, on {who}, say that they are rank {line['rank']}", "hint": hint}
    return dict(line) if "message" in line else {}


def used_before() -> RunError:
    """Returns the error for a store that has the roll call of an earlier start."""
    hint = "torchrun's agents keep their store over restarts: give `--max-restarts=0` on several hosts, and submit again"
    return refused("the ranks of this run have met before, and their launcher has kept what they said", hint)


class EarlyVerdict:
    """Reads the list in a thread, on rank 0, and publishes a failure to all ranks as soon as there is one."""

    def __init__(self, call: RollCall, door: Door | None) -> None:
        self._call = call
        self._door = door
        self._patience = Patience()
        self._is_stopped = False
        self._has_ended = threading.Event()  # in Python 3.11 a `join` that a signal interrupts marks the thread as ended
        self._verdict: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._listen, name="sley-roll-call", daemon=True)
        self._thread.start()

    def verdict(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the verdict and returns it. timeout_s: for ranks that are not on the list by now.

        Raises the exception with which the thread ended, if any.
        """
        try:
            self._patience.begin(timeout_s)
            self._has_ended.wait()
        except BaseException:  # raised by a signal handler
            self.stop()
            raise
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._verdict is not None, "the thread ended without a verdict"
        return self._verdict

    def stop(self) -> None:
        """Ends the thread, whichever ranks are on the list."""
        self._is_stopped = True
        self._patience.begin(0.0)
        self._has_ended.wait()
        self._thread.join()

    def _listen(self) -> None:
        """Runs in the thread: reads the list until there is a verdict, and publishes it if it is a failure."""
        try:
            self._verdict = self._call.verdict(self._patience, self._door)
            if self._verdict and not self._is_stopped:
                self._call.conclude(self._verdict)
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()

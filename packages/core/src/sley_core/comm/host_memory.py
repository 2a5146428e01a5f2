"""Ranks of one host read each other's memory: one copy by the kernel, where a socket takes two and a thread between.

    owner                                    reader
    offer(tensors) ── addresses, mark, number ──>  inbox
                                             take: waits for the number, compares the marks, then reads the rows it wants
    is_read    <────── number ─────────────  done: the owner may write again

Addresses and numbers are pushed into the other's inbox, so that waiting looks at one's own memory and a rank that has done
its part may end. Both say what is exchanged and how long it is (`marks`): nothing is read of an exchange of something else,
nor behind the end of what is offered. Linux's `process_vm_readv` and `process_vm_writev` do the copies; both need the right to
trace the peer, which same users have unless Yama or a container forbids it. `HostMemory.open` tries, and answers None where any
pair of ranks cannot. A peer is known by a descriptor of its process (`pidfd_open`), asked before every copy: its number may be
another's once it has ended. Only x86-64: the number is written after the addresses, and other processors may show that in
another order.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.comm.marks import Mark, differs
from sley_core.comm.system_memory import Span, read, write
from sley_core.comm.texts import gather_values
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Group

_kept: list[ctypes.Array[ctypes.c_int64]] = []
"""Every inbox of this process: a peer of a run that failed may still write into it."""

RING = 1024
"""Offers that may be open at once; the next one completes the oldest first, on all ranks at the same place in their order."""

_FIELDS = 7
"""Of an offer in an inbox: the address of its table of addresses, how many there are, its mark and its bytes, where the words
for it are and how many, and its number, last."""

_PEER = RING * (_FIELDS + 1)
_WORD = 8
_YIELD_S = 1e-3
_SLEEP_S = 50e-6
"""A rank that waits lets others run, and sleeps after a millisecond."""

_LOOK_S = 0.5
"""How often a rank that waits looks whether the peer is still there."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NUMBERING = Path("/proc/self/ns/pid")

Table = ctypes.Array[ctypes.c_int64]


class _Card(NamedTuple):
    """How others find a rank: its machine, process, inbox, and the number with which that begins."""

    host: Hashable
    pid: int
    inbox: int
    token: int


class HostMemory:
    """What the members of a group have for each other, in one order of offers on all of them.

    Made by `open`. The tensors of an offer are contiguous, and stay as they are until `is_read` has returned.
    """

    def __init__(self, ranks: Sequence[int], coord: int, timeout_s: float) -> None:
        self.ranks = ranks
        self.coord = coord
        self.timeout_s = timeout_s
        self.peers = [peer for peer in range(len(ranks)) if peer != coord]
        # The token first, then for each peer the ring of its offers and the ring of what it has read.
        self._inbox: Table = (ctypes.c_int64 * (1 + len(ranks) * _PEER))()
        self._inbox[0] = secrets.randbits(62)
        _kept.append(self._inbox)
        self._cards = [_Card(_host(), os.getpid(), ctypes.addressof(self._inbox), self._inbox[0])]
        self._num_offers = 0
        self._tables: dict[int, tuple[Table, object]] = {}
        self._open: dict[int, Callable[[], None]] = {}
        self._marks: dict[int, Mark] = {}
        self._ends: dict[int, select.poll] = {}

    @classmethod
    def open(cls, group: Group, lane: str, timeout_s: float) -> HostMemory | None:
        """The memories of the members of `group`, which all call this; it talks over `lane`. None if any cannot."""
        made = cls(group.ranks, group.coord, timeout_s)
        # Both: the lane's members, in the order of the table of groups.
        found = gather_values(made._cards[0], group.lane(lane))
        made._cards = cards = [_Card(host and tuple(host), *rest) for host, *rest in found]
        hosts = {card.host for card in cards}
        # Watched first: whoever has the token then is the process that is watched.
        able = len(hosts) == 1 and None not in hosts and made._watch() and all(map(made._can_reach, made.peers))
        return made if all(gather_values(able, group.lane(lane))) else None

    def offer(self, tensors: Sequence[Tensor], mark: Mark, complete: Callable[[], None] | None = None) -> int:
        """Lets every peer read `tensors`; returns the offer's number. All members make their offers in one order, which
        `table` verifies: each says by `mark` what it is.

        complete: reads what the peers offer for this one, and returns when they are done with it. Called where RING offers are
        open, as this one is; every rank would wait there for the others to read.
        """
        number = self._num_offers = self._num_offers + 1
        if number > RING:
            self._open.pop(number - RING, _nothing)()
            self.is_read(number - RING, mark.what)
        if complete is not None:
            self._open[number] = complete
        table = (ctypes.c_int64 * len(tensors))(*(one.data_ptr() for one in tensors))
        words = _words_of(mark)
        self._tables[number % RING] = table, words  # alive while others may read them
        self._marks[number % RING] = mark
        told = (mark.number, mark.num_bytes, ctypes.addressof(words), len(words))
        card = (ctypes.c_int64 * _FIELDS)(ctypes.addressof(table), len(tensors), *told, number)
        at = 1 + self.coord * _PEER + (number % RING) * _FIELDS
        before = (_FIELDS - 1) * _WORD
        parts = [Span(ctypes.addressof(card), before), Span(ctypes.addressof(card) + before, _WORD)]
        for peer in self.peers:
            address = self._cards[peer].inbox + at * _WORD
            self._write(peer, parts, [Span(address, before), Span(address + before, _WORD)], mark.what)
        return number

    def table(self, peer: int, number: int, what: str) -> Sequence[int]:
        """Where the tensors of the peer's offer `number` lie in its memory; waits for the offer.

        Raises RunError `ranks-differ` where this rank's offer of that number is of something else, or of another length.
        """
        at = 1 + peer * _PEER + (number % RING) * _FIELDS
        self._await(at + _FIELDS - 1, number, peer, what)
        table, length, told, num_bytes, words, num_words = self._inbox[at : at + _FIELDS - 1]
        own = self._marks[number % RING]
        if (told, num_bytes) != (own.number, own.num_bytes):
            raise differs(own, self.ranks[self.coord], self._words_at(peer, words, num_words), self.ranks[peer])
        addresses: Table = (ctypes.c_int64 * length)()
        here = Span(ctypes.addressof(addresses), ctypes.sizeof(addresses))
        self.read(peer, [here], [Span(table, here.num_bytes)], what)
        return list(addresses)

    def read(self, peer: int, here: Sequence[Span], there: Sequence[Span], what: str) -> None:
        """Copies `there`, of the peer's memory, into `here`; both are as long."""
        num_bytes = -1 if self._has_ended(peer) else read(self._cards[peer].pid, here, there)
        self._copied(num_bytes, there, peer, what)

    def done(self, peer: int, number: int, what: str) -> None:
        """This rank has read, or will never read, the peer's offer `number`."""
        word = ctypes.c_int64(number)
        at = 1 + self.coord * _PEER + RING * _FIELDS + number % RING
        there = [Span(self._cards[peer].inbox + at * _WORD, _WORD)]
        self._write(peer, [Span(ctypes.addressof(word), _WORD)], there, what)

    def is_offered(self, number: int) -> bool:
        """Whether every peer has made its offer `number`; asks without waiting."""
        return all(
            self._inbox[1 + peer * _PEER + (number % RING) * _FIELDS + _FIELDS - 1] >= number for peer in self.peers
        )

    def was_read(self, number: int) -> bool:
        """Whether every peer is done with this rank's offer `number`; asks without waiting."""
        return all(self._inbox[1 + peer * _PEER + RING * _FIELDS + number % RING] >= number for peer in self.peers)

    def is_read(self, number: int, what: str) -> None:
        """Waits until every peer is done with this rank's offer `number`."""
        for peer in self.peers:
            self._await(1 + peer * _PEER + RING * _FIELDS + number % RING, number, peer, what)
        self._open.pop(number, None)

    def _await(self, at: int, number: int, peer: int, what: str) -> None:
        """Until the word `at` of the inbox is `number`, or later."""
        inbox = self._inbox
        began = looked = time.perf_counter()
        while inbox[at] < number:
            now = time.perf_counter()
            if now - began < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            if now - looked > _LOOK_S:
                looked = now
                if not self._can_reach(peer):
                    raise self._failed(peer, what, "it has ended")
                if now - began > self.timeout_s:
                    raise self._failed(peer, what, f"it did not come within {self.timeout_s:g} s")

    def _write(self, peer: int, here: Sequence[Span], there: Sequence[Span], what: str) -> None:
        """Copies `here` into the peer's inbox, while that is the process that has it."""
        num_bytes = -1 if self._has_ended(peer) else write(self._cards[peer].pid, here, there)
        self._copied(num_bytes, there, peer, what)

    def _words_at(self, peer: int, address: int, length: int) -> str:
        """What the peer calls its offer; "" where it can no longer be asked."""
        words = ctypes.create_string_buffer(length)
        here, there = [Span(ctypes.addressof(words), length)], [Span(address, length)]
        is_there = not self._has_ended(peer) and read(self._cards[peer].pid, here, there) == length
        return words.raw.rstrip(b"\0").decode("utf-8", "replace") if is_there else ""

    def _copied(self, num_bytes: int, spans: Sequence[Span], peer: int, what: str) -> None:
        if num_bytes != sum(span.num_bytes for span in spans):
            raise self._failed(peer, what, "its memory cannot be reached any more")

    def _failed(self, peer: int, what: str, why: str) -> RunError:
        return RunError(
            "collective-failed",
            f"the exchange of {what} with rank {self.ranks[peer]} failed on rank {self.ranks[self.coord]}: {why}",
            hint="another rank of the group stopped, or did not come within [limits] collective_timeout_s",
        )

    def _watch(self) -> bool:
        """Whether the ends of all peers can be seen: Linux 5.3 can, if nothing forbids it."""
        watched: list[int] = []
        weakref.finalize(self, _close, watched)
        for peer in self.peers:
            try:
                watched.append(os.pidfd_open(self._cards[peer].pid))
            except (AttributeError, OSError):
                return False
            self._ends[peer] = select.poll()
            self._ends[peer].register(watched[-1], select.POLLIN)
        return True

    def _has_ended(self, peer: int) -> bool:
        """Whether its process is gone, and its number perhaps another's; 1 us."""
        return bool(self._ends[peer].poll(0))

    def _can_reach(self, peer: int) -> bool:
        """Whether the peer's inbox can be read, and written; it begins with its token."""
        if self._has_ended(peer):
            return False
        card = self._cards[peer]
        word = ctypes.c_int64()
        here, there = [Span(ctypes.addressof(word), _WORD)], [Span(card.inbox, _WORD)]
        if read(card.pid, here, there) != _WORD or word.value != card.token:
            return False
        return write(card.pid, here, there) == _WORD


@lru_cache(maxsize=4096)
def _words_of(mark: Mark) -> ctypes.Array[ctypes.c_char]:
    """The words of `mark`, at an address."""
    return ctypes.create_string_buffer(mark.words)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _nothing() -> None:
    """What completes an offer that is complete."""


def _host() -> Hashable:
    """Which machine, and which numbering of processes; None where memory of others cannot be read, or that cannot be told."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        return boot, NUMBERING.stat().st_ino
    except OSError:  # a /proc that shows less, as in some containers
        return None

"""Connects the members of a group: where each has its inbox, what may be copied, and whether it is still there.

Both copies need the right to trace the peer, which same users have unless Yama or a container forbids it. `Connection.open`
tries, and answers None where any pair of ranks cannot. A peer is known by a descriptor of its process (`pidfd_open`), asked
before every copy: its number may be another's once it has ended. Only x86-64: an offer's number is written after its other
fields, and other processors may show that in another order (`offers`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from sley_cma.process_vm import MemorySpan, read, write
from sley_core.api.comm import Members, Turn, gather_values
from sley_core.errors import RunError

WORD_BYTES = 8

SLOTS = 1024
"""Offers of a ring for which there is room."""


class Offer(ctypes.Structure):
    """What a peer offers.

    table: the address of its table of the tensors' addresses, which has `num_tensors`. mark, num_bytes: what is exchanged
    (`marks`), and how long it is. words: the address of the words for it, `num_words` bytes. number: of the offer in its ring;
    the last field, and the last that is written.
    """

    table: int
    num_tensors: int
    mark: int
    num_bytes: int
    words: int
    num_words: int
    number: int

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("table", "num_tensors", "mark", "num_bytes", "words", "num_words", "number")
    )


OFFER_BYTES = ctypes.sizeof(Offer)
NUMBER_AT_BYTES = OFFER_BYTES - WORD_BYTES
"""Where in an offer its number begins."""

_OFFER_WORDS = OFFER_BYTES // WORD_BYTES
_RING_WORDS = SLOTS * (_OFFER_WORDS + 1)

_kept: list[ctypes.Array[ctypes.c_int64]] = []
"""The words of every inbox of this process: a peer of a run that failed may still write into them."""


class Inbox:
    """An inbox for `size` ranks with `num_rings` rings each, filled with zeros. words: all of it.

        token | of each peer, for each ring: SLOTS offers, then SLOTS numbers of this rank's offers that the peer has read

    Offer n of a ring lies in slot n % SLOTS. A word has 8 bytes and is at a multiple of 8, as all are.
    """

    def __init__(self, size: int, num_rings: int, token: int) -> None:
        self.num_rings = num_rings
        num_words = 1 + size * num_rings * _RING_WORDS
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * num_words).from_buffer(_pages(num_words * WORD_BYTES))
        self.words[0] = token
        _kept.append(self.words)

    @property
    def address(self) -> int:
        """Returns the address where it begins, with its token."""
        return ctypes.addressof(self.words)

    def offer(self, peer: int, ring: int, slot: int) -> Offer:
        """Returns a view of what the peer at coordinate `peer` offers in `slot` of ring number `ring`."""
        return Offer.from_buffer(self.words, self.offer_at(peer, ring, slot) * WORD_BYTES)

    def offer_at(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the word where the offer of `peer` in `slot` of a ring begins; the same in the inboxes of all
        members.
        """
        return 1 + (peer * self.num_rings + ring) * _RING_WORDS + slot * _OFFER_WORDS

    def number_at(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the word that has the number of the offer of `peer` in `slot` of a ring."""
        return self.offer_at(peer, ring, slot) + _OFFER_WORDS - 1

    def read_at(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the word in which `peer` writes the number of this rank's offer in `slot` of a ring once it has
        read it.
        """
        return 1 + (peer * self.num_rings + ring) * _RING_WORDS + SLOTS * _OFFER_WORDS + slot


def _pages(num_bytes: int) -> mmap.mmap:
    """Returns zeros that take no memory before they are written: of a ring that nobody uses there is nothing.

    Elsewhere than on Linux there is no attaching, but an inbox until the ranks have told each other so.
    """
    if sys.platform == "linux":
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


_YIELD_S = 1e-3
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 5e-4
_PART = 64
"""A rank that waits lets others run, and sleeps after a millisecond: for a part of what it has waited, so that it comes hardly
later. To look every 50 us takes 15 % of a core, from the rank for which it waits where there are more ranks."""

_LOOK_S = 0.5
"""How often a rank that waits looks whether the peer is still there."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NUMBERING = Path("/proc/self/ns/pid")


class _Card(NamedTuple):
    """How others find a rank: its machine, process, inbox, and the token with which that begins."""

    host: Hashable
    pid: int
    inbox: int
    token: int


class Connection:
    """Reads the memory of the members of a group, and writes into their inboxes. Made by `open`."""

    def __init__(self, members: Members, num_rings: int, timeout_s: float) -> None:
        self.members = members
        self.coord = members.coord
        self.peers = members.peers
        self.timeout_s = timeout_s
        self.inbox = Inbox(members.size, num_rings, secrets.randbits(62))
        self._cards = [_Card(_host(), os.getpid(), self.inbox.address, self.inbox.words[0])]
        self._ends: dict[int, select.poll] = {}

    @classmethod
    def open(cls, members: Members, num_rings: int, lane: dist.ProcessGroup, timeout_s: float) -> Connection | None:
        """Connects `members`, which all call this; they talk over `lane`. Returns None on all of them if any cannot.

        timeout_s: of every wait.
        """
        connection = cls(members, num_rings, timeout_s)
        # Both: the lane's members, in the order of the table of groups.
        values = gather_values(connection._cards[0], lane)
        connection._cards = cards = [_Card(host and tuple(host), *rest) for host, *rest in values]
        hosts = {card.host for card in cards}
        # Watched first: whoever has the token then is the process that is watched.
        able = (
            len(hosts) == 1 and None not in hosts and connection._watch() and all(map(connection._can_reach, connection.peers))
        )
        return connection if all(gather_values(able, lane)) else None

    def read(self, peer: int, here: Sequence[MemorySpan], there: Sequence[MemorySpan], what: str) -> None:
        """Copies `there`, of the memory of the peer at coordinate `peer`, into `here`; both are as long. Raises RunError
        `collective-failed` if it has ended, or its memory cannot be reached. what: for the message.
        """
        num_bytes = -1 if self._has_ended(peer) else read(self._cards[peer].pid, here, there)
        self._copied(num_bytes, there, peer, what)

    def try_read(self, peer: int, here: MemorySpan, there: MemorySpan) -> bool:
        """Copies `there`, of the peer's memory, into `here`; returns whether all of it could be copied. Never raises."""
        return not self._has_ended(peer) and read(self._cards[peer].pid, [here], [there]) == here.num_bytes

    def push(self, peer: int, here: Sequence[MemorySpan], at: int, what: str) -> None:
        """Copies the words of `here`, span after span, into the peer's inbox, from word number `at` on.

        Raises RunError `collective-failed` if the process that has the inbox has ended, or its memory cannot be reached.
        """
        address = self._cards[peer].inbox + at * WORD_BYTES
        there = []
        for span in here:
            there.append(MemorySpan(address, span.num_bytes))
            address += span.num_bytes
        num_bytes = -1 if self._has_ended(peer) else write(self._cards[peer].pid, here, there)
        self._copied(num_bytes, there, peer, what)

    def wait_until(self, is_true: Callable[[], bool], late: Callable[[], int], turn: Turn) -> None:
        """Calls `is_true` until it returns True; from a millisecond on sleeps in between, and holds no core.

        late: returns the coordinate of a peer for which that waits. turn: what the exchange is, for errors and for who asks who
        waits. Raises RunError `collective-failed` where that peer has ended, or does not come within `timeout_s`, and
        `ranks-differ` where ranks wait for each other.
        """
        began = looked = time.perf_counter()
        progress = turn.members.progress
        progress.waits(turn)
        while not is_true():
            now = time.perf_counter()
            if now - began < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(min(max((now - began) / _PART, _SLEEP_S), _LONGEST_SLEEP_S))
            if now - looked > _LOOK_S:
                looked = now
                peer = late()
                if not self._can_reach(peer):
                    raise turn.failed(self._failure(peer, turn.what, "it has ended"), False, self._rank_of(peer))
                if now - began > self.timeout_s:
                    why = f"it did not come within {self.timeout_s:g} s"
                    raise turn.failed(self._failure(peer, turn.what, why), True, self._rank_of(peer))
        progress.waited()

    def _copied(self, num_bytes: int, spans: Sequence[MemorySpan], peer: int, what: str) -> None:
        """Raises RunError `collective-failed` unless `num_bytes` is the length of `spans`: all was copied."""
        if num_bytes != sum(span.num_bytes for span in spans):
            message = self._failure(peer, what, "its memory cannot be reached any more")
            raise RunError("collective-failed", message, hint="another rank of the group stopped")

    def _failure(self, peer: int, what: str, why: str) -> str:
        """Returns the message of an exchange of `what` with a peer that failed, and why."""
        return f"the exchange of {what} with rank {self._rank_of(peer)} failed on rank {self.members.rank}: {why}"

    def _rank_of(self, peer: int) -> int:
        """Returns the global rank of the member at coordinate `peer`."""
        return self.members.ranks[peer]

    def _watch(self) -> bool:
        """Opens a descriptor of each peer's process, by which its end is seen; returns whether that works for all: from Linux
        5.3 on, if nothing forbids it. They are closed with this object.
        """
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
        """Returns whether the peer's process is gone, and its number perhaps another's. Takes 1 us."""
        return bool(self._ends[peer].poll(0))

    def _can_reach(self, peer: int) -> bool:
        """Returns whether the peer's process is there and its inbox, which begins with its token, can be read and written."""
        if self._has_ended(peer):
            return False
        card = self._cards[peer]
        word = ctypes.c_int64()
        here, there = [MemorySpan(ctypes.addressof(word), WORD_BYTES)], [MemorySpan(card.inbox, WORD_BYTES)]
        if read(card.pid, here, there) != WORD_BYTES or word.value != card.token:
            return False
        return write(card.pid, here, there) == WORD_BYTES


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _host() -> Hashable:
    """Returns what is equal for processes that may read each other: this machine's boot and its numbering of processes. None
    where that is not told, or this is not Linux on x86-64.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        return boot, NUMBERING.stat().st_ino
    except OSError:  # a /proc that shows less, as in some containers
        return None

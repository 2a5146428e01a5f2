"""Connects the members of a group, so that they can read each other's memory and write to each other's inboxes.

Linux's `process_vm_readv` and `process_vm_writev` copy between two processes. They require the right to trace the peer's
process, which processes of one user have unless Yama or a container forbids it. `Connection.open` returns None if any pair of
ranks lacks this right. A process descriptor (`pidfd_open`) identifies each peer, and is checked before every copy, since the
kernel may reuse the pid of a process that has ended. Only x86-64 is supported, since other processors may reorder the writes of
an offer (`offers`).
"""

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from sley_core.api.comm import Members, Turn, gather_values
from sley_core.errors import RunError

MAX_SPANS = 1024
"""The maximum number of spans per call (Linux's IOV_MAX)."""

MAX_BYTES = 1 << 30
"""The maximum number of bytes per call. Linux silently truncates longer copies to slightly less than 2 GiB (MAX_RW_COUNT)."""


class MemorySpan(NamedTuple):
    """A span of `num_bytes` bytes at `address` in the memory of a process."""

    address: int
    num_bytes: int


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None  # on other systems, ranks never connect


def read(pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Copies the spans `remote` of process `pid` to the spans `local` of equal sizes, and releases the GIL meanwhile. Returns
    the number of copied bytes, or -1 if a system call fails.
    """
    return _copy(_LIBC.process_vm_readv, pid, local, remote)


def write(pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Copies the spans `local`, one after another, to the spans `remote` of process `pid`, and releases the GIL meanwhile.
    Returns the number of copied bytes, or -1 if a system call fails.
    """
    return _copy(_LIBC.process_vm_writev, pid, local, remote)


def _copy(function: Any, pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Calls `function` as often as Linux's limits require, and returns the number of copied bytes, or -1 if a call fails."""
    num_copied = 0
    for local_part, remote_part in _split_calls(local, remote):
        local_vectors, remote_vectors = (
            (_IoVec * len(spans))(*(_IoVec(*span) for span in spans)) for spans in (local_part, remote_part)
        )
        num_bytes = int(function(pid, local_vectors, len(local_part), remote_vectors, len(remote_part), 0))
        if num_bytes < 0:
            return -1
        num_copied += num_bytes
    return num_copied


def _split_calls(
    local: Sequence[MemorySpan], remote: Sequence[MemorySpan]
) -> Iterator[tuple[Sequence[MemorySpan], Sequence[MemorySpan]]]:
    """Yields the local and the remote spans of each call. Divides spans between calls if together they exceed the limits."""
    if len(remote) <= MAX_SPANS and len(local) <= MAX_SPANS and sum(span.num_bytes for span in remote) <= MAX_BYTES:
        yield local, remote
        return
    local_part: list[MemorySpan] = []
    remote_part: list[MemorySpan] = []
    num_remaining = MAX_BYTES
    for local_span, remote_span in zip(local, remote, strict=True):
        assert local_span.num_bytes == remote_span.num_bytes, f"{local_span} for {remote_span}"
        offset = 0
        while offset < local_span.num_bytes:
            if not num_remaining or len(local_part) == MAX_SPANS:
                yield local_part, remote_part
                local_part, remote_part, num_remaining = [], [], MAX_BYTES
            size = min(local_span.num_bytes - offset, num_remaining)
            local_part.append(MemorySpan(local_span.address + offset, size))
            remote_part.append(MemorySpan(remote_span.address + offset, size))
            offset += size
            num_remaining -= size
    yield local_part, remote_part


WORD_BYTES = 8
"""The size of a word of an inbox, in bytes."""

SLOTS = 1024
"""The number of offers that a ring can hold."""


class Offer(ctypes.Structure):
    """An offer of tensors to a peer. All addresses are in the memory of the offering process. table: the address of a table
    with the addresses of `num_tensors` tensors. mark: the checksum of the exchange's `Mark`. num_bytes: the size of the
    exchange. text, text_bytes: the address and size of the mark's text. number: the number of the offer in its ring, which is
    written last.
    """

    table: int
    num_tensors: int
    mark: int
    num_bytes: int
    text: int
    text_bytes: int
    number: int

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("table", "num_tensors", "mark", "num_bytes", "text", "text_bytes", "number")
    )


NUMBER_OFFSET = ctypes.sizeof(Offer) - WORD_BYTES
"""The offset of the `number` field in an offer, in bytes."""

_OFFER_WORDS = ctypes.sizeof(Offer) // WORD_BYTES  # the size of an offer, in words
_RING_WORDS = SLOTS * (_OFFER_WORDS + 1)  # the size of a ring, in words; each slot has an offer and a confirmation

_inboxes: list[ctypes.Array[ctypes.c_int64]] = []
"""The memory of all inboxes of this process. It is never freed, since peers of a failed run may still write to it."""


class Inbox:
    """The memory to which `size` ranks write, each in `num_rings` rings. words: this memory, which is initially zero. Rings to
    which no rank writes take up no physical memory.

        token | for each peer and ring: SLOTS offers, then SLOTS numbers of this rank's offers that the peer has read

    Offer n of a ring is in slot n % SLOTS. A word has 8 bytes, aligned to 8.
    """

    def __init__(self, size: int, num_rings: int, token: int) -> None:
        self.num_rings = num_rings
        num_words = 1 + size * num_rings * _RING_WORDS
        memory = mmap.mmap(-1, num_words * WORD_BYTES)
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * num_words).from_buffer(memory)
        self.words[0] = token
        _inboxes.append(self.words)

    def offer(self, peer: int, ring: int, slot: int) -> Offer:
        """Returns a view of the offer from the member with coordinate `peer` in slot `slot` of ring `ring`."""
        return Offer.from_buffer(self.words, self.offer_index(peer, ring, slot) * WORD_BYTES)

    def offer_index(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the first word of a peer's offer. The index is the same in all members' inboxes."""
        return 1 + (peer * self.num_rings + ring) * _RING_WORDS + slot * _OFFER_WORDS

    def number_index(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the word with the number of a peer's offer."""
        return self.offer_index(peer, ring, slot) + _OFFER_WORDS - 1

    def confirmation_index(self, peer: int, ring: int, slot: int) -> int:
        """Returns the index of the word to which `peer` writes the number of this rank's offer after reading it."""
        return 1 + (peer * self.num_rings + ring) * _RING_WORDS + SLOTS * _OFFER_WORDS + slot


_YIELD_S = 1e-3  # how long in seconds a waiting rank yields its core before it sleeps
_MIN_SLEEP_S = 50e-6  # the shortest sleep in seconds
_MAX_SLEEP_S = 5e-4  # the longest sleep in seconds
_SLEEP_DIVISOR = 64
"""A waiting rank yields its core for the first millisecond. Then it repeatedly sleeps for 1/64 of the time that it has waited,
from 50 us to 0.5 ms, which delays it little. Polling always at 50 us would use 15% of a core, which the peer may need.
"""

_PEER_CHECK_S = 0.5
"""The interval, in seconds, at which a waiting rank checks whether its peer is alive."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file with a random id, which Linux creates at each boot."""

PID_NAMESPACE = Path("/proc/self/ns/pid")
"""A file whose inode identifies the pid namespace of this process."""


class _Address(NamedTuple):
    """The host id and pid of a rank, and the address and token of its inbox."""

    host: Hashable
    pid: int
    inbox: int
    token: int


class Connection:
    """Reads the memory of the members of a group, and writes to their inboxes. Use `open` to create one."""

    def __init__(self, members: Members, num_rings: int, timeout_s: float) -> None:
        self.members = members
        self.peers = members.peers
        self.timeout_s = timeout_s
        self.inbox = Inbox(members.size, num_rings, secrets.randbits(62))
        self._addresses = [_Address(_host_id(), os.getpid(), ctypes.addressof(self.inbox.words), self.inbox.words[0])]
        self._process_polls: dict[int, select.poll] = {}

    @classmethod
    def open(cls, members: Members, num_rings: int, channel: dist.ProcessGroup, timeout_s: float) -> "Connection | None":
        """Connects `members`, or returns None on all of them if any pair cannot connect. All members call it: it is a
        collective over `channel`. num_rings: the number of rings per peer. timeout_s: the time limit of every wait.
        """
        connection = cls(members, num_rings, timeout_s)
        # All members of the channel join both gathers. All ranks connect their groups in the same order.
        values = gather_values(connection._addresses[0], channel)
        connection._addresses = [_Address(host and tuple(host), *fields) for host, *fields in values]
        hosts = {address.host for address in connection._addresses}
        # Descriptors are opened before tokens are read, so that a correct token proves that the descriptor belongs to the peer.
        is_connected = (
            len(hosts) == 1
            and None not in hosts
            and connection._open_descriptors()
            and all(map(connection._can_reach, connection.peers))
        )
        return connection if all(gather_values(is_connected, channel)) else None

    def read(self, peer: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan], label: str) -> None:
        """Copies the spans `remote` of the peer's memory to the spans `local` of equal sizes. peer: the peer's coordinate.
        label: the description of the exchange for errors. Raises RunError `collective-failed` if the peer has ended or its
        memory cannot be read.
        """
        num_bytes = -1 if self._has_ended(peer) else read(self._addresses[peer].pid, local, remote)
        self._check_copy(num_bytes, remote, peer, label)

    def push(self, peer: int, local: Sequence[MemorySpan], index: int, label: str) -> None:
        """Copies the spans `local`, one after another, to the peer's inbox, starting at the word `index`. Raises RunError
        `collective-failed` if the peer has ended or its memory cannot be written.
        """
        address = self._addresses[peer].inbox + index * WORD_BYTES
        remote = []
        for span in local:
            remote.append(MemorySpan(address, span.num_bytes))
            address += span.num_bytes
        num_bytes = -1 if self._has_ended(peer) else write(self._addresses[peer].pid, local, remote)
        self._check_copy(num_bytes, remote, peer, label)

    def wait_until(self, condition: Callable[[], bool], late_peer: Callable[[], int | None], turn: Turn) -> None:
        """Calls `condition` until it returns True. After a millisecond, sleeps between the calls. late_peer: a function that
        returns the coordinate of a peer for which this rank waits, or None. turn: the description of the exchange. Raises
        RunError `collective-failed` if the late peer has ended, or if the wait for it exceeds `timeout_s`.
        """
        start = last_check = time.perf_counter()
        progress = turn.members.progress
        progress.begin_wait(turn)
        while not condition():
            time_s = time.perf_counter()
            if time_s - start < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(min(max((time_s - start) / _SLEEP_DIVISOR, _MIN_SLEEP_S), _MAX_SLEEP_S))
            if time_s - last_check > _PEER_CHECK_S:
                last_check, peer = time_s, late_peer()
                if peer is None:
                    continue
                if not self._can_reach(peer):
                    message = self._failure_message(peer, turn.label, "it has ended")
                    raise turn.wait_error(message, False, self.members.ranks[peer])
                if time_s - start > self.timeout_s:
                    message = self._failure_message(peer, turn.label, f"it did not arrive within {self.timeout_s:g} s")
                    raise turn.wait_error(message, True, self.members.ranks[peer])
        progress.end_wait()

    def _check_copy(self, num_bytes: int, spans: Sequence[MemorySpan], peer: int, label: str) -> None:
        """Raises RunError `collective-failed` unless `num_bytes` is the size of `spans`."""
        if num_bytes != sum(span.num_bytes for span in spans):
            message = self._failure_message(peer, label, "its memory can no longer be reached")
            raise RunError("collective-failed", message, hint="another rank of the group stopped")

    def _failure_message(self, peer: int, label: str, reason: str) -> str:
        return f"the exchange of {label} with rank {self.members.ranks[peer]} failed on rank {self.members.rank}: {reason}"

    def _open_descriptors(self) -> bool:
        """Opens descriptors of the peers' processes, which close when this object is freed. Returns whether all are open."""
        descriptors = ExitStack()
        weakref.finalize(self, descriptors.close)
        for peer in self.peers:
            try:
                descriptor = os.pidfd_open(self._addresses[peer].pid)  # needs Linux 5.3
            except (AttributeError, OSError):
                return False
            descriptors.callback(os.close, descriptor)
            self._process_polls[peer] = select.poll()
            self._process_polls[peer].register(descriptor, select.POLLIN)
        return True

    def _has_ended(self, peer: int) -> bool:
        """Returns whether the peer's process has ended, in which case its pid may now belong to another process. Takes about
        1 us.
        """
        return bool(self._process_polls[peer].poll(0))

    def _can_reach(self, peer: int) -> bool:
        """Returns whether the peer is alive, its inbox can be read and written, and the inbox has the expected token."""
        if self._has_ended(peer):
            return False
        address = self._addresses[peer]
        word = ctypes.c_int64()
        local, remote = [MemorySpan(ctypes.addressof(word), WORD_BYTES)], [MemorySpan(address.inbox, WORD_BYTES)]
        if read(address.pid, local, remote) != WORD_BYTES or word.value != address.token:
            return False
        return write(address.pid, local, remote) == WORD_BYTES


def _host_id() -> Hashable:
    """Returns the boot id and the inode of the pid namespace, which only processes on one host and in one namespace share.
    Returns None if they are unknown, or if this is not Linux on x86-64.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        boot_id = BOOT_ID.read_text(encoding="ascii").strip()
        return boot_id, PID_NAMESPACE.stat().st_ino
    except OSError:  # some containers hide parts of /proc
        return None

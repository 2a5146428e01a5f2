"""Keeps a row of offers: tensors that each member lets the others read, in one order on all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from sley_cma.connection import NUMBER_AT_BYTES, SLOTS, WORD_BYTES, Connection, Offer
from sley_cma.process_vm import MemorySpan
from sley_core.api.comm import Mark, Turn

RING = SLOTS
"""Offers that may be open at once; the next one completes the oldest first, on all ranks at the same place in their order."""

_Table = ctypes.Array[ctypes.c_int64]


class Offers:
    """What the members of `connection` offer in ring `ring` of their inboxes, for lane `lane`. Offers count from 1.

    The tensors of an offer are contiguous, and stay as they are until `wait_read` has returned.
    """

    def __init__(self, connection: Connection, lane: str, ring: int) -> None:
        self.connection = connection
        self._queue = f"{connection.members.axis} {lane} {ring}"
        self._progress = connection.members.progress
        self.peers = connection.peers
        self.coord = connection.coord
        self._inbox = connection.inbox
        self._ring = ring
        self._read_queues = {coord: f"{self._queue} of {coord}" for coord in range(connection.members.size)}
        self._num_offers = 0
        self._kept: dict[int, tuple[_Table, object]] = {}
        self._open: dict[int, Callable[[], None]] = {}
        self._marks: dict[int, Mark] = {}

    def offer(self, tensors: Sequence[Tensor], mark: Mark, complete: Callable[[], None] | None = None) -> int:
        """Lets every peer read `tensors` and returns the offer's number, from 1. If RING offers are open, first completes the
        oldest and waits until peers have read it.

        All members make their offers in one order, which `wait_table` verifies: each says by `mark` what it is. complete: reads
        what the peers offer for this one, and returns when they are done with it; called when the ring is full, to avoid a
        deadlock in which every rank waits for a reader.
        """
        number = self._num_offers = self._num_offers + 1
        self._progress.started(Turn("exchange", self.connection.members, mark.what, self._queue, number, None, mark.num_bytes))
        slot = number % RING
        if number > RING:
            completes = self._open.pop(number - RING, None)
            if completes is not None:
                completes()
            self.wait_read(number - RING, mark.what)
        if complete is not None:
            self._open[number] = complete
        table = (ctypes.c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        words = _words_of(mark)
        self._kept[slot] = table, words  # alive while others may read them
        self._marks[slot] = mark
        about = (mark.number, mark.num_bytes, ctypes.addressof(words), len(words))
        self._push(Offer(ctypes.addressof(table), len(tensors), *about, number), slot, mark.what)
        return number

    def wait_table(self, peer: int, number: int, what: str) -> Sequence[int]:
        """Waits for the peer's offer `number`; returns the address of each of its tensors in the peer's memory.

        Raises RunError `ranks-differ` where this rank's offer of that number is of something else, or of another length, and
        `collective-failed` where the peer has ended or does not come in time.
        """
        slot = number % RING
        self._wait_word(self._inbox.number_at(peer, self._ring, slot), number, peer, what, self._queue)
        offer = self._inbox.offer(peer, self._ring, slot)
        own = self._marks[slot]
        if (offer.mark, offer.num_bytes) != (own.number, own.num_bytes):
            members = self.connection.members
            self._progress.waits(self.turn(number, own.what))
            self._progress.failed("differs", members.ranks[peer])
            raise own.differs(members.rank, self._words_of(peer, offer), members.ranks[peer])
        addresses: _Table = (ctypes.c_int64 * offer.num_tensors)()
        here = MemorySpan(ctypes.addressof(addresses), ctypes.sizeof(addresses))
        self.read(peer, [here], [MemorySpan(offer.table, here.num_bytes)], what)
        return list(addresses)

    def read(self, peer: int, here: Sequence[MemorySpan], there: Sequence[MemorySpan], what: str) -> None:
        """Copies `there`, of the peer's memory, into `here`; both are as long. Raises RunError `collective-failed` if it cannot
        be read.
        """
        self.connection.read(peer, here, there, what)

    def done(self, peer: int, number: int, what: str) -> None:
        """Tells the peer that this rank has read, or will never read, its offer `number`, and notes that for who asks who
        waits.
        """
        word = ctypes.c_int64(number)
        at = self._inbox.read_at(self.coord, self._ring, number % RING)
        self.connection.push(peer, [MemorySpan(ctypes.addressof(word), WORD_BYTES)], at, what)
        queue, numbers = self._read_queues[peer], self._progress.numbers
        numbers[queue] = max(number, numbers.get(queue, 0))

    def is_offered(self, number: int) -> bool:
        """Returns whether every peer has made its offer `number`; never blocks."""
        return self._late(self._inbox.number_at, number) is None

    def is_read(self, number: int) -> bool:
        """Returns whether every peer is done with this rank's offer `number`; never blocks."""
        return self._late(self._inbox.read_at, number) is None

    def late_offerer(self, number: int) -> int:
        """Returns the coordinate of a peer that has not made its offer `number`; of any, where all have."""
        late = self._late(self._inbox.number_at, number)
        return self.peers[0] if late is None else late

    def late_reader(self, number: int) -> int:
        """Returns the coordinate of a peer that is not done with this rank's offer `number`; of any, where all are."""
        late = self._late(self._inbox.read_at, number)
        return self.peers[0] if late is None else late

    def wait_read(self, number: int, what: str) -> None:
        """Waits until every peer is done with this rank's offer `number`, which is then no longer open. Raises RunError
        `collective-failed` where one has ended or does not come in time.
        """
        for peer in self.peers:
            at = self._inbox.read_at(peer, self._ring, number % RING)
            self._wait_word(at, number, peer, what, self._read_queues[self.coord])
        self._open.pop(number, None)

    def turn(self, number: int, what: str) -> Turn:
        """Returns the description of a wait for the peers' offers `number`, by which others find out who waits for whom."""
        return Turn("exchange", self.connection.members, what, self._queue, number)

    def read_turn(self, number: int, what: str) -> Turn:
        """Returns the description of a wait until the peers are done with this rank's offer `number`, by which others find out
        who waits for whom.
        """
        return Turn("exchange", self.connection.members, what, self._read_queues[self.coord], number)

    def _wait_word(self, at: int, number: int, peer: int, what: str, queue: str) -> None:
        """Waits until the word `at` of the inbox, which `peer` writes, is `number` or more; numbers only grow.

        queue: of the numbers that peers count so.
        """
        words = self._inbox.words
        if words[at] < number:
            turn = Turn("exchange", self.connection.members, what, queue, number)
            self.connection.wait_until(lambda: words[at] >= number, lambda: peer, turn)

    def _late(self, at: Callable[[int, int, int], int], number: int) -> int | None:
        """Returns the first peer that has not come to `number` at its word of this rank's inbox, whose index `at` returns; None
        if all have.
        """
        words, slot = self._inbox.words, number % RING
        return next((peer for peer in self.peers if words[at(peer, self._ring, slot)] < number), None)

    def _push(self, offer: Offer, slot: int, what: str) -> None:
        """Writes `offer` into every peer's inbox: the number last, since who sees it takes the other fields for written.

        That holds because (1) `process_vm_writev` copies span after span, in the order given (its man page), so the fields are
        stored before the number; (2) they are spans of their own: within one copy by `rep movs` x86-64 may store in any order,
        between two it may not (Intel SDM, volume 3, "Fast-String Operation and Out-of-Order Stores"); (3) x86-64 shows the
        stores of a core to all others in their order, and lets no load pass an earlier one, so the peer, which loads the number
        first, loads fields that are there. What an offer points to was written before all of this by the same process.
        """
        start = ctypes.addressof(offer)
        spans = [MemorySpan(start, NUMBER_AT_BYTES), MemorySpan(start + NUMBER_AT_BYTES, WORD_BYTES)]
        at = self._inbox.offer_at(self.coord, self._ring, slot)
        for peer in self.peers:
            self.connection.push(peer, spans, at, what)

    def _words_of(self, peer: int, offer: Offer) -> str:
        """Returns what the peer calls its offer; "" where it can no longer be asked."""
        words = ctypes.create_string_buffer(offer.num_words)
        here = MemorySpan(ctypes.addressof(words), offer.num_words)
        was_read = self.connection.try_read(peer, here, MemorySpan(offer.words, offer.num_words))
        return words.raw.rstrip(b"\0").decode("utf-8", "replace") if was_read else ""


@lru_cache(maxsize=4096)
def _words_of(mark: Mark) -> ctypes.Array[ctypes.c_char]:
    """Returns the words of `mark`, at an address."""
    return ctypes.create_string_buffer(mark.words)

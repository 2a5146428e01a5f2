"""Manages a sequence of offers, which all members make in the same order. An offer lets peers read some tensors of a member."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from sley_cma.connection import NUMBER_OFFSET, SLOTS, WORD_BYTES, Connection, MemorySpan, Offer
from sley_core.api.comm import Mark, Turn
from sley_core.errors import RunError

MAX_OPEN_OFFERS = SLOTS
"""The maximum number of open offers. If this many are open, a rank completes the oldest offer before it makes the next."""

_Table = ctypes.Array[ctypes.c_int64]
"""An array of the addresses of an offer's tensors."""


class Offers:
    """Makes this rank's offers to the members of `connection`, and reads the members' offers, in ring `ring` of the inboxes.
    Offers are numbered from 1. channel: the name of the channel, for errors. The tensors of an offer must be contiguous, and
    must not be written before `wait_read` returns.
    """

    def __init__(self, connection: Connection, channel: str, ring: int) -> None:
        self.connection = connection
        self.members = connection.members
        self.peers = connection.members.peers
        self.coord = connection.members.coord
        self._queue = f"{self.members.axis} {channel} {ring}"
        self._progress = self.members.progress
        self._inbox = connection.inbox
        self._ring = ring
        self._read_queues = {coord: f"{self._queue} of {coord}" for coord in range(self.members.size)}
        self._num_offers = 0
        self._buffers: dict[int, tuple[_Table, object]] = {}
        self._open_offers: dict[int, Callable[[], None]] = {}
        self._marks: dict[int, Mark] = {}

    def offer(self, tensors: Sequence[Tensor], mark: Mark, complete: Callable[[], None] | None = None) -> int:
        """Lets every peer read `tensors`, and returns the number of the offer. complete: a function that reads the peers'
        offers with this number, and waits until the peers have read this offer, or None. If MAX_OPEN_OFFERS are open, the
        oldest is completed first, since otherwise ranks could wait for each other. All members must make their offers in the
        same order, which `wait_addresses` checks by `mark`.
        """
        number = self._num_offers = self._num_offers + 1
        self._progress.add_turn(Turn("exchange", self.members, mark.label, self._queue, number, None, mark.num_bytes))
        slot = number % MAX_OPEN_OFFERS
        if number > MAX_OPEN_OFFERS:
            complete_oldest = self._open_offers.pop(number - MAX_OPEN_OFFERS, None)
            if complete_oldest is not None:
                complete_oldest()
            self.wait_read(number - MAX_OPEN_OFFERS, mark.label)
        if complete is not None:
            self._open_offers[number] = complete
        table = (ctypes.c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        text = ctypes.create_string_buffer(mark.encoded_text)
        self._buffers[slot] = table, text  # keeps them alive, since peers may read them
        self._marks[slot] = mark
        mark_fields = (mark.checksum, mark.num_bytes, ctypes.addressof(text), len(text))
        self._push(Offer(ctypes.addressof(table), len(tensors), *mark_fields, number), slot, mark.label)
        return number

    def wait_addresses(self, peer: int, number: int, label: str) -> Sequence[int]:
        """Waits for the peer's offer `number`, and returns the addresses of its tensors in the peer's memory. Raises RunError
        `ranks-differ` if this rank's offer `number` has another mark or size, and `collective-failed` if the peer has ended or
        exceeds the time limit.
        """
        slot = number % MAX_OPEN_OFFERS
        self._wait_word(self._inbox.number_index(peer, self._ring, slot), number, peer, label, is_read=False)
        offer = self._inbox.offer(peer, self._ring, slot)
        mark = self._marks[slot]
        if (offer.mark, offer.num_bytes) != (mark.checksum, mark.num_bytes):
            rank = self.members.ranks[peer]
            self._progress.begin_wait(self.turn(number, mark.label))
            self._progress.fail_wait("differs", rank)
            raise mark.mismatch_error(self.members.rank, self._read_mark_text(peer, offer), rank)
        addresses: _Table = (ctypes.c_int64 * offer.num_tensors)()
        local = MemorySpan(ctypes.addressof(addresses), ctypes.sizeof(addresses))
        self.connection.read(peer, [local], [MemorySpan(offer.table, local.num_bytes)], label)
        return list(addresses)

    def finish_read(self, peer: int, number: int, label: str) -> None:
        """Tells the peer that this rank no longer reads the peer's offer `number`, and records the read as progress."""
        word = ctypes.c_int64(number)
        index = self._inbox.confirmation_index(self.coord, self._ring, number % MAX_OPEN_OFFERS)
        self.connection.push(peer, [MemorySpan(ctypes.addressof(word), WORD_BYTES)], index, label)
        queue, numbers = self._read_queues[peer], self._progress.last_numbers
        numbers[queue] = max(number, numbers.get(queue, 0))

    def late_offerer(self, number: int) -> int | None:
        """Returns the coordinate of a peer that has not yet made its offer `number`, or None. Never blocks."""
        return self._late_peer(self._inbox.number_index, number)

    def late_reader(self, number: int) -> int | None:
        """Returns the coordinate of a peer that has not yet read this rank's offer `number`, or None. Never blocks."""
        return self._late_peer(self._inbox.confirmation_index, number)

    def wait_read(self, number: int, label: str) -> None:
        """Waits until every peer has read this rank's offer `number`, and closes the offer. Raises RunError `collective-failed`
        if a peer has ended or exceeds the time limit.
        """
        for peer in self.peers:
            index = self._inbox.confirmation_index(peer, self._ring, number % MAX_OPEN_OFFERS)
            self._wait_word(index, number, peer, label, is_read=True)
        self._open_offers.pop(number, None)

    def turn(self, number: int, label: str, *, is_read: bool = False) -> Turn:
        """Returns the description of a wait for the peers' offers `number` or, if `is_read`, for reads of this rank's offer."""
        queue = self._read_queues[self.coord] if is_read else self._queue
        return Turn("exchange", self.members, label, queue, number)

    def _wait_word(self, index: int, number: int, peer: int, label: str, *, is_read: bool) -> None:
        """Waits until the inbox's word `index`, which `peer` writes, is at least `number`. is_read: if it confirms a read."""
        words = self._inbox.words
        if words[index] < number:
            turn = self.turn(number, label, is_read=is_read)
            self.connection.wait_until(lambda: words[index] >= number, lambda: peer, turn)

    def _late_peer(self, word_index: Callable[[int, int, int], int], number: int) -> int | None:
        """Returns the first peer whose word, at `word_index(peer, ring, slot)` of the inbox, is below `number`, or None."""
        words, slot = self._inbox.words, number % MAX_OPEN_OFFERS
        return next((peer for peer in self.peers if words[word_index(peer, self._ring, slot)] < number), None)

    def _push(self, offer: Offer, slot: int, label: str) -> None:
        """Writes `offer` to every peer's inbox, and its number last, so that a peer that sees the number sees all fields.

        Three facts guarantee this order. (1) `process_vm_writev` copies spans in order (its man page), so it stores the fields
        before the number. (2) The two are separate spans. x86-64 may reorder stores within a copy by `rep movs`, but not
        between two copies (Intel SDM, volume 3, "Fast-String Operation and Out-of-Order Stores"). (3) On x86-64, all cores see
        the stores of a core in order, and loads are not reordered. So a peer that first loads the number then loads the written
        fields. The table and the text of the offer were written earlier.
        """
        start = ctypes.addressof(offer)
        spans = [MemorySpan(start, NUMBER_OFFSET), MemorySpan(start + NUMBER_OFFSET, WORD_BYTES)]
        index = self._inbox.offer_index(self.coord, self._ring, slot)
        for peer in self.peers:
            self.connection.push(peer, spans, index, label)

    def _read_mark_text(self, peer: int, offer: Offer) -> str:
        """Returns the text of the mark of a peer's offer, or an empty text if the peer's memory cannot be read."""
        text = ctypes.create_string_buffer(offer.text_bytes)
        local = MemorySpan(ctypes.addressof(text), offer.text_bytes)
        with suppress(RunError):
            self.connection.read(peer, [local], [MemorySpan(offer.text, offer.text_bytes)], "a mark")
        return text.raw.rstrip(b"\0").decode("utf-8", "replace")

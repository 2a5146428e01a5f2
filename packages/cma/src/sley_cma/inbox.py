"""Lays out the memory of a rank that its peers write into: who offers what, and who has read what.

    token | of each peer, for each ring: SLOTS offers, then SLOTS numbers of this rank's offers that the peer has read

Offer n of a ring lies in slot n % SLOTS. A word has 8 bytes and is at a multiple of 8, as all are.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

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
    """An inbox for `size` ranks with `num_rings` rings each, filled with zeros. words: all of it."""

    def __init__(self, size: int, num_rings: int, token: int) -> None:
        self.num_rings = num_rings
        num_words = 1 + size * num_rings * _RING_WORDS
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * num_words).from_buffer(
            _pages(num_words * WORD_BYTES)
        )
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

"""Marks say what an exchange is and how long it is. Ranks compare marks before they read any data.

Two different exchanges have different marks: by operation, words, names, sizes or dtypes of the tensors, or their order. With
cross-memory attach the mark lies beside the addresses. On sockets it is sent ahead in a message of `HEADER_BYTES`, and is in
the tags of the messages that follow, so that a message of another length is never accepted.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.errors import RunError

HEADER_BYTES = 192
_FORMAT = struct.Struct(f"<qq{HEADER_BYTES - 16}s")
_BITS = 0x7FFFFFFF
_DTYPES = {
    dtype: number
    for number, dtype in enumerate(
        sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str), start=1
    )
}

HINT = (
    "ranks that share weights must run the same modules in the same order: does a forward depend on its data, or draw which "
    "layers it skips (LayerDrop, stochastic depth)? Draws are seeded per micro-batch, so ranks differ in them: skip by "
    "multiplying a layer's output, or draw from a seed of your own that is the same on all ranks"
)


class Mark(NamedTuple):
    """Identifies an exchange. what: in words. number: 31-bit checksum that ranks compare. num_bytes: its length."""

    what: str
    number: int
    num_bytes: int

    @classmethod
    def of(cls, operation: str, what: str, tensors: Iterable[Tensor], contents: int = 0) -> Mark:
        """Returns the mark of `operation` on `tensors`; all ranks pass the same sizes and dtypes, in the same order.

        what: describes it, the same on all ranks. contents: a checksum of what the words do not cover (`checksum`).
        """
        sizes = array("q", (contents,))
        num_bytes = 0
        for tensor in tensors:
            num_bytes += tensor.nbytes
            sizes.append(tensor.nbytes)
            sizes.append(_DTYPES[tensor.dtype])
        return cls(what, zlib.crc32(sizes, _crc(operation, what)) & _BITS, num_bytes)

    def differs(self, rank: int, theirs: str, peer: int) -> RunError:
        """Returns the RunError `ranks-differ` of rank `rank`, which exchanges this while rank `peer` exchanges `theirs`."""
        here = self.words.decode()
        there = "other parts of it" if theirs == here else theirs or "something else"
        return RunError("ranks-differ", f"rank {rank} exchanges {here} where rank {peer} exchanges {there}", hint=HINT)

    @property
    def words(self) -> bytes:
        """Encoded words and length, for the peers' error messages."""
        return _words(self.what, self.num_bytes)

    def header(self) -> Tensor:
        """Returns the mark as a message, uint8 [HEADER_BYTES]; `of_header` reads it."""
        return torch.frombuffer(bytearray(_FORMAT.pack(self.number, self.num_bytes, self.words)), dtype=torch.uint8)


def of_header(header: Tensor) -> Mark:
    number, num_bytes, words = _FORMAT.unpack(bytes(header.tolist()))
    return Mark(words.rstrip(b"\0").decode("utf-8", "replace"), number, num_bytes)


def checksum(names: Iterable[str]) -> int:
    """Returns a checksum of `names` in their order, the same in every process."""
    crc = 0
    for name in names:
        crc = zlib.crc32(name.encode(), zlib.crc32(b"\0", crc))
    return crc


@lru_cache(maxsize=4096)
def _crc(operation: str, what: str) -> int:
    return zlib.crc32(f"{operation}\0{what}".encode())


@lru_cache(maxsize=4096)
def _words(what: str, num_bytes: int) -> bytes:
    size = f" ({num_bytes} bytes)"
    room = HEADER_BYTES - 16 - len(size)
    return what.encode()[:room].decode("utf-8", "ignore").encode() + size.encode()


class Exchanged(NamedTuple):
    """Summarises a rank's exchanges with `ranks`: how many, the checksum of all, and the last one in words."""

    ranks: tuple[int, ...]
    times: int
    number: int
    last: str


class ExchangeLog:
    """Logs the exchanges of one group since the last `clear`, in their order on each lane; lanes are independent.

    A backend's own collectives have no place for a mark, so ranks that exchange different things there get wrong numbers. Every
    rank keeps the marks of a step in one checksum per lane; the sum that ends the step shows whether all have the same, and if
    not no weight is changed (`compare`).
    """

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}
        self._count = 0
        self._last = ""

    def add(self, lane: str, mark: Mark) -> None:
        self._lanes[lane] = zlib.crc32(mark.number.to_bytes(4, "little"), self._lanes.get(lane, 0))
        self._count += 1
        self._last = mark.what

    def clear(self) -> None:
        """Discards the log, when a step or an evaluation begins."""
        self._lanes.clear()
        self._count = 0
        self._last = ""

    def exchanged(self, ranks: tuple[int, ...]) -> Exchanged | None:
        """Returns a summary of the log; None if it is empty. ranks: the group's, copied into it."""
        if not self._count:
            return None
        number = 0
        for lane, value in sorted(self._lanes.items()):
            number = zlib.crc32(f"{lane} {value}".encode(), number)
        return Exchanged(ranks, self._count, number, self._last)

"""What an exchange is and how long: every rank says it, and compares what the others say before it takes a byte.

Two exchanges that are not the same have other marks: another operation, other words, other names, sizes or dtypes of what is
exchanged, another order of it. By cross-memory attach the mark lies beside the addresses; on sockets it goes ahead in a message
of `HEADER_BYTES`, and into the tags of those that follow, so that no message is ever taken for one of another length.
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
    """What an exchange is. what: in words. number: by which ranks see that it is the same, 31 bits. num_bytes: how long."""

    what: str
    number: int
    num_bytes: int

    @property
    def words(self) -> bytes:
        """For the others' errors: what it is, and how long."""
        return _words(self.what, self.num_bytes)

    def header(self) -> Tensor:
        """uint8 [HEADER_BYTES], as `of_header` reads it."""
        return torch.frombuffer(bytearray(_FORMAT.pack(self.number, self.num_bytes, self.words)), dtype=torch.uint8)


def mark_of(operation: str, what: str, tensors: Iterable[Tensor], contents: int = 0) -> Mark:
    """The mark of `operation` on `tensors`, which all ranks give with the same sizes and dtypes, in this order.

    what: the words for it, the same on all ranks. contents: a checksum of what the words leave open (`checksum`).
    """
    sizes = array("q", (contents,))
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.nbytes
        sizes.append(tensor.nbytes)
        sizes.append(_DTYPES[tensor.dtype])
    return Mark(what, zlib.crc32(sizes, _crc(operation, what)) & _BITS, num_bytes)


def of_header(header: Tensor) -> Mark:
    """The mark that a peer sent, with its words for it."""
    number, num_bytes, words = _FORMAT.unpack(bytes(header.tolist()))
    return Mark(words.rstrip(b"\0").decode("utf-8", "replace"), number, num_bytes)


def checksum(names: Iterable[str]) -> int:
    """A number for `names` in their order, the same in every process."""
    found = 0
    for name in names:
        found = zlib.crc32(name.encode(), zlib.crc32(b"\0", found))
    return found


def differs(own: Mark, rank: int, theirs: str, peer: int) -> RunError:
    """The error of rank `rank`, which exchanges `own` where rank `peer` says that it exchanges `theirs`."""
    here = own.words.decode()
    return RunError(
        "ranks-differ",
        f"rank {rank} exchanges {here} where rank {peer} exchanges {_theirs(here, theirs)}",
        hint=HINT,
    )


def _theirs(here: str, theirs: str) -> str:
    if theirs == here:
        return "other parts of it"
    return theirs or "something else"


@lru_cache(maxsize=4096)
def _crc(operation: str, what: str) -> int:
    return zlib.crc32(f"{operation}\0{what}".encode())


@lru_cache(maxsize=4096)
def _words(what: str, num_bytes: int) -> bytes:
    size = f" ({num_bytes} bytes)"
    room = HEADER_BYTES - 16 - len(size)
    return what.encode()[:room].decode("utf-8", "ignore").encode() + size.encode()

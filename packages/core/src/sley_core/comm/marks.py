"""Identifies exchanges by marks, which ranks compare before they read any data.

Exchanges have different marks if they differ in operation, description, or the order, sizes or dtypes of tensors. With
cross-memory attach the mark is stored with the addresses. On sockets it is sent first, in a message of `HEADER_BYTES`, and is
the tag of the messages that follow, so that a message of another length is never accepted.
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
        sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str), start=1
    )
}

HINT = (
    "ranks that share weights must run the same modules in the same order. Does a forward depend on "
    "its data, or skip layers at random (LayerDrop, stochastic depth)? Random draws are seeded per "
    "microbatch and differ between ranks. To skip a layer, multiply its output by 0 or 1, or draw "
    "from your own generator with the same seed on all ranks"
)


class Mark(NamedTuple):
    """Identifies an exchange. label: the description. number: a 31-bit checksum that ranks compare. num_bytes: the length."""

    label: str
    number: int
    num_bytes: int

    @classmethod
    def from_tensors(cls, operation: str, label: str, tensors: Iterable[Tensor], contents: int = 0) -> Mark:
        """Returns the mark of `operation` on `tensors`, whose order, sizes and dtypes must be equal on all ranks. label: the
        description, equal on all ranks. contents: a checksum of additional content to compare (`checksum`).
        """
        sizes = array("q", (contents,))
        num_bytes = 0
        for tensor in tensors:
            num_bytes += tensor.nbytes
            sizes.append(tensor.nbytes)
            sizes.append(_DTYPES[tensor.dtype])
        return cls(label, zlib.crc32(sizes, _crc(operation, label)) & _BITS, num_bytes)

    def mismatch_error(self, rank: int, peer_exchange: str, peer: int) -> RunError:
        """Returns the error `ranks-differ`: `rank` makes this exchange, but rank `peer` makes `peer_exchange`."""
        local_text = self.encoded_text.decode()
        peer_text = "other parts of it" if peer_exchange == local_text else peer_exchange or "something else"
        return RunError("ranks-differ", f"rank {rank} exchanges {local_text}, but rank {peer} exchanges {peer_text}", hint=HINT)

    @property
    def encoded_text(self) -> bytes:
        """Returns the encoded description and length, for the peers' error messages."""
        return _encode_text(self.label, self.num_bytes)

    def header(self) -> Tensor:
        """Returns the mark as a header, uint8 [HEADER_BYTES], for `mark_from_header`."""
        return torch.frombuffer(bytearray(_FORMAT.pack(self.number, self.num_bytes, self.encoded_text)), dtype=torch.uint8)


def mark_from_header(header: Tensor) -> Mark:
    number, num_bytes, encoded_text = _FORMAT.unpack(bytes(header.tolist()))
    return Mark(encoded_text.rstrip(b"\0").decode("utf-8", "replace"), number, num_bytes)


def checksum(names: Iterable[str]) -> int:
    """Returns a checksum of `names` in order, equal in all processes."""
    crc = 0
    for name in names:
        crc = zlib.crc32(name.encode(), zlib.crc32(b"\0", crc))
    return crc


@lru_cache(maxsize=4096)
def _crc(operation: str, label: str) -> int:
    return zlib.crc32(f"{operation}\0{label}".encode())


@lru_cache(maxsize=4096)
def _encode_text(label: str, num_bytes: int) -> bytes:
    size = f" ({num_bytes} bytes)"
    room = HEADER_BYTES - 16 - len(size)
    return label.encode()[:room].decode("utf-8", "ignore").encode() + size.encode()


class ExchangeSummary(NamedTuple):
    """Summarises a rank's exchanges with `ranks`: their count and checksum, and the description of the last one."""

    ranks: tuple[int, ...]
    times: int
    number: int
    last: str


class ExchangeLog:
    """Logs the exchanges of one group since the last `clear`, in order on each channel.

    A backend's collectives carry no mark, so ranks that exchange different tensors would get wrong numbers. Each rank therefore
    computes one checksum of a step's marks per channel. Ranks compare the checksums before the step ends, and change no weight
    if they differ.
    """

    def __init__(self) -> None:
        self._channels: dict[str, int] = {}
        self._count = 0
        self._last = ""

    def add(self, channel: str, mark: Mark) -> None:
        self._channels[channel] = zlib.crc32(mark.number.to_bytes(4, "little"), self._channels.get(channel, 0))
        self._count += 1
        self._last = mark.label

    def clear(self) -> None:
        """Discards the log at the start of a step or an evaluation."""
        self._channels.clear()
        self._count = 0
        self._last = ""

    def summary(self, ranks: tuple[int, ...]) -> ExchangeSummary | None:
        """Returns a summary of the log, or None if it is empty. ranks: the ranks of the group."""
        if not self._count:
            return None
        number = 0
        for channel, value in sorted(self._channels.items()):
            number = zlib.crc32(f"{channel} {value}".encode(), number)
        return ExchangeSummary(ranks, self._count, number, self._last)

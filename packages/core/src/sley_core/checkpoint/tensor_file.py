"""Files of safetensors: written directly from the memory of tensors, and read by byte ranges.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, bytes from .. to | data

The header says where each tensor begins in the whole one, as torch.distributed.checkpoint reads it
(`HuggingFaceStorageReader`), and of which run, step and rank the file is. Nothing in a file can run code.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sley_core.checkpoint.rectangles import Rectangle
from sley_core.weight_files.write import BY_NAME, DTYPES

CHUNK_BYTES = 16 << 20
"""What is handed to the system at once: the lock of Python is free meanwhile."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorPiece:
    """Describes a rectangle of the tensor `name` with the full `shape`; the name is the same in every layout.

    tensor: of the rectangle's sizes, on the host or the device; often a view of live memory.
    """

    name: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class InFile(NamedTuple):
    """Says where a file has a rectangle: bytes from `first` to before `last`, row by row."""

    dtype: torch.dtype
    rectangle: Rectangle
    first: int
    last: int


def header_of(pieces: Sequence[TensorPiece], facts: Mapping[str, Any]) -> bytes:
    """Returns the first bytes of a file that holds `pieces` in this order, each name once. facts: JSON, of the file itself."""
    offsets = {piece.name: {"saved_offsets": list(piece.rectangle.offsets)} for piece in pieces}
    assert len(offsets) == len(pieces), f"a name twice in one file: {[piece.name for piece in pieces]}"
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "sley": json.dumps(facts),
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
    }
    end = 0
    for piece in pieces:
        start, end = end, end + piece.num_bytes
        sizes = list(piece.rectangle.sizes)
        header[piece.name] = {"dtype": DTYPES[piece.tensor.dtype], "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def parsed(start: bytes) -> tuple[dict[str, InFile], dict[str, Any]]:
    """Returns a file's tensors by name, and its facts. start: at least the header. Raises ValueError for a header that is not
    ours.
    """
    if len(start) < _LENGTH.size or len(start) < header_bytes(start):
        raise ValueError("it ends within its header")
    begin = header_bytes(start)
    header = json.loads(start[_LENGTH.size : begin])
    about = header.pop("__metadata__")
    offsets, facts = json.loads(about["DCP_SHARDING_INFO"]), json.loads(about["sley"])
    found = {}
    for name, one in header.items():
        rectangle = Rectangle(tuple(offsets[name]["saved_offsets"]), tuple(one["shape"]))
        first, last = one["data_offsets"]
        found[name] = InFile(BY_NAME[one["dtype"]], rectangle, begin + first, begin + last)
    return found, facts


def header_bytes(start: bytes | bytearray) -> int:
    """Returns the size of the header, from the first eight or more bytes of a file."""
    return _LENGTH.size + int(_LENGTH.unpack_from(start)[0])


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host, as a view that keeps the tensor alive.

    Not through numpy: memory that numpy has seen can no longer be offloaded (torch marks it as not resizable).
    """
    if not tensor.numel():
        return memoryview(b"")
    whole = ctypes.c_char * (tensor.numel() * tensor.element_size())
    memory = whole.from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # for as long as anything looks at the memory
    return memoryview(memory).cast("B")


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of `tensor`, row by row, without a copy if it is contiguous and on the host."""
    held = tensor.detach().cpu().contiguous()
    data = bytes_of(held)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]

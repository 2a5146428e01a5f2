"""Reads Megatron's index of a token file: `NAME.idx` says how wide the tokens in `NAME.bin` are, and where documents begin.

    magic, 9 bytes | version 1, 8 | code of the tokens' type, 1 | number of sequences, 8 | number of documents + 1, 8
    tokens of each sequence, int32 | first byte of each, int64 | first sequence of each document, and the end, int64
    mode of each sequence, int8: of multimodal data alone

Little-endian throughout. Torch-free.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from mmap import ACCESS_READ, mmap
from operator import eq, floordiv, gt, mul
from pathlib import Path
from typing import Literal

from sley_data.config import TOKEN_BYTES

MAGIC = b"MMIDIDX\x00\x00"

_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, Literal["uint16", "uint32"]] = {4: "uint32", 8: "uint16"}  # 4 is int32, and no id is negative
_OTHER_TYPES = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}


@dataclass(frozen=True)
class Index:
    """An index. dtype: that of the tokens. offsets: the first token of each document, and the number of tokens, 64 bits."""

    dtype: Literal["uint16", "uint32"]
    offsets: array[int]


def read_index(path: Path, num_bytes: int) -> Index:
    """Returns the index at `path` of a token file of `num_bytes`.

    Raises ValueError that says what is wrong with it, as what follows the file's name; OSError.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise ValueError(f"is no index of Megatron: it begins with {head[:9]!r}")
        if len(head) < _HEADER.size:
            raise ValueError(f"is cut off in its header, after {len(head)} bytes")
        _, version, code, count, num_ends = _HEADER.unpack(head)
        if version != 1:
            raise ValueError(f"is an index of version {version}; version 1 is known")
        if code not in _TYPES:
            raise ValueError(f"has tokens of the type {_OTHER_TYPES.get(code, code)}; uint16 and int32 are read")
        size = len(head) + 12 * count + 8 * num_ends
        stored = file.seek(0, 2)
        if stored not in (size, size + count):
            raise ValueError(f"has {stored} bytes, and {count} sequences in {num_ends - 1} documents make {size}")
        content = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))[len(head) :]
    lengths = content[: 4 * count].cast("i")
    starts = content[4 * count : 12 * count].cast("q")
    ends = content[12 * count : size - len(head)].cast("q")
    return Index(_TYPES[code], _offsets(lengths, starts, ends, num_bytes, TOKEN_BYTES[_TYPES[code]]))


def _offsets(lengths: Sequence[int], starts: Sequence[int], ends: Sequence[int], num_bytes: int, width: int) -> array[int]:
    """Returns `Index.offsets`. ends: the first sequence of each document, and their number. width: bytes of a token."""
    if min(lengths, default=0) < 0:
        raise ValueError("has a sequence of a negative length")
    total = sum(lengths)
    if total * width != num_bytes:
        raise ValueError(f"is of {total} tokens of {width} bytes, and the `.bin` beside it has {num_bytes} bytes")
    if not all(map(eq, starts, map(mul, accumulate(lengths, initial=0), repeat(width)))):
        raise ValueError("has sequences that do not lie end to end")
    if not ends or ends[0] != 0 or ends[-1] != len(lengths) or any(map(gt, ends, ends[1:])):
        raise ValueError(f"has documents that are not the {len(lengths)} sequences in order")
    first = ends[: bisect_left(ends, len(lengths))]  # without empty documents at the end
    return array("q", chain(map(floordiv, map(starts.__getitem__, first), repeat(width)), [total]))

"""Tells from samples of a token file whether its ids are read in the right width and byte order; torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Literal

_BLOCK = 1 << 13
"""Bytes of a sample."""

_NUM_BLOCKS = 16
_ENOUGH = 64
"""Ids that a sample must have before rare patterns mean anything."""

_CODES = {"uint16": "H", "uint32": "I"}
_LLM_C = (20240520).to_bytes(4, "little")
"""How a token file of llm.c begins; its header has 1024 bytes."""


def wrong_ids(path: Path, dtype: Literal["uint16", "uint32"], vocab_size: int) -> tuple[str, str] | None:
    """Returns what shows that the ids of a file are not `dtype`, little-endian and below `vocab_size`, and what to do.

    Reads at most 128 KiB of the file, spread over it; None if nothing shows it, or if the file cannot be read.
    """
    try:
        sample = _sample(path)
    except OSError:
        return None  # the code that opens it later reports the error
    if sample[:4] == _LLM_C:
        return "begins with the header of llm.c, which would be read as tokens", "write the ids alone: `tail -c +1025`"
    ids = _ids(sample, dtype)
    if len(ids) < _ENOUGH:
        return None
    if _is_padded(ids):
        advice = f'write them as {dtype}: `numpy.fromfile("...", "<i8").astype("{dtype}").tofile("...")`'
        if dtype == "uint16":
            advice = f'say `dtype = "uint32"`; or, if they have 64 bits, {advice}'
        return f"has 0 or a small number after every id: its ids are wider than {dtype}", advice
    if max(ids) >= vocab_size:
        return _beyond(sample, dtype, max(ids), vocab_size)
    if dtype == "uint16" and len(ids) >= 1 << 12 and _spread(ids, 8) > _spread(ids, 0) + 1:
        advice = 'write them in little-endian order: `numpy.fromfile("...", ">u2").astype("<u2").tofile("...")`'
        return "has ids whose upper bytes vary more than their lower ones: they are big-endian", advice
    return None


def _beyond(sample: bytes, dtype: str, largest: int, vocab_size: int) -> tuple[str, str]:
    """Returns that an id is beyond the vocabulary, and as what the ids would fit."""
    fits = [other for other in _CODES if other != dtype and max(_ids(sample, other)) < vocab_size]
    swapped = _ids(sample, dtype)
    swapped.byteswap()
    if max(swapped) < vocab_size:
        hint = "they fit if they are big-endian: write them in little-endian order"
    elif fits:
        hint = f'they fit as `dtype = "{fits[0]}"`'
    else:
        hint = "`vocab_size` is that of another tokenizer, or these are no raw ids"
    return f"has the id {largest} as {dtype}, and `vocab_size` is {vocab_size}", hint


def _sample(path: Path) -> bytes:
    """Returns the file's first bytes, and blocks from places that are spread over it, each at a multiple of 8 bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= _BLOCK * _NUM_BLOCKS:
            file.seek(0)
            return file.read()
        blocks = []
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK) * number // (_NUM_BLOCKS - 1) // 8 * 8)
            blocks.append(file.read(_BLOCK))
        return b"".join(blocks)


def _ids(sample: bytes, dtype: str) -> array[int]:
    ids = array(_CODES[dtype])
    ids.frombytes(sample[: len(sample) // ids.itemsize * ids.itemsize])
    return ids


def _is_padded(ids: Sequence[int]) -> bool:
    """Returns whether every second id is 0, or small beside the others, as the upper halves of wider ids are."""
    lower, upper = ids[::2], ids[1::2]
    return (max(upper) == 0 and len(set(lower)) > 4) or (max(upper) < 16 and max(lower) >= 1 << 12)


def _spread(ids: Sequence[int], shift: int) -> float:
    """Returns the entropy of one byte of the ids, in bits."""
    counts = [0] * 256
    for one in ids:
        counts[one >> shift & 255] += 1
    return -sum(count / len(ids) * log2(count / len(ids)) for count in counts if count)

"""What a stage tells its neighbours before a step: which micro-batches it is about to walk through.

Neighbours that were given different ones would wait for messages that never come, or take one for another. So both send one
word at the start of each walk and compare; it says no more than that, and a step does not wait for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby

import torch
from torch import Tensor

WORD_BYTES = 512
_DIGEST_BYTES = 16


def word_of(walk: int, keys: Sequence[Hashable]) -> Tensor:
    """The word on the `walk`-th walk, through micro-batches with `keys`; uint8 [WORD_BYTES] on the host."""
    word = bytearray(WORD_BYTES)
    digest, text = _told(tuple(keys))
    data = digest + walk.to_bytes(4, "little") + text
    word[: len(data)] = data
    return torch.frombuffer(word, dtype=torch.uint8)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two words say the same."""
    return torch.equal(one, other)


def told(word: Tensor) -> str:
    """What a word says."""
    data = word.numpy().tobytes()
    number = int.from_bytes(data[_DIGEST_BYTES : _DIGEST_BYTES + 4], "little")
    text = data[_DIGEST_BYTES + 4 :].rstrip(b"\0").decode(errors="replace")
    return f"{text} (walk {number})"


@lru_cache(maxsize=64)
def _told(keys: tuple[Hashable, ...]) -> tuple[bytes, bytes]:
    """A digest of all, and words on as many as there is room for."""
    found = [f"{len(list(same))} x {key}" for key, same in groupby(map(_plain, keys))]
    text = f"{len(keys)} micro-batches: {', '.join(found)}".encode()
    return sha256("\n".join(found).encode()).digest()[:_DIGEST_BYTES], text[: WORD_BYTES - _DIGEST_BYTES - 4]


def _plain(key: Hashable) -> str:
    """Without what differs in how it is written and not in what it means."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_plain, key))})"
    return str(key)

"""What a stage tells its neighbours before a step: which micro-batches it is about to walk through.

Neighbours that were given different ones would wait for messages that never come, or take one for another. So both send one
word at the start of each walk and compare; it says no more than that, and a step does not wait for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.comm import Pending
    from sley_pp.lines import Lines

WORD_BYTES = 512
_DIGEST_BYTES = 16


class Walk:
    """The walk that a stage is on, and what it and its neighbours have told each other of it. number: walks begun so far."""

    def __init__(self, lines: Lines) -> None:
        self.number = 0
        self._lines = lines
        self._telling: dict[int, Pending] = {}
        self._hearing: dict[int, tuple[Pending, Tensor]] = {}
        self._agreed: set[int] = set()

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts to tell the stages `peers` that the next walk is through micro-batches with these `keys`."""
        self.number += 1
        self._word = word_of(self.number, keys)
        for peer in peers:
            what = f"what stage {self._lines.stage} walks through, to stage {peer}"
            self._telling[peer] = self._lines.tell(self._word, peer, what)

    def hear(self, peer: int, what: str) -> None:
        """Starts to receive what `peer` walks through. what: is received behind it, for the error of a wait that fails."""
        if peer not in self._hearing:
            word = torch.empty(WORD_BYTES, dtype=torch.uint8)
            self._hearing[peer] = self._lines.hear(word, peer, what), word

    def is_agreed(self, peer: int) -> bool:
        """Whether `peer` has said that it walks through the same."""
        return peer in self._agreed

    def agree(self, peer: int, what: str) -> None:
        """Waits until `peer` has said so. Raises RunError `stages-differ` where it says something else."""
        if peer in self._agreed:
            return
        self.hear(peer, what)
        pending, word = self._hearing[peer]
        pending.wait()
        if not is_same(word, self._word):
            self._telling[peer].wait()  # so that the peer finds the same
            mine, other = told(self._word), told(word)
            raise differ(f"stage {peer} walks through {other}, and stage {self._lines.stage} through {mine}")
        self._agreed.add(peer)

    def end(self) -> None:
        """Waits until all neighbours have agreed and heard."""
        for peer, telling in self._telling.items():
            self.agree(peer, f"what stage {peer} walks through")
            telling.wait()

    def forget(self) -> None:
        """Drops what was told and heard."""
        for under_way in (self._telling, self._hearing, self._agreed):
            under_way.clear()


def differ(fault: str) -> RunError:
    """The error of two stages that take different steps."""
    return RunError(
        "stages-differ",
        fault,
        hint="all stages of a replica take the same steps, on micro-batches of the same number and shapes",
    )


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

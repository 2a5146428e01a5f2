"""Checks that neighbouring stages run the same micro-batches: each sends the other its own before a step.

Neighbours with different micro-batches would wait for messages that never come, or mistake one message for another. So both
send one message of fixed size, a *word*, at the start of each walk and compare. No step waits for its delivery.
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
    """Holds the current walk of a stage, and the words exchanged with its neighbours. number: walks begun so far."""

    def __init__(self, lines: Lines) -> None:
        self.number = 0
        self._lines = lines
        self._telling: dict[int, Pending] = {}
        self._hearing: dict[int, tuple[Pending, Tensor]] = {}
        self._agreed: set[int] = set()

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts to tell the stages `peers` that the next walk is through micro-batches with these `keys`; does not block."""
        self.number += 1
        self._word = word_of(self.number, keys)
        for peer in peers:
            what = f"what stage {self._lines.stage} walks through, to stage {peer}"
            self._telling[peer] = self._lines.tell(self._word, peer, what)

    def hear(self, peer: int, what: str) -> None:
        """Starts to receive the word of `peer`, once per walk.

        what: names the transfer that follows, for the error of a failed wait.
        """
        if peer not in self._hearing:
            word = torch.empty(WORD_BYTES, dtype=torch.uint8)
            self._hearing[peer] = self._lines.hear(word, peer, what), word

    def is_agreed(self, peer: int) -> bool:
        """Returns whether `agree` has compared the word of `peer` in this walk and found it equal."""
        return peer in self._agreed

    def agree(self, peer: int, what: str) -> None:
        """Blocks until the word of `peer` has arrived. Raises RunError `stages-differ` if it is another walk."""
        if peer in self._agreed:
            return
        if not self._lines.group.has_peers:
            self._agreed.add(peer)
            return
        self.hear(peer, what)
        pending, word = self._hearing[peer]
        pending.wait()
        if not is_same(word, self._word):
            self._telling[peer].wait()  # so that the peer has this stage's word and raises the same error
            mine, other = told(self._word), told(word)
            raise differ(f"stage {peer} walks through {other}, and stage {self._lines.stage} through {mine}")
        self._agreed.add(peer)

    def end(self) -> None:
        """Blocks until the words of all peers have arrived and been compared, and this stage's are sent."""
        for peer, telling in self._telling.items():
            self.agree(peer, f"what stage {peer} walks through")
            telling.wait()

    def forget(self) -> None:
        """Drops all words in flight and received, without waiting."""
        for under_way in (self._telling, self._hearing, self._agreed):
            under_way.clear()


def differ(fault: str) -> RunError:
    """Returns the RunError `stages-differ` for two stages that take different steps."""
    return RunError(
        "stages-differ",
        fault,
        hint="all stages of a replica take the same steps, on micro-batches of the same number and shapes",
    )


def word_of(walk: int, keys: Sequence[Hashable]) -> Tensor:
    """Returns the word of the `walk`-th walk, through micro-batches with `keys`; uint8 [WORD_BYTES] on the host."""
    word = bytearray(WORD_BYTES)
    digest, text = _told(tuple(keys))
    data = digest + walk.to_bytes(4, "little") + text
    word[: len(data)] = data
    return torch.frombuffer(word, dtype=torch.uint8)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two words describe the same walk."""
    return torch.equal(one, other)


def told(word: Tensor) -> str:
    """Returns the text of a word, for an error message."""
    data = word.numpy().tobytes()
    number = int.from_bytes(data[_DIGEST_BYTES : _DIGEST_BYTES + 4], "little")
    text = data[_DIGEST_BYTES + 4 :].rstrip(b"\0").decode(errors="replace")
    return f"{text} (walk {number})"


@lru_cache(maxsize=64)
def _told(keys: tuple[Hashable, ...]) -> tuple[bytes, bytes]:
    """Returns a digest of all `keys`, and a text that lists as many of them as fit into a word."""
    found = [f"{len(list(same))} x {key}" for key, same in groupby(map(_plain, keys))]
    text = f"{len(keys)} micro-batches: {', '.join(found)}".encode()
    return sha256("\n".join(found).encode()).digest()[:_DIGEST_BYTES], text[: WORD_BYTES - _DIGEST_BYTES - 4]


def _plain(key: Hashable) -> str:
    """Returns `key` as text, equal for keys that differ only in their types, such as a tuple and torch.Size."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_plain, key))})"
    return str(key)

"""Counts the samples that documents become; torch-free, so that a plan can be checked and shown without loading anything.

A position that predicts the next token is a label. `pack` and `cut` share one stream of N tokens, hence N - 1 labels, which
windows of `sequence` labels cover; `pad` covers the L - 1 labels of each document of L tokens separately.
"""

from __future__ import annotations

from collections.abc import Iterable


def num_windows(num_tokens: int, sequence: int) -> int:
    """Returns the windows over a stream of `num_tokens`: ceil((num_tokens - 1) / sequence), or 0 if not even one is full."""
    return -(-(num_tokens - 1) // sequence) if num_tokens > sequence else 0


def window(index: int, num_tokens: int, sequence: int) -> tuple[int, int]:
    """Returns where window `index` starts in the stream, and how many of its labels earlier windows have already covered.

    The last window is moved back so that it is full: no token is dropped or made up, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       N = 10, sequence = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 counted before, 9 new
    """
    wanted = index * sequence
    start = min(wanted, num_tokens - 1 - sequence)
    return start, wanted - start


def num_chunks(lengths: Iterable[int], sequence: int) -> int:
    """Returns the samples of padded documents: ceil((length - 1) / sequence) each; a document of one token has no label."""
    return sum(-(-(length - 1) // sequence) for length in lengths if length > 1)

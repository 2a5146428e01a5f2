"""Makes samples of equal length from a stream of tokens and the offsets of its documents: pack, cut, pad.

Labels are already shifted: each is the next token. `offsets` is int64 [num_documents + 1]. Document d has the tokens
[offsets[d], offsets[d + 1]), and no document is empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sley_core.api.data import BOUNDARY_FIELDS, IGNORE_INDEX, TOKEN_FIELDS, Field, Sample
from sley_data.config import Documents
from sley_data.documents import locate_window, num_windows


class TokenArray:
    """A stream of tokens. parts: 1-dimensional uint8, uint16 or uint32 tensors, which may be mapped files."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.numel() for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tensor:
        """Returns a copy of tokens [start, stop) as int64. The range must be inside the stream."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        pieces = [piece.to(torch.int64) for piece in self._pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *pieces])

    def _pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields views that together contain tokens [start, stop)."""
        number = bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[number]
            offset = end - self.parts[number].numel()
            yield self.parts[number][start - offset : min(stop, end) - offset]
            start, number = end, number + 1


WINDOW_BLOCK = 1 << 20
"""The number of windows whose documents are counted in one operation."""


def token_fields(documents: Documents) -> dict[str, Field]:
    """Returns the fields of a batch: tokens and labels [b, s], and for "pack" positions [b, s] and cu_seqlens [b, n + 1]."""
    return TOKEN_FIELDS | BOUNDARY_FIELDS if documents == "pack" else dict(TOKEN_FIELDS)


def cut_sample(tokens: TokenArray, index: int, sequence: int) -> Sample:
    """Returns window `index` of the stream. Ignores labels that earlier windows include (see `documents.locate_window`)."""
    start, num_covered = locate_window(index, len(tokens), sequence)
    values = tokens.read(start, start + sequence + 1)
    labels = values[1:].clone()
    labels[:num_covered] = IGNORE_INDEX
    return {"tokens": values[:-1], "labels": labels}


def pack_sample(tokens: TokenArray, offsets: Tensor, index: int, sequence: int, max_documents: int) -> Sample:
    """Returns window `index` with its document boundaries. No label crosses a boundary.

    `positions` restarts at 0 at the start of each document and of the window. `cu_seqlens`, int32 [max_documents + 1], contains
    the starts of the documents in the window, padded with `sequence`.
    """
    start, _ = locate_window(index, len(tokens), sequence)
    sample = cut_sample(tokens, index, sequence)
    boundaries = _document_starts(offsets, start, start + sequence) - start
    sample["labels"][boundaries - 1] = IGNORE_INDEX
    starts = torch.cat([boundaries.new_zeros(1), boundaries[boundaries < sequence]])
    lengths = torch.diff(starts, append=starts.new_tensor([sequence]))
    sample["positions"] = torch.arange(sequence) - starts.repeat_interleave(lengths)
    sample["cu_seqlens"] = torch.full((max_documents + 1,), sequence, dtype=torch.int32)
    sample["cu_seqlens"][: starts.numel()] = starts
    return sample


def _document_starts(offsets: Tensor, start: int, stop: int) -> Tensor:
    """Returns the document starts in (start, stop]."""
    first, last = torch.searchsorted(offsets, torch.tensor([start, stop]), right=True).tolist()
    return offsets[first:last]


def max_documents(offsets: Tensor, sequence: int) -> int:
    """Returns the largest number of documents in a window, including partial documents."""
    num_tokens = int(offsets[-1])
    largest = 0
    for first in range(0, num_windows(num_tokens, sequence), WINDOW_BLOCK):
        last = min(first + WINDOW_BLOCK, num_windows(num_tokens, sequence))
        starts = (torch.arange(first, last) * sequence).clamp(max=num_tokens - 1 - sequence)
        num_starts = torch.searchsorted(offsets, starts + sequence) - torch.searchsorted(offsets, starts, right=True)
        largest = max(largest, int(num_starts.max()) + 1)
    return largest


def chunk_ends(offsets: Tensor, sequence: int) -> Tensor:
    """Returns the number of samples of padded documents up to the end of each document, int64 [num_documents]."""
    num_labels = torch.diff(offsets) - 1
    return ((num_labels + sequence - 1) // sequence).cumsum(0)


def pad_sample(tokens: TokenArray, offsets: Tensor, ends: Tensor, index: int, sequence: int) -> Sample:
    """Returns sample `index` of padded documents. Pads its end with token 0, which every vocabulary has, and ignored labels.

    ends: the result of `chunk_ends`. With causal attention, no token attends to the padding.
    """
    document = int(torch.searchsorted(ends, index, right=True))
    first_sample = int(ends[document - 1]) if document else 0
    start = int(offsets[document]) + (index - first_sample) * sequence
    values = tokens.read(start, min(start + sequence + 1, int(offsets[document + 1])))
    sample = {"tokens": torch.zeros(sequence, dtype=torch.int64), "labels": torch.full((sequence,), IGNORE_INDEX)}
    sample["tokens"][: values.numel() - 1] = values[:-1]
    sample["labels"][: values.numel() - 1] = values[1:]
    return sample

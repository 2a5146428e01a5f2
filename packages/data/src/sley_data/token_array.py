"""Reads tokens of one or several sources as one stream; copies only the requested range."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

SIGNED = {torch.uint8: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32}
"""For each dtype one of the same size that PyTorch compares with vector instructions and on every device."""


class TokenArray:
    """Represents a stream of tokens: `array.read(start, stop)` is an int64 copy of that range, whichever parts it lies in.

    parts: 1-dimensional uint8, uint16 or uint32 tensors, all of one dtype; they may be mapped files.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.numel() for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tensor:
        """Returns tokens [start, stop) as an int64 copy; the range must lie inside the array."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        pieces = list(self._pieces(start, stop))
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0)
        return joined.to(torch.int64)

    def _pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields views of the parts that together make up [start, stop)."""
        number = bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[number]
            offset = end - self.parts[number].numel()
            yield self.parts[number][start - offset : min(stop, end) - offset]
            start, number = end, number + 1

    def find(self, token: int, *, block: int = 1 << 24) -> Tensor:
        """Returns the positions of `token` as int64, ascending; reads every part, `block` tokens at a time."""
        found = []
        for part, end in zip(self.parts, self._ends, strict=True):
            wanted = torch.tensor([token]).to(part.dtype).view(SIGNED[part.dtype])
            values = part.view(SIGNED[part.dtype])
            for start in range(0, part.numel(), block):
                hits = (values[start : start + block] == wanted).nonzero().flatten()
                found.append(hits + (end - part.numel() + start))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

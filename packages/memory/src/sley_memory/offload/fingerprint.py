"""Finds out whether memory has changed since it was copied, without moving it.

A tensor's version counts what torch's operations write, but not what is written through `.data` or in inference mode. So where
no version has changed, two sums over the memory are compared as well: of the rows and of the columns of a table of
its 64-bit words, each times odd numbers, modulo 2^64. One changed word always changes them; so do two that change
places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.api.memory import Holding

WIDTH = 1024
"""Words in a row."""


def versions(piece: Holding) -> tuple[int, ...]:
    """Returns the versions of all tensors that lie in a piece, and their number: how often torch has written to them."""
    return tuple(tensor._version for tensor in piece.tensors.values())


def fingerprint(memory: Tensor) -> Tensor:
    """Returns int64 [3], on the device of `memory`, uint8 [bytes], which starts at a multiple of 8 bytes. Takes memory for
    one sum per row.
    """
    num_words = memory.numel() // 8
    rest = memory[num_words * 8 :].to(torch.int64)
    words = memory[: num_words * 8].view(torch.int64)
    rows = num_words // WIDTH
    table, tail = words[: rows * WIDTH].view(rows, WIDTH), words[rows * WIDTH :]
    of_rows = torch.cat([table.sum(1), tail.sum().reshape(1)])
    of_columns = torch.cat([table.sum(0), tail, rest])
    return torch.stack([_weighted(of_rows), _weighted(of_columns), words.sum()])


def _weighted(sums: Tensor) -> Tensor:
    """Returns the sum of `sums` times odd numbers that look like chance."""
    places = torch.arange(1, sums.numel() + 1, device=sums.device)
    return (sums * ((places * 0x2545F4914F6CDD1D) | 1)).sum()

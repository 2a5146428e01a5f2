"""Tokens, of which every rank and every micro-batch may have another number.

Those of all ranks of a group are padded to the most, and gathered. What is leased for them has room for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import GATHER

if TYPE_CHECKING:
    from sley_core.api.comm import Group
    from sley_core.protocols import MemoryPool


class AllTokens:
    """Gathers over `group`, whose ranks run the same micro-batches in the same order, and so come here alike."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device

    def most(self, num_tokens: int) -> int:
        """The most that a rank of the group has; the others pad. Blocks: sizes must be known before anything is sent."""
        counts = torch.empty(self.group.size, dtype=torch.int64, device=self.device)
        own = torch.full((1,), num_tokens, dtype=torch.int64, device=self.device)
        self.gather([counts], [own], "numbers of tokens")
        return int(counts.max())

    def of_all(self, own: Sequence[Tensor], fills: Sequence[int], what: str) -> list[Tensor]:
        """Every rank's tensors `own` [n, ...], in the order of the group, each padded with its fill: [size x most, ...]."""
        most = self.most(len(own[0]))
        given = [padded(one, most, fill) for one, fill in zip(own, fills, strict=True)]
        wholes = [one.new_empty((self.group.size * most, *one.shape[1:])) for one in given]
        self.gather(wholes, given, what)
        return wholes

    def gather(self, wholes: Sequence[Tensor], own: Sequence[Tensor], what: str) -> None:
        """Fills each of `wholes` [size x n, ...] with the ranks' `own` [n, ...], and waits for it."""
        work = self.group.transport(GATHER).all_gather(wholes, own, what=what)
        work.wait()
        work.wait_sent()


class Room:
    """Leases of tensors whose size varies: as large as the first was, and at least twice as large once one does not fit.

    So a pool that keeps buffers by their size gets a few of them, however many sizes there are; and of one size that one.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self._numel: dict[torch.dtype, int] = {}

    @contextmanager
    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """A contiguous tensor, with whatever values its buffer had, for the length of a `with` block."""
        numel = prod(shape)
        room = self._numel.get(dtype, 0)
        if numel > room:
            room = self._numel[dtype] = max(numel, 2 * room)
        with self.pool.lease((room,), dtype, device) as flat:
            yield flat[:numel].view(tuple(shape))


def padded(tensor: Tensor, length: int, fill: int = 0) -> Tensor:
    """`tensor` [n, ...], contiguous, with `fill` behind it: [length, ...]."""
    if len(tensor) == length:
        return tensor.contiguous()
    whole = tensor.new_empty((length, *tensor.shape[1:]))
    whole[: len(tensor)] = tensor
    whole[len(tensor) :] = fill
    return whole

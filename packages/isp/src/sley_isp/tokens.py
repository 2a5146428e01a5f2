"""Gathers tokens, whose number may differ between ranks and micro-batches.

Every rank's tokens are padded to the largest number in the group, then gathered. Buffers for them are leased with spare room.
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
    from sley_core.api.comm import Device, Group, SentBytes
    from sley_core.protocols import MemoryPool


class AllTokens:
    """Gathers over `group`. Its ranks must run the same micro-batches in the same order, so that all make the same calls.

    sent: counts what it sends.
    """

    def __init__(self, group: Group, device: Device, sent: SentBytes) -> None:
        self.group = group
        self.device = device
        self.sent = sent

    def most(self, num_tokens: int) -> int:
        """Returns the largest `num_tokens` of any rank; a blocking gather, as sizes must be known before tokens are sent."""
        counts = torch.empty(self.group.size, dtype=torch.int64, device=self.device.torch_device)
        own = torch.full((1,), num_tokens, dtype=torch.int64, device=self.device.torch_device)
        self.gather([counts], [own], "numbers of tokens")
        return int(self.device.read(counts.max(), [num_tokens])[0])

    def of_all(self, own: Sequence[Tensor], fills: Sequence[int], what: str) -> list[Tensor]:
        """Returns every rank's tensors `own` [n, ...], in the order of the group: [size x most, ...].

        Each is padded with its fill. Blocks on two gathers.
        """
        most = self.most(len(own[0]))
        given = [padded(one, most, fill) for one, fill in zip(own, fills, strict=True)]
        wholes = [one.new_empty((self.group.size * most, *one.shape[1:])) for one in given]
        self.gather(wholes, given, what)
        return wholes

    def gather(self, wholes: Sequence[Tensor], own: Sequence[Tensor], what: str) -> None:
        """Fills each of `wholes` [size x n, ...] with the ranks' `own` [n, ...]; blocks until it is complete on both sides."""
        work = self.group.transport(GATHER).all_gather(wholes, own, what=what)
        for whole in wholes:
            self.sent.add(whole, self.group, passes=1)
        work.wait()
        work.wait_sent()


class Room:
    """Leases tensors of varying size: buffers are as large as the first was, and at least double once one does not fit.

    So a pool that keeps buffers by size needs only a few, however many sizes occur, and one if all have the same size.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self._numel: dict[torch.dtype, int] = {}

    @contextmanager
    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Yields a contiguous tensor of this shape, with undefined contents, for the length of the block."""
        numel = prod(shape)
        room = self._numel.get(dtype, 0)
        if numel > room:
            room = self._numel[dtype] = max(numel, 2 * room)
        with self.pool.lease((room,), dtype, device) as flat:
            yield flat[:numel].view(tuple(shape))


def padded(tensor: Tensor, length: int, fill: int = 0) -> Tensor:
    """Returns `tensor` [n, ...] extended with `fill` to [length, ...], contiguous; itself if it is already."""
    if len(tensor) == length:
        return tensor.contiguous()
    whole = tensor.new_empty((length, *tensor.shape[1:]))
    whole[: len(tensor)] = tensor
    whole[len(tensor) :] = fill
    return whole

"""Gathers tokens, whose number may differ between ranks and micro-batches.

Every rank's tokens are padded to the largest number in the group, then gathered.
Below: shards that are published for peers to read, and one handle for several exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import GATHER, Work

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group, Published, SentBytes, Transport
    from sley_isp.units import Gathered, Unit


class PublishedShards:
    """Holds the shards that are published in a step, and the gathers that have not ended for the peers.

    is_due: returns whether something must still be waited for before a layer's weights are used. leaving: gathered weights that
    are no longer used, whose peers may still be receiving this rank's shards.
    """

    def __init__(self, group: Group, is_due: Callable[[str], bool]) -> None:
        self.leaving: list[Gathered] = []
        self._group = group
        self._is_due = is_due
        self._published: Published | None = None
        self._stamps: dict[Unit, int] = {}

    def begin(self, units: Sequence[Unit]) -> None:
        """Publishes the shards without a pending wait; the others are sent at each gather."""
        still = [unit for unit in units if not self._is_due(unit.layer)]
        self._stamps = {unit: unit.stamp for unit in still}
        if not still:
            return
        due = ", ".join(unit.name for unit in units if unit not in self._stamps)
        # A collective over `wp`, before the first gather of a step or an evaluation, which all its ranks begin together.
        what = f"the weights but for {due}" if due else "the weights"
        shards = [shard for unit in still for shard in unit.shards]
        self._published = self._group.transport(GATHER).publish(shards, what=what)

    def source(self, unit: Unit) -> Transport | Published:
        """Returns the published shards if they are still as published, else the transport; the same on all ranks of `wp`."""
        if self._published is not None and self._stamps.get(unit) == unit.stamp:
            return self._published
        return self._group.transport(GATHER)

    def end(self) -> None:
        """Waits until all peers have this rank's shards, which may change from now on."""
        for gathered in self.leaving:
            gathered.wait_sent()
        self.leaving.clear()
        if self._published is not None:
            self._published.wait_sent()
            self._published = None

    def forget(self) -> None:
        """Drops what a failed step has published: it would keep a communicator, whose threads must end with the run."""
        self._published = None


class Together(Work):
    """Is the handle of the exchanges `works`, in the order in which they started."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def test(self) -> bool:
        """Returns whether all are complete; advances each."""
        are_over = [work.test() for work in self._works]
        return all(are_over)

    def wait(self) -> None:
        """Blocks until all results are complete."""
        for work in self._works:
            work.wait()

    def release(self) -> None:
        """Releases all results."""
        for work in self._works:
            work.release()

    def wait_sent(self) -> None:
        """Blocks until the peers have everything that this rank sent."""
        for work in self._works:
            work.wait_sent()


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


def padded(tensor: Tensor, length: int, fill: int = 0) -> Tensor:
    """Returns `tensor` [n, ...] extended with `fill` to [length, ...], contiguous; itself if it is already."""
    if len(tensor) == length:
        return tensor.contiguous()
    whole = tensor.new_empty((length, *tensor.shape[1:]))
    whole[: len(tensor)] = tensor
    whole[len(tensor) :] = fill
    return whole

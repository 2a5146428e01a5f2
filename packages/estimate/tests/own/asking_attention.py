"""Attentions over slices that exchange in every way that an outsider has, and the plugin `asking` that offers them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch

from sley_core.api.model import Attention
from sley_core.api.plan import SequenceConfig
from sley_core.hookspecs import hookimpl
from sley_core.protocols import SequenceCommunicator
from sley_core.records import SequenceAttentionRecord


class Gathers(SequenceCommunicator):
    """Looks along what `whole` brings of a slice, [b, size * s, ...], and keeps the own positions of the context."""

    seen: ClassVar[list[torch.Tensor]] = []

    def __init__(self, config, group):
        self.group = group

    def attach(self, layers):
        for layer in layers:
            for module in layer.module.modules():
                if isinstance(module, Attention):
                    module.forward = partial(self.forward, module)

    def forward(self, module, q, k, v, cu_seqlens=None):
        whole = [torch.cat([one, *(part.detach() for part in self.others(one))], dim=1) for one in (q, k, v)]
        self.seen.append(whole[0].detach())
        return Attention.forward(module, *whole)[:, : q.shape[1]]

    def others(self, own):
        """Yields the slices of the other ranks."""
        shard = own.detach()[None].contiguous()
        parts = shard.new_full((self.group.size, *shard.shape[1:]), torch.nan)
        work = self.group.transport().all_gather([parts], [shard], what="slices")
        work.wait()
        work.wait_sent()
        return parts.unbind()[1:]


class Functions(Gathers):
    def others(self, own):
        size, group = self.group.size, self.group
        shard = own.detach()[None].contiguous()
        parts = shard.new_full((size, *shard.shape[1:]), torch.nan)
        group.all_gather(parts, shard, what="slices").wait()
        swapped = torch.full_like(parts, torch.nan)
        group.all_to_all(swapped, parts, what="slices").wait()
        group.all_reduce(swapped, what="slices").wait()
        largest = swapped.max().reshape(1)
        group.all_reduce(largest, "max", what="the largest").wait()
        group.broadcast(largest, what="the largest").wait()
        assert group.gather_objects("one", what="words") == ["one"] * size
        return (swapped / size).unbind()[1:]


class Ring(Gathers):
    """Slices go from rank to rank; a receive is begun before the send."""

    def others(self, own):
        group, size, found = self.group, self.group.size, [own.detach().contiguous()]
        for _ in range(size - 1):
            coming = torch.full_like(found[-1], torch.nan)
            received = group.receive(coming, "main", (group.coord - 1) % size, what="a slice")
            sent = group.send(found[-1], "main", (group.coord + 1) % size, what="a slice")
            received.wait()
            sent.wait()
            found.append(coming)
        return found[1:]


class Only(Gathers):
    """Waits for what it has not sent."""

    def others(self, own):
        self.group.receive(torch.empty_like(own), "main", 1, what="a slice").wait()


class Raw(Gathers):
    """Asks torch."""

    def others(self, own):
        torch.distributed.all_reduce(own.detach(), group=self.group.channel())


class Early(Raw):
    """Asks torch before the first layer is called."""

    def attach(self, layers):
        self.group.channel()


@hookimpl
def sley_records() -> list[SequenceAttentionRecord]:
    return [
        SequenceAttentionRecord(name=one.__name__.lower(), config=SequenceConfig, build=f"asking_attention:{one.__name__}")
        for one in (Gathers, Functions, Ring, Only, Raw, Early)
    ]

"""Host copies that ranks share come and go with every wait that they need, and no other."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sley_core.memory.holdings import pieces_of
from sley_core.memory.state import Moved
from sley_memory.arena import HostArena
from sley_memory.movers import Streams
from sley_memory.shared import SharedCopies
from sley_testing.drawn_copies import DrawnDevice, wait_sites, without

ALONE: Any = SimpleNamespace(size=1, has_peers=False, coord=0, rank=0, ranks=(0,))
"""A group of one rank: it gathers what it has, on the same streams as any other."""

IMPLIED = {
    ("_gather", "after"): "the device was held until each copy out was done, and the stream follows the device",
    ("_send", "follow"): "what is kept whole leaves first, on the same stream, which follows the device for that",
    ("_gather", "wait"): "it lets the host say how long the copies took",
}


def moves(order: int) -> list[torch.Tensor]:
    """Offloads and onloads what the device writes to before and after; returns what it has in the end."""
    device = DrawnDevice(order=order)
    with device.watching():
        streams = Streams(device.copy_stream)
        tensors = [torch.arange(200.0), torch.ones(300, dtype=torch.bfloat16), torch.arange(60).view(6, 10).t()]
        named = [(str(at), tensor) for at, tensor in enumerate(tensors)]
        arena = HostArena(device.host_memory, streams.wait)
        unit = SharedCopies("weights", lambda: pieces_of(named), ALONE, ALONE, streams, arena, 1024, Moved())
        for number in range(3):
            for tensor in tensors:
                tensor.add_(1)
            unit.offload()
            if number:
                unit.wait()
                assert unit._host is not None
                unit._host.sum()  # as a program reads that has waited
            torch.zeros(500).add_(1)
            unit.onload()
            unit.require()
        streams.wait()
        return [tensor.clone() for tensor in tensors]


def is_caught(order: int, wanted: list[torch.Tensor]) -> bool:
    try:
        return not all(map(torch.equal, moves(order), wanted))
    except AssertionError:
        return True


def test_every_wait_is_needed_or_implied() -> None:
    wanted = moves(0)
    assert [tensor.flatten()[-1].item() for tensor in wanted] == [202, 4, 62]
    assert not any(is_caught(order, wanted) for order in range(20))
    sites = {site for order in range(4) for site in wait_sites(partial(moves, order)) if "shared" in site.file}
    assert len(sites) == 7
    for site in sites:
        with without(site):
            caught = any(is_caught(order, wanted) for order in range(20))
        assert caught != ((site.function, site.wait) in IMPLIED), str(site)

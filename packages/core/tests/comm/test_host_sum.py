"""Sums by ranks that read each other's memory: the right ones, the same bits on all, without waiting where none is needed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sley_core.comm import host_memory
from sley_core.comm.groups import make_groups
from sley_core.comm.host_sum import HostSum, SumMemory
from sley_core.errors import RunError
from sley_core.testing.peers import can_read_peers
from sley_core.topology import Topology

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

SIZES = (1, 2, 7, 64, 300_001)


def memory(limit_s: float = 30) -> SumMemory:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    groups = make_groups(Topology.of(size), rank, backend="gloo", timeout=timedelta(seconds=limit_s))
    opened = SumMemory.open(groups["stage"], limit_s)
    assert opened is not None
    return opened


def values(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + number))


def many() -> list[torch.Tensor]:
    """Three rounds over the same tensors, several sums under way at a time, by ranks that are late in turn."""
    sums = memory()
    coord = sums.group.coord
    wholes = [torch.empty(size) for size in SIZES]
    found = []
    for turn in range(3):
        under_way: list[HostSum] = []
        for number, whole in enumerate(wholes):
            if number % sums.group.size == coord:
                time.sleep(0.003)
            whole.copy_(values(coord, number + 10 * turn, whole.numel()))
            under_way.append(HostSum(sums, whole, f"tensor {number}"))
            for one in under_way:
                one.advance()
        for one in under_way:
            one.sum()
        for one in under_way:
            one.wait()
        for one in under_way:
            one.end()
        found += [whole.clone() for whole in wholes]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_sum_of_all_bit_for_bit(ranks, size):
    by_rank = ranks(size)(many)
    for at, sums in enumerate(zip(*by_rank, strict=True)):
        turn, number = divmod(at, len(SIZES))
        wanted = sum(values(rank, number + 10 * turn, SIZES[number]).double() for rank in range(size))
        torch.testing.assert_close(sums[0].double(), wanted, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(sums[0], other) for other in sums[1:])


def many_open() -> list[float]:
    sums = memory()
    host_memory.RING = 4
    wholes = [torch.full((5,), float(number + sums.group.coord)) for number in range(20)]
    under_way = [HostSum(sums, whole, "gradients") for whole in wholes]
    for one in under_way:
        one.end()
    assert not sums.wholes._open
    return [float(whole.unique()) for whole in wholes]


def test_any_number_of_sums_may_be_under_way(ranks):
    """Where four offers can be open, the oldest sum ends for the next one."""
    for found in ranks(2, 30)(many_open):
        assert found == [2.0 * number + 1 for number in range(20)]


def alone_at_first() -> list[bool]:
    """What the first rank's `advance` says before the second has come; and what each says after both have had their turns."""
    sums = memory()
    whole = torch.ones(10)
    said = []
    if sums.group.coord == 1:
        dist.barrier(group=sums.group.lane())
    one = HostSum(sums, whole, "ones")
    if sums.group.coord == 0:
        said = [one.advance()]
        dist.barrier(group=sums.group.lane())
    one.end()
    return [*said, one.advance(), bool((whole == 2).all())]


def test_advancing_waits_for_nobody(ranks):
    """The first to come cannot have a sum yet, and goes on."""
    assert ranks(2)(alone_at_first) == [[False, True, True], [True, True]]


def the_second_first() -> list[bool]:
    """What the second of two sums says when all have offered both, before and after the first is done."""
    sums = memory()
    ones, twos = torch.ones(5), torch.full((5,), 2.0)
    first, second = HostSum(sums, ones, "ones"), HostSum(sums, twos, "twos")
    dist.barrier(group=sums.group.lane())
    said = [second.advance()]
    first.end()
    second.end()
    return [*said, second.advance(), bool((ones == 2).all()), bool((twos == 4).all())]


def test_sums_are_taken_in_order(ranks):
    """On a rank that had passed by the first, and came to the second a moment later, they would be summed crosswise."""
    assert ranks(2)(the_second_first) == [[False, True, True, True]] * 2


def nobody_comes() -> Any:
    sums = memory(1)
    if sums.group.coord == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(RunError) as raised:
        HostSum(sums, torch.ones(4), "the bucket of block.3").end()
    return str(raised.value)


def test_a_peer_that_does_not_come(ranks):
    said, _ = ranks(2)(nobody_comes)
    assert "the bucket of block.3 over stage[0, 1] with rank 1 failed on rank 0: it did not come within 1 s" in said

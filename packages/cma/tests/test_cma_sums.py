"""Sums by ranks that read each other's memory: the right ones, the same bits on all, without waiting where none is needed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sley_core.comm.groups import Group, make_groups
from sley_core.comm.transport import Work
from sley_core.errors import RunError
from sley_core.topology import Topology
from sley_testing.collectives import can_read_peers

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

SIZES = (1, 2, 7, 64, 300_001)


def stage(limit_s: float = 30) -> Group:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=limit_s)
    return make_groups(Topology.of(size), rank, backend="gloo", timeout=limit, attaches=True)["stage"]


def values(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + number))


def many() -> list[torch.Tensor]:
    """Three rounds over the same tensors, several sums under way at a time, by ranks that are late in turn."""
    group = stage()
    sums = group.transport()
    coord = group.coord
    wholes = [torch.empty(size) for size in SIZES]
    found = []
    for turn in range(3):
        under_way: list[Work] = []
        for number, whole in enumerate(wholes):
            if number % group.size == coord:
                time.sleep(0.003)
            whole.copy_(values(coord, number + 10 * turn, whole.numel()))
            under_way.append(sums.all_reduce(whole, what=f"tensor {number}"))
            for one in under_way:
                one.test()
        for one in under_way:
            one.wait()
        for one in under_way:
            one.wait_sent()
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


def alone_at_first() -> list[bool]:
    """What the first rank's `test` says before the second has come; and what each says after both have had their turns."""
    group = stage()
    sums = group.transport()
    whole = torch.ones(10)
    said = []
    if group.coord == 1:
        dist.barrier(group=group.lane())
    one = sums.all_reduce(whole, what="ones")
    if group.coord == 0:
        said = [one.test()]
        dist.barrier(group=group.lane())
    one.wait_sent()
    return [*said, one.test(), bool((whole == 2).all())]


def test_testing_waits_for_nobody(ranks):
    """The first to come cannot have a sum yet, and goes on."""
    assert ranks(2)(alone_at_first) == [[False, True, True], [True, True]]


def the_second_first() -> list[bool]:
    """What the second of two sums says when all have offered both, before and after the first is done."""
    group = stage()
    sums = group.transport()
    ones, twos = torch.ones(5), torch.full((5,), 2.0)
    first, second = sums.all_reduce(ones, what="ones"), sums.all_reduce(twos, what="twos")
    dist.barrier(group=group.lane())
    said = [second.test()]
    first.wait_sent()
    second.wait_sent()
    return [*said, second.test(), bool((ones == 2).all()), bool((twos == 4).all())]


def test_sums_are_taken_in_order(ranks):
    """On a rank that had passed by the first, and came to the second a moment later, they would be summed crosswise."""
    assert ranks(2)(the_second_first) == [[False, True, True, True]] * 2


def nobody_comes() -> Any:
    group = stage(1)
    if group.coord == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(RunError) as raised:
        group.transport().all_reduce(torch.ones(4), what="the bucket of block.3").wait_sent()
    return str(raised.value)


def test_a_peer_that_does_not_come(ranks):
    said, _ = ranks(2)(nobody_comes)
    assert "the bucket of block.3 over stage[0, 1] with rank 1 failed on rank 0: it did not come within 1 s" in said

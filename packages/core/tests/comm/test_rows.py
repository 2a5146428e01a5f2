"""Rows are gathered and reduced as a dense sum says, on any number of ranks, several tensors at a time."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

from sley_core.comm import rows
from sley_core.comm import together as comm_together
from sley_core.comm.groups import make_groups
from sley_core.comm.rows import GATHER, REDUCE, gather_rows, num_received, reduce_rows, swap_rows
from sley_core.comm.world import World
from sley_core.testing.peers import can_read_peers
from sley_core.testing.recorder import collectives
from sley_core.testing.sequence import assert_same_sequence
from sley_core.topology import Topology

reads = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

SHAPES = [(3, 2), (1,), (2, 0), (4, 2, 2)]


def value(rank, number, shape, dtype):
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exchange(dtype, reads_memory):
    """What a gather and a reduction of all shapes gave on this rank, and what it called."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    topology = Topology.of(size, wp=size)
    limit = timedelta(seconds=30)
    group = make_groups(topology, rank, backend="gloo", timeout=limit, reads_memory=reads_memory)["wp"]
    assert len(group.memories) == (3 if reads_memory and size > 1 else 0)
    wholes = [torch.full((size * shape[0], *shape[1:]), 7.0, dtype=dtype) for shape in SHAPES]
    shards = [value(rank, number, shape, dtype) for number, shape in enumerate(SHAPES)]
    with collectives() as calls:
        first = gather_rows(wholes, shards, group, what="weights")
        given = [value(rank, number, whole.shape, dtype) for number, whole in enumerate(wholes)]
        scratches = [
            torch.empty((num_received(shape[0], group, given[0].device), *shape[1:]), dtype=dtype) for shape in SHAPES
        ]
        second = reduce_rows(given, scratches, group, what="gradients")
        second.wait()
        first.wait()
        first.wait()
        first.end()
        second.end()
    own = [one.view(size, shape[0], *shape[1:])[rank] for one, shape in zip(given, SHAPES, strict=True)]
    return wholes, own, list(calls)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("reads_memory", [pytest.param(True, marks=reads), False])
def test_rows_of_many_tensors(ranks, size, dtype, reads_memory):
    """By reading each other's memory, and by messages: the same bits."""
    found = ranks(size)(exchange, dtype, reads_memory)
    for number, shape in enumerate(SHAPES):
        expected = torch.cat([value(rank, number, shape, dtype) for rank in range(size)])
        terms = [value(rank, number, (size * shape[0], *shape[1:]), dtype).view(size, *shape) for rank in range(size)]
        for rank, (wholes, own, _) in enumerate(found):
            assert torch.equal(wholes[number], expected)
            others = [terms[other][rank] for other in range(size) if other != rank]
            total = terms[rank][rank].clone()
            for term in others:
                total += term
            assert torch.equal(own[number], total), "own part first, then by ascending rank"
    if size == 2:
        assert_same_sequence([calls for _, _, calls in found])


def swap(reads_memory):
    """What two swaps, one on each lane and one on its way beside the other, gave on this rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    topology = Topology.of(size, wp=size)
    limit = timedelta(seconds=30)
    group = make_groups(topology, rank, backend="gloo", timeout=limit, reads_memory=reads_memory)["wp"]
    sent = [value(rank, number, (size, 3, 2), torch.float64) for number in range(2)]
    received = [torch.empty_like(one) for one in sent]
    with collectives() as calls:
        exchanges = [
            swap_rows(here, there, group, lane=lane, what="rows")
            for here, there, lane in zip(received, sent, (GATHER, REDUCE), strict=True)
        ]
        for exchange in reversed(exchanges):
            exchange.wait()
            exchange.wait()
            exchange.end()
    return received, calls


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reads_memory", [pytest.param(True, marks=reads), False])
def test_rows_that_are_swapped(ranks, size, reads_memory):
    found = ranks(size)(swap, reads_memory)
    for rank, (received, calls) in enumerate(found):
        for number, one in enumerate(received):
            parts = [value(other, number, (size, 3, 2), torch.float64)[rank] for other in range(size)]
            assert torch.equal(one, torch.stack(parts))
        # By messages: a header and a row to each of the others, and from each.
        assert len(calls) == (0 if size == 1 else 2 if reads_memory else 2 * 4 * (size - 1))


def together(dtype, device, coalesced):
    """What a gather and a reduction gave by the backend's own collectives, and how many there were.

    coalesced: whether it is asked to take several tensors in one call; None leaves that to it.
    """
    with World.join(device) as world:
        group = world.groups(Topology.of(world.size, wp=world.size), 30)["wp"]
        group.memories.clear()
        rows.is_direct = lambda lane, device: False
        if coalesced is not None:
            comm_together.is_coalesced = lambda lane: coalesced
        place = world.device.torch_device
        wholes = [torch.full((world.size * shape[0], *shape[1:]), 7.0, dtype=dtype, device=place) for shape in SHAPES]
        shards = [value(world.rank, number, shape, dtype).to(place) for number, shape in enumerate(SHAPES)]
        given = [value(world.rank, number, whole.shape, dtype).to(place) for number, whole in enumerate(wholes)]
        assert all(num_received(shape[0], group, place) == 0 for shape in SHAPES), "the sum is in place"
        scratches = [torch.empty((0, *shape[1:]), dtype=dtype, device=place) for shape in SHAPES]
        with collectives() as calls:
            exchanges = [gather_rows(wholes, shards, group, what="weights")]
            exchanges.append(reduce_rows(given, scratches, group, what="gradients"))
            for exchange in exchanges:
                exchange.wait()
                exchange.end()
        own = [one.view(world.size, shape[0], *shape[1:])[world.rank] for one, shape in zip(given, SHAPES, strict=True)]
        return [one.cpu() for one in wholes], [one.cpu() for one in own], len(calls)


@pytest.mark.parametrize(
    ("size", "device", "coalesced"),
    [
        (2, "cpu", True),
        (3, "cpu", True),
        (2, "cpu", None),
        (3, "cpu", None),
        pytest.param(2, "cuda", None, marks=pytest.mark.gpu(2)),
        pytest.param(2, "cuda", None, marks=pytest.mark.gpu),
    ],
)
def test_the_backends_own_collectives(ranks, size, device, coalesced):
    """Where messages do not go directly: on NCCL one gather and one reduction, however many tensors.

    On gloo, whose tensors are on CUDA then, one of each for every tensor; None takes that way on the CPU as well.
    """
    dtype = torch.float64
    for rank, (wholes, own, num_calls) in enumerate(ranks(size, init=False)(together, dtype, device, coalesced)):
        if device == "cpu":
            assert num_calls == (2 if coalesced else 2 * len(SHAPES))
        for number, shape in enumerate(SHAPES):
            parts = [value(other, number, shape, dtype) for other in range(size)]
            assert torch.equal(wholes[number], torch.cat(parts))
            terms = [value(other, number, (size * shape[0], *shape[1:]), dtype) for other in range(size)]
            total = sum(term.view(size, *shape)[rank] for term in terms)
            torch.testing.assert_close(own[number], total, rtol=1e-14, atol=1e-14)


def test_one_rank_alone(ranks):
    ((wholes, own, calls),) = ranks(1)(exchange, torch.float64, True)
    for number, shape in enumerate(SHAPES):
        assert torch.equal(wholes[number], value(0, number, shape, torch.float64))
        assert torch.equal(own[number], value(0, number, shape, torch.float64))
    assert calls == []

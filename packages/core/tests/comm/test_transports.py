"""Rows are gathered and reduced as a dense sum says, on any number of ranks; different exchanges raise on both sides."""

import os
from typing import Any

import pytest
import torch

from sley_core.comm.exchanges import Mark, checksum
from sley_core.comm.transport import CollectiveTransport
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL, GATHER, REDUCE, Topology
from sley_testing.collectives import assert_same_sequence, can_read_peers, collectives

reads = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

SHAPES = [(3, 2), (1,), (2, 0), (4, 2, 2)]


def value(rank, number, shape, dtype):
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def groups_of(cross_memory, **sizes):
    world = World.join("cpu")
    topology = Topology.from_sizes(world.size, **(sizes or {"wp": world.size}))
    return world.make_groups(topology, 30, cross_memory=cross_memory)


def exchange(dtype, cross_memory):
    """What a gather, a reduction and a swap of all shapes gave on this rank, all under way at once, and what was called."""
    group = groups_of(cross_memory)["wp"]
    rank, size = group.coord, group.size
    by_gather, by_reduce = group.transport(GATHER), group.transport(REDUCE)
    tensors = [torch.full((size * shape[0], *shape[1:]), 7.0, dtype=dtype) for shape in SHAPES]
    shards = [value(rank, number, shape, dtype) for number, shape in enumerate(SHAPES)]
    sent = value(rank, len(SHAPES), (size, 3, 2), dtype)
    received = torch.empty_like(sent)
    with collectives() as calls:
        first = by_gather.all_gather(tensors, shards, label="weights")
        given = [value(rank, number, whole.shape, dtype) for number, whole in enumerate(tensors)]
        scratches = [torch.empty((by_reduce.num_scratch_rows(shape[0]), *shape[1:]), dtype=dtype) for shape in SHAPES]
        second = by_reduce.reduce_scatter(given, scratches, label="gradients")
        third = by_gather.all_to_all(received, sent, label="rows")
        for work in (third, second, first):
            work.wait()
            work.wait_sent()
    own = [one.view(size, shape[0], *shape[1:])[rank] for one, shape in zip(given, SHAPES, strict=True)]
    return tensors, own, received, list(calls)


def out_of_order(cross_memory):
    """Every verb, its handle used in an odd order and more than once; what came of those that were awaited."""
    groups = groups_of(cross_memory)
    rank, size = groups["wp"].coord, groups["wp"].size
    transport, sums = groups["wp"].transport(REDUCE), groups["stage"].transport()
    found = []
    for calls in (
        ["wait_sent"],
        ["release", "release", "wait"],
        ["is_completed", "wait", "wait", "is_completed", "release", "wait"],
    ):
        whole, shard = torch.zeros(2 * size), torch.full((2,), 1.0 + rank)
        given, scratch = torch.full((2 * size,), 1.0 + rank), torch.zeros(transport.num_scratch_rows(2))
        received, sent = torch.zeros(size, 1), torch.full((size, 1), 1.0 + rank)
        total = torch.full((3,), 1.0 + rank)
        works = [
            transport.all_gather([whole], [shard], label="weights"),
            transport.reduce_scatter([given], [scratch], label="gradients"),
            transport.all_to_all(received, sent, label="rows"),
            sums.all_reduce(total, label="a bucket"),
        ]
        for work in works:
            for call in [*calls, "wait_sent", "is_completed", "wait_sent"]:
                getattr(work, call)()
        assert all(work.is_completed() for work in works)
        results = [given[2 * rank : 2 * rank + 2], received.view(-1), total]
        # A gather that nobody awaited may be left unread.
        found.append([one.tolist() for one in (results if calls[0] != "is_completed" else [whole, *results])])
    published = transport.publish([shard], label="the weights")
    work = published.all_gather([whole.zero_()], [shard], label="weights")
    for call in ("is_completed", "wait", "wait", "release", "release", "wait", "wait_sent", "is_completed"):
        getattr(work, call)()
    published.wait_sent()
    groups.close()
    return [*found, whole.tolist()], [len(group.transports) for group in groups.values()]


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cross_memory", [pytest.param(True, marks=reads), False])
def test_handles_that_are_used_late_and_twice(ranks, size, cross_memory):
    """Each call includes what it needs of those before it, and comes to nothing the second time."""
    total = float(sum(range(1, size + 1)))
    each = [1.0 + rank for rank in range(size)]
    gathered = [one for one in each for _ in range(2)]
    results = [[total] * 2, each, [total] * 3]
    for found, left in ranks(size)(out_of_order, cross_memory):
        assert found == [results, results, [gathered, *results], gathered]
        assert not any(left), "closed groups hold no communicator"


def both_kinds():
    """The transports of this rank's groups, by cross-memory attach and by messages."""
    groups = [groups_of(cross_memory, sp=2, wp=2) for cross_memory in (True, False)]
    return [{axis: [type(one).__name__ for one in group.transports.values()] for axis, group in of.items()} for of in groups]


@reads
def test_each_group_has_the_transport_that_fits(ranks):
    """Weights, gradients and slices are read by cross-memory attach where that may be; the rest goes by messages."""
    for found, messages in ranks(4)(both_kinds):
        assert {axis for axis, names in found.items() if "CmaTransport" in names} == {"wp", "stage", "wdp", "sp"}
        assert found["wp"] == ["CmaTransport", "CmaTransport"]
        assert found["sp"] == ["CmaTransport"]
        assert found["control"] == ["MessageTransport"]
        assert all({"MessageTransport"} >= set(names) for names in messages.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("cross_memory", [pytest.param(True, marks=reads), False])
def test_rows_of_many_tensors(ranks, size, dtype, cross_memory):
    """By reading each other's memory, and by messages: the same bits."""
    found = ranks(size)(exchange, dtype, cross_memory)
    for rank, (tensors, own, received, calls) in enumerate(found):
        for number, shape in enumerate(SHAPES):
            assert torch.equal(tensors[number], torch.cat([value(other, number, shape, dtype) for other in range(size)]))
            terms = [value(other, number, (size * shape[0], *shape[1:]), dtype) for other in range(size)]
            terms = [term.view(size, *shape)[rank] for term in terms]
            total = terms[rank].clone()
            for term in terms[:rank] + terms[rank + 1 :]:
                total += term
            assert torch.equal(own[number], total), "own part first, then by ascending rank"
        swapped = [value(other, len(SHAPES), (size, 3, 2), dtype)[rank] for other in range(size)]
        assert torch.equal(received, torch.stack(swapped))
        # By messages: of each exchange a header and each of its tensors to each of the others, and from each.
        num_messages = 2 * sum(1 + num_tensors for num_tensors in (len(SHAPES), len(SHAPES), 1)) * (size - 1)
        assert len(calls) == (0 if size == 1 else 3 if cross_memory else num_messages)
    if size == 2:
        assert_same_sequence([calls for *_, calls in found])


def together(dtype, device, coalesced):
    """What a gather and a reduction gave by the backend's own collectives, and how many there were.

    coalesced: whether it is asked to take several tensors in one call; None leaves that to it.
    """
    with World.join(device) as world:
        group = world.make_groups(Topology.from_sizes(world.size, wp=world.size), 30)["wp"]
        channel = group.channel(REDUCE)
        transport = CollectiveTransport(group, REDUCE, channel, group.exchange_log)
        if coalesced is not None:
            transport.is_coalesced = coalesced
        place = world.device.torch_device
        tensors = [torch.full((world.size * shape[0], *shape[1:]), 7.0, dtype=dtype, device=place) for shape in SHAPES]
        shards = [value(world.rank, number, shape, dtype).to(place) for number, shape in enumerate(SHAPES)]
        given = [value(world.rank, number, whole.shape, dtype).to(place) for number, whole in enumerate(tensors)]
        assert all(transport.num_scratch_rows(shape[0]) == 0 for shape in SHAPES), "the sum is in place"
        scratches = [torch.empty((0, *shape[1:]), dtype=dtype, device=place) for shape in SHAPES]
        with collectives() as calls:
            exchanges = [transport.all_gather(tensors, shards, label="weights")]
            exchanges.append(transport.reduce_scatter(given, scratches, label="gradients"))
            for exchange in exchanges:
                exchange.wait()
                exchange.wait_sent()
        own = [one.view(world.size, shape[0], *shape[1:])[world.rank] for one, shape in zip(given, SHAPES, strict=True)]
        return [one.cpu() for one in tensors], [one.cpu() for one in own], len(calls)


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
    for rank, (tensors, own, num_calls) in enumerate(ranks(size, init=False)(together, dtype, device, coalesced)):
        if device == "cpu":
            assert num_calls == (2 if coalesced else 2 * len(SHAPES))
        for number, shape in enumerate(SHAPES):
            parts = [value(other, number, shape, dtype) for other in range(size)]
            assert torch.equal(tensors[number], torch.cat(parts))
            terms = [value(other, number, (size * shape[0], *shape[1:]), dtype) for other in range(size)]
            total = sum(term.view(size, *shape)[rank] for term in terms)
            torch.testing.assert_close(own[number], total, rtol=1e-14, atol=1e-14)


# -- exchanges that differ ------------------------------------------------------------------------------------------------


def reduced(group: Any, rows: int, label: str = "gradients", checksum: int = 0) -> Any:
    whole = torch.ones(2 * rows, 3)
    scratch = torch.empty(group.transport(REDUCE).num_scratch_rows(rows), 3)
    return group.transport(REDUCE).reduce_scatter([whole], [scratch], label=label, checksum=checksum)


def gathered(group: Any, rows: int, label: str = "weights") -> Any:
    return group.transport(GATHER).all_gather([torch.empty(2 * rows)], [torch.ones(rows)], label=label)


def swapped(group: Any, width: int, channel: str = GATHER, dtype: torch.dtype = torch.float32) -> Any:
    return group.transport(channel).all_to_all(
        torch.empty(2, width, dtype=dtype), torch.ones(2, width, dtype=dtype), label="rows"
    )


A, B = checksum(["expert_a.weight"]), checksum(["expert_b.weight"])


def rows_that_differ(memory: bool) -> list[str]:
    """What each of several pairs of unequal exchanges says on this rank. Each has a world's groups of its own."""
    said = []
    rank = int(os.environ["RANK"])
    for mine, theirs in [
        (lambda group: reduced(group, 4), lambda group: reduced(group, 5)),
        (lambda group: reduced(group, 4, checksum=A), lambda group: reduced(group, 4, checksum=B)),
        (lambda group: gathered(group, 4), lambda group: gathered(group, 2)),
        (lambda group: gathered(group, 4), lambda group: gathered(group, 4, "other weights")),
        (lambda group: swapped(group, 4), lambda group: swapped(group, 2, dtype=torch.float64)),
        (lambda group: swapped(group, 4), lambda group: gathered(group, 8)),
    ]:
        group = groups_of(memory)["wp"]
        exchange = (theirs if rank else mine)(group)
        with pytest.raises(RunError) as caught:
            exchange.wait()
        (found,) = caught.value.diagnostics
        said.append(f"{found.code}: {found.message}")
    return said


@pytest.mark.parametrize("memory", [pytest.param(True, marks=reads), False])
def test_exchanges_of_rows_that_differ(ranks, memory):
    """Both ranks say what each of them exchanges, and how long it is."""
    first, second = ranks(2)(rows_that_differ, memory)
    assert first[0] == "ranks-differ: rank 0 exchanges gradients (96 bytes), but rank 1 exchanges gradients (120 bytes)"
    assert second[0] == "ranks-differ: rank 1 exchanges gradients (120 bytes), but rank 0 exchanges gradients (96 bytes)"
    assert first[1] == "ranks-differ: rank 0 exchanges gradients (96 bytes), but rank 1 exchanges other tensors of this size"
    assert "rank 1 exchanges weights (8 bytes)" in first[2]
    assert "rank 1 exchanges other weights (16 bytes)" in first[3]
    assert "rank 1 exchanges other tensors of this size" in first[4], "as many bytes of another type"
    assert "rank 1 exchanges weights (32 bytes)" in first[5]
    assert len(second) == 6


def sums_that_differ() -> list[str]:
    said = []
    rank = int(os.environ["RANK"])
    for size, value in [(1000 + rank, 0), (10, A if rank else B), (4096, 0)]:
        transport = groups_of(True)["stage"].transport()
        # Behind the shorter one lies what is nobody's business.
        whole = torch.full((size + 100,), 7.0)[:size].fill_(1.0)
        given = whole if size < 4096 or not rank else whole.double()
        one = transport.all_reduce(given, label="the bucket of w", checksum=value)
        with pytest.raises(RunError) as caught:
            one.wait_sent()
        assert bool((whole == 1).all()), "nothing of another length was added"
        said.append(str(caught.value))
    return said


@reads
def test_sums_of_other_lengths_and_contents(ranks):
    """Nothing is read, least of all behind the end of what a peer offers."""
    for rank, said in enumerate(ranks(2)(sums_that_differ)):
        assert all("ranks-differ" in one for one in said)
        sizes = [f"({4 * (1000 + one)} bytes)" for one in (rank, 1 - rank)]
        assert f"rank {rank} exchanges the bucket of w over stage[0, 1] {sizes[0]}" in said[0]
        assert f"but rank {1 - rank} exchanges the bucket of w over stage[0, 1] {sizes[1]}" in said[0]
        assert "other tensors of this size" in said[1]


def others() -> list[str]:
    """A swap on the channel of a group that has one only; shares of other shards."""
    rank = int(os.environ["RANK"])
    said = []
    for start in (lambda: swapped(groups_of(True, sp=2)["sp"], 2 + rank, DEFAULT_CHANNEL).wait(), lambda: shared(rank)):
        with pytest.raises(RunError) as caught:
            start()
        said.append(caught.value.diagnostics[0].code)
    return said


def shared(rank: int) -> None:
    group = groups_of(True)["wp"]
    shards = [torch.ones(3 + rank)]
    share = group.transport(GATHER).publish(shards, label="the weights")
    share.all_gather([torch.empty(2 * (3 + rank))], shards, label="the weights").wait()


@reads
def test_a_channel_without_memory_and_shares(ranks):
    assert ranks(2)(others) == [["ranks-differ"] * 2] * 2


def test_a_mark_is_of_all_that_an_exchange_is():
    tensor = torch.zeros(4)
    marks = {
        Mark.from_tensors("reduce", "w", [tensor]),
        Mark.from_tensors("gather", "w", [tensor]),
        Mark.from_tensors("reduce", "v", [tensor]),
        Mark.from_tensors("reduce", "w", [tensor.long()[:2]]),
        Mark.from_tensors("reduce", "w", [tensor[:2], tensor[2:]]),
        Mark.from_tensors("reduce", "w", [tensor[:1], tensor[1:]]),
        Mark.from_tensors("reduce", "w", [tensor], A),
    }
    assert len({mark.checksum for mark in marks}) == 7
    assert checksum(["a", "bc"]) != checksum(["ab", "c"])
    assert Mark.from_tensors("reduce", "w", [tensor]) == Mark.from_tensors("reduce", "w", [tensor + 1])

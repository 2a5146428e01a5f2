"""Ranks whose exchanges differ in operation, label, dtype or length raise `ranks-differ` on both sides."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch

from sley_core.comm.group import Groups, make_groups
from sley_core.comm.transport import Mark, checksum
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL, GATHER, REDUCE, Topology
from sley_testing.collectives import can_read_peers

reads = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
by_both = pytest.mark.parametrize("memory", [pytest.param(True, marks=reads), False])


def make(memory: bool = True, **sizes: int) -> Groups:
    topology = Topology.from_sizes(int(os.environ["WORLD_SIZE"]), **sizes)
    limit = timedelta(seconds=20)
    return make_groups(topology, int(os.environ["RANK"]), backend="gloo", timeout=limit, cross_memory=memory)


def reduced(group: Any, rows: int, label: str = "gradients", contents: int = 0) -> Any:
    whole = torch.ones(2 * rows, 3)
    scratch = torch.empty(group.transport(REDUCE).num_scratch_rows(rows), 3)
    return group.transport(REDUCE).reduce_scatter([whole], [scratch], label=label, contents=contents)


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
        (lambda group: reduced(group, 4, contents=A), lambda group: reduced(group, 4, contents=B)),
        (lambda group: gathered(group, 4), lambda group: gathered(group, 2)),
        (lambda group: gathered(group, 4), lambda group: gathered(group, 4, "other weights")),
        (lambda group: swapped(group, 4), lambda group: swapped(group, 2, dtype=torch.float64)),
        (lambda group: swapped(group, 4), lambda group: gathered(group, 8)),
    ]:
        group = make(memory, wp=2)["wp"]
        exchange = (theirs if rank else mine)(group)
        with pytest.raises(RunError) as caught:
            exchange.wait()
        (found,) = caught.value.diagnostics
        said.append(f"{found.code}: {found.message}")
    return said


@by_both
def test_exchanges_of_rows_that_differ(ranks, memory):
    """Both ranks say what each of them exchanges, and how long it is."""
    first, second = ranks(2)(rows_that_differ, memory)
    assert first[0] == "ranks-differ: rank 0 exchanges gradients (96 bytes), but rank 1 exchanges gradients (120 bytes)"
    assert second[0] == "ranks-differ: rank 1 exchanges gradients (120 bytes), but rank 0 exchanges gradients (96 bytes)"
    assert first[1] == "ranks-differ: rank 0 exchanges gradients (96 bytes), but rank 1 exchanges other parts of it"
    assert "rank 1 exchanges weights (8 bytes)" in first[2]
    assert "rank 1 exchanges other weights (16 bytes)" in first[3]
    assert "rank 1 exchanges other parts of it" in first[4], "as many bytes of another type"
    assert "rank 1 exchanges weights (32 bytes)" in first[5]
    assert len(second) == 6


def sums_that_differ() -> list[str]:
    said = []
    rank = int(os.environ["RANK"])
    for size, contents in [(1000 + rank, 0), (10, A if rank else B), (4096, 0)]:
        transport = make()["stage"].transport()
        # Behind the shorter one lies what is nobody's business.
        whole = torch.full((size + 100,), 7.0)[:size].fill_(1.0)
        given = whole if size < 4096 or not rank else whole.double()
        one = transport.all_reduce(given, label="the bucket of w", contents=contents)
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
        assert "other parts of it" in said[1]


def others() -> list[str]:
    """A swap on the channel of a group that has one only; shares of other shards."""
    rank = int(os.environ["RANK"])
    said = []
    for start in (lambda: swapped(make(sp=2)["sp"], 2 + rank, DEFAULT_CHANNEL).wait(), lambda: shared(rank)):
        with pytest.raises(RunError) as caught:
            start()
        said.append(caught.value.diagnostics[0].code)
    return said


def shared(rank: int) -> None:
    group = make(wp=2)["wp"]
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
    assert len({mark.number for mark in marks}) == 7
    assert checksum(["a", "bc"]) != checksum(["ab", "c"])
    assert Mark.from_tensors("reduce", "w", [tensor]) == Mark.from_tensors("reduce", "w", [tensor + 1])

"""Ranks that wait for each other, or exchange other things or other lengths of it, are told so on both sides; ranks that wait
for one that is late, dead or slow are not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sley_core.comm import progress
from sley_core.comm.groups import Groups, make_groups
from sley_core.comm.guard import RankWait, find_blocked
from sley_core.comm.marks import Mark, checksum
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL, GATHER, REDUCE, Topology
from sley_testing.collectives import can_read_peers

reads = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
by_both = pytest.mark.parametrize("memory", [pytest.param(True, marks=reads), False])

LIMIT_S = 2.0
Act = Callable[[Groups], object]


def make(memory: bool = True, limit_s: float = 20.0, **sizes: int) -> Groups:
    topology = Topology.of(int(os.environ["WORLD_SIZE"]), **sizes)
    limit = timedelta(seconds=limit_s)
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


def gather(groups: Groups) -> None:
    gathered(groups["wp"], 2, "the weights of one").wait()


def total(groups: Groups) -> None:
    groups["all"].all_reduce(torch.ones(2), label="loss and gradient norm").wait()


def message(groups: Groups) -> None:
    """From the first stage to the second."""
    group = groups["pp"]
    start = group.receive if group.coord else group.send
    start(torch.ones(2), "up", 1 - group.coord, label="what stage 0 sends").wait()


def answer(groups: Groups) -> None:
    group = groups["pp"]
    start = group.send if group.coord else group.receive
    start(torch.ones(2), "down", 1 - group.coord, label="what stage 1 sends").wait()


def ended(acts: list[list[Act]], memory: bool, share: float = 2.0, **sizes: int) -> tuple[str, str, float]:
    """Code and message of the error with which the acts of this rank end, and after how many seconds. share: of the limit, for
    which it hears what others wait in: on a busy machine waits that began together end apart.
    """
    groups = make(memory, LIMIT_S, **sizes)
    total(groups)
    begin = time.monotonic()
    try:
        with patch.object(progress, "PATIENCE_SHARE", share):
            for act in acts[groups["control"].coord]:
                act(groups)
    except RunError as error:
        time.sleep(1.0)  # peers say what they waited in, not that this rank has left
        return error.diagnostics[0].code, error.diagnostics[0].message, time.monotonic() - begin
    return "", "", time.monotonic() - begin


@by_both
def test_a_rank_that_has_left_the_layers(ranks: Any, memory: bool) -> None:
    """One gathers once more than the other, which waits in the sum that ends a step."""
    words = "exchange" if memory else "all-gather"
    first, second = ranks(2)(ended, [[gather, gather, total], [gather, total]], memory, wp=2)
    assert first[:2] == second[:2]
    assert first[0] == "ranks-differ"
    assert first[1] == (
        f"ranks wait for each other: rank 0 waits in the {words} of the weights of one over wp[0, 1] for rank 1, "
        "rank 1 waits in the all-reduce of loss and gradient norm over all[0, 1] for rank 0"
    )


def test_a_circle_over_stages(ranks: Any) -> None:
    """Ranks 0 and 1 share the first stage, 2 and 3 the second: 1 skips a gather, so 0 never sends what 2 needs."""
    acts: list[list[Act]] = [[gather, message], [message, answer], [message, gather, answer], [message, gather, answer]]
    found = ranks(4)(ended, acts, False, pp=2, wp=2)
    assert {code for code, *_ in found} == {"ranks-differ"}
    message_of = found[0][1]
    assert message_of.index("rank 0 waits in the all-gather") < message_of.index("rank 1 waits in the receive")
    assert "rank 3 waits in the all-gather of the weights of one over wp[2, 3] for rank 2" in message_of
    assert "rank 2 waits in the receive of what stage 0 sends over pp[0, 2] for rank 0" in message_of


def late(groups: Groups) -> None:
    time.sleep(LIMIT_S + 1.5)


def test_a_rank_that_is_late_is_not_one_that_differs(ranks: Any) -> None:
    """It comes when the other has given up; what both do is the same."""
    first, second = ranks(2)(ended, [[gather, total], [late, gather, total]], False, 1 / 8, wp=2)
    assert first[0] == "collective-failed"
    assert second[0] in ("", "collective-failed")
    assert first[2] < LIMIT_S + 15


def test_whoever_has_come_is_not_waited_for() -> None:
    here = RankWait(0, "a", (0, 1), "wp gather", 3, {"wp gather": 3})
    assert here.is_waiting_for(RankWait(1, "b", (0, 1), "wp reduce", 1, {"wp gather": 2}))
    assert not here.is_waiting_for(RankWait(1, "b", (0, 1), "wp reduce", 1, {"wp gather": 3}))
    assert not here.is_waiting_for(RankWait(2, "b", (2, 3), "wp gather", 1, {}))


def one(rank: int, late: int) -> RankWait:
    """Rank `rank` waits for rank `late`, in an exchange of which that has started none."""
    return RankWait(rank, f"exchange {rank}", (rank, late), f"queue {rank}", 1, {f"queue {rank}": 1})


def test_ranks_that_wait_for_each_other_are_found_wherever_that_begins() -> None:
    chain = {rank: one(rank, rank + 1) for rank in range(5)}
    assert find_blocked(chain) == []
    pairs = find_blocked(chain | {5: one(5, 3)})
    assert [(wait.rank, late.rank) for wait, late in pairs] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 3)]
    pairs = find_blocked({5: one(5, 3), 4: one(4, 5), 3: one(3, 4), 7: one(7, 9)})
    assert [(wait.rank, late.rank) for wait, late in pairs] == [(3, 4), (4, 5), (5, 3)]


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
        Mark.of("reduce", "w", [tensor]),
        Mark.of("gather", "w", [tensor]),
        Mark.of("reduce", "v", [tensor]),
        Mark.of("reduce", "w", [tensor.long()[:2]]),
        Mark.of("reduce", "w", [tensor[:2], tensor[2:]]),
        Mark.of("reduce", "w", [tensor[:1], tensor[1:]]),
        Mark.of("reduce", "w", [tensor], A),
    }
    assert len({mark.number for mark in marks}) == 7
    assert checksum(["a", "bc"]) != checksum(["ab", "c"])
    assert Mark.of("reduce", "w", [tensor]) == Mark.of("reduce", "w", [tensor + 1])

"""Ranks of one host that read each other's memory: what is read, who waits for whom, and what is said when nobody comes."""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sley_cma import connection, offers, process_vm
from sley_cma.process_vm import MemorySpan, read, write
from sley_core.comm.group import Group
from sley_core.comm.groups import Groups, make_groups
from sley_core.comm.transport import Work
from sley_core.errors import RunError
from sley_core.topology import GATHER, REDUCE, Topology
from sley_testing.collectives import can_read_peers

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

LIMIT = timedelta(seconds=30)


def groups(limit: timedelta = LIMIT, **axes: int) -> Groups:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return make_groups(Topology.of(size, **axes), rank, backend="gloo", timeout=limit, attaches=True)


def wp(limit: timedelta = LIMIT) -> Any:
    return groups(limit, wp=int(os.environ["WORLD_SIZE"]))["wp"]


def stage() -> Group:
    return groups()["stage"]


def laps() -> list[float]:
    """Many more exchanges than offers can be open, by a rank that is now early and now late."""
    group = wp()
    offers.RING = 4
    sums = []
    shard = torch.empty(3)
    for lap in range(20):
        if lap % 5 == group.coord:
            time.sleep(0.005)
        shard.fill_(10.0 * lap + group.coord)
        whole = torch.empty(3 * group.size)
        exchange = group.transport(GATHER).all_gather([whole], [shard], what="laps")
        exchange.wait()
        exchange.wait_sent()
        given = whole.clone()
        reduction = group.transport(REDUCE).reduce_scatter([given], [], what="laps")
        reduction.wait_sent()
        sums.append(float(given.view(group.size, 3)[group.coord][0]))
    return sums


def test_no_one_reads_what_is_written_again(ranks):
    """`wait_sent` returns when all others have read, however late they are: the next lap overwrites the same shard."""
    for rank, sums in enumerate(ranks(3)(laps)):
        assert sums == [3 * (10.0 * lap + rank) for lap in range(20)]


def unread() -> float:
    group = wp()
    exchanges = [
        group.transport(GATHER).all_gather([torch.empty(2 * group.size)], [torch.full((2,), 1.0)], what="weights")
        for _ in range(3)
    ]
    whole = torch.empty(2 * group.size)
    last = group.transport(GATHER).all_gather([whole], [torch.full((2,), 5.0)], what="weights")
    last.wait()
    for exchange in (*exchanges, last):
        exchange.wait_sent()
    return float(whole.sum())


def test_what_nobody_waits_for_is_not_read(ranks):
    """A gather that was not used ends too, and the one after it is right."""
    assert ranks(2)(unread) == [20.0, 20.0]


def shared() -> list[list[float]]:
    """Steps in which shards are shared once, gathered twice, and written afterwards."""
    group = wp()
    shards = [torch.empty(2), torch.empty(0), torch.empty(1, 3)]
    found = []
    for step in range(6):
        for shard in shards:
            shard.fill_(10.0 * step + group.coord)
        if step % 3 == group.coord:
            time.sleep(0.01)
        share = group.transport(GATHER).publish(shards, what="weights")
        wholes = [torch.empty(group.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        for at in ([2, 1], [0], [2]):
            given = [wholes[place] for place in at], [shards[place] for place in at]
            exchange = share.all_gather(*given, what="some")
            exchange.wait()
            exchange.wait_sent()
        share.wait_sent()
        found.append(wholes[0].tolist() + wholes[2].flatten().tolist())
    return found


def test_what_is_shared_is_read_many_times_and_then_written(ranks):
    for found in ranks(3)(shared):
        for step, values in enumerate(found):
            each = [10.0 * step + rank for rank in range(3)]
            assert values == [one for one in each for _ in range(2)] + [one for one in each for _ in range(3)]


def let_go(is_shared: bool) -> list[bool]:
    """Whether the memory that was gathered into is still there: before `release`, and after it."""
    group = wp()
    shards = [torch.ones(2)]
    share = group.transport(GATHER).publish(shards, what="weights")
    whole = torch.empty(2 * group.size)
    source = share if is_shared else group.transport(GATHER)
    exchange = source.all_gather([whole], shards, what="weights")
    exchange.wait()
    storage = weakref.ref(whole.untyped_storage())
    del whole
    found = [storage() is not None]
    exchange.release()
    found.append(storage() is not None)
    exchange.wait_sent()
    share.wait_sent()
    return found


@pytest.mark.parametrize("is_shared", [True, False])
def test_memory_that_is_free_is_let_go(ranks, is_shared):
    """A gather that has not ended yet holds none of what it has brought."""
    assert ranks(2)(let_go, is_shared) == [[True, False]] * 2


def nobody_comes(sums: bool) -> str:
    limit, what = timedelta(seconds=1), "the weights of block.3"
    group = groups(limit)["stage"] if sums else wp(limit)
    if group.coord == 1:
        time.sleep(2.5)
        return ""
    if sums:
        wait = group.transport().all_reduce(torch.ones(4), what=what).wait_sent
    else:
        wait = group.transport(GATHER).all_gather([torch.empty(4)], [torch.ones(2)], what=what).wait
    with pytest.raises(RunError) as raised:
        wait()
    return str(raised.value)


@pytest.mark.parametrize("sums", [False, True])
def test_a_peer_that_does_not_come(ranks, sums):
    said, _ = ranks(2)(nobody_comes, sums)
    assert "the weights of block.3" in said
    assert "with rank 1 failed on rank 0: it did not come within 1 s" in said


def stranger() -> list[int]:
    group = wp()
    inbox = group.transport(GATHER).rows.connection._addresses[0].inbox
    word = torch.zeros(1, dtype=torch.int64)
    here = [MemorySpan(word.data_ptr(), 8)]
    return [
        read(os.getpid(), here, [MemorySpan(inbox, 8)]),
        read(2**22 + 1, here, [MemorySpan(inbox, 8)]),
        write(1, here, [MemorySpan(8, 8)]),
    ]


def test_what_cannot_be_reached_is_said(ranks):
    """No such process, and no such memory."""
    found, _ = ranks(2)(stranger)
    assert found == [8, -1, -1]


def kinds_without(lacking: str) -> list[str]:
    """The transports of this rank's lanes where the last rank lacks something."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if lacking == "the right to read":
            connection.read = lambda *_: -1
        if lacking == "the boot's number":
            connection.BOOT_ID = connection.BOOT_ID.with_name("absent")
        if lacking == "descriptors of processes":
            del os.pidfd_open
    return [type(one).__name__ for one in wp().transports.values()]


@pytest.mark.parametrize("lacking", ["nothing", "the right to read", "the boot's number", "descriptors of processes"])
def test_all_ranks_take_the_same_way(ranks, lacking):
    """A rank that may not read, a /proc that hides the boot's number, or a system that does not tell when a process ends."""
    kind = "CmaTransport" if lacking == "nothing" else "Direct"
    assert ranks(3)(kinds_without, lacking) == [[kind, kind]] * 3


def a_stranger_with_the_peers_number() -> list[str]:
    """The peer has ended, by its descriptor; its number is that of a process whose memory can be written all the same."""
    group = wp()
    rows = group.transport(GATHER).rows
    memory = rows.connection
    peer = 1 - group.coord
    shard = torch.ones(2)
    group.transport(GATHER).all_gather([torch.empty(4)], [shard], what="weights").wait_sent()
    gone = os.posix_spawn("/bin/true", ["true"], {})
    memory._process_polls[peer] = connection.select.poll()
    memory._process_polls[peer].register(os.pidfd_open(gone), connection.select.POLLIN)
    os.waitpid(gone, 0)
    before = list(memory.inbox.words)
    said = []
    for call in (
        lambda: group.transport(GATHER).all_gather([torch.empty(4)], [shard], what="weights"),
        lambda: rows.finish_read(peer, 7, "weights"),
        lambda: memory.read(peer, [MemorySpan(shard.data_ptr(), 8)], [MemorySpan(memory._addresses[peer].inbox, 8)], "weights"),
    ):
        with pytest.raises(RunError) as raised:
            call()
        said.append(raised.value.diagnostics[0].code)
    dist.barrier(group=group.lane(GATHER))
    assert list(memory.inbox.words) == before, "nobody wrote"
    return said


def test_nothing_is_written_into_a_process_that_has_the_number_of_a_peer(ranks):
    """Numbers of processes are used again; a descriptor says that the process that had it is gone."""
    assert ranks(2)(a_stranger_with_the_peers_number) == [["collective-failed"] * 3] * 2


def many_open() -> list[list[float]]:
    """Twenty exchanges of each kind under way at a time, where four can be open; what each brings, and what is still open."""
    group = wp()
    offers.RING = 4
    size, coord = group.size, group.coord
    started, results = [], []
    for number in range(20):
        result = torch.full((2 * size,), -1.0)
        started.append(group.transport(GATHER).all_gather([result], [torch.full((2,), 10.0 * number + coord)], what="weights"))
        results.append(result)
        whole = torch.full((2 * size,), 10.0 * number + coord)
        started.append(group.transport(REDUCE).reduce_scatter([whole], [], what="gradients"))
        results.append(whole[2 * coord : 2 * coord + 2])
        received = torch.empty(size, 1)
        sent = 100.0 * number + 10.0 * coord + torch.arange(size, dtype=torch.float32)[:, None]
        started.append(group.transport(GATHER).all_to_all(received, sent, what="vectors"))
        results.append(received.view(-1))
    for exchange in started:
        exchange.wait()
        exchange.wait_sent()
    num_open = [len(group.transport(lane).rows._open_offers) for lane in (GATHER, REDUCE)]
    return [*(result.tolist() for result in results), num_open]


def test_any_number_of_exchanges_may_be_under_way(ranks):
    """The oldest is completed for the next one: nobody waits for ranks that wait for it."""
    for coord, found in enumerate(ranks(3, 30)(many_open)):
        wanted: list[list[float]] = []
        for number in range(20):
            wanted.append([10.0 * number + peer for peer in range(3) for _ in range(2)])
            wanted.append([3 * 10.0 * number + 3.0] * 2)
            wanted.append([100.0 * number + 10.0 * peer + coord for peer in range(3)])
        assert found == [*wanted, [0, 0]]


# -- sums --------------------------------------------------------------------------------------------------------------

SIZES = (1, 2, 7, 64, 300_001)


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


# -- copies of any length ----------------------------------------------------------------------------------------------


def long_spans() -> None:
    """Copies longer than one call moves, of several spans, cut anywhere; a call is told to move 1000 bytes at most."""
    process_vm.MAX_BYTES = 1000
    lengths = [1, 999, 0, 1000, 4321, 7, 1993]
    source = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    target = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    here = [MemorySpan(one.data_ptr(), one.numel()) for one in target]
    there = [MemorySpan(one.data_ptr(), one.numel()) for one in source]
    assert read(os.getpid(), here, there) == sum(lengths)
    assert all(map(torch.equal, source, target))
    assert read(os.getpid(), here, [*there[:-1], MemorySpan(8, lengths[-1])]) == -1


def test_copies_longer_than_one_call_moves(monkeypatch):
    monkeypatch.setattr(process_vm, "MAX_BYTES", process_vm.MAX_BYTES)
    long_spans()

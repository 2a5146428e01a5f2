"""Tests the exchanges, the order of waits and the errors of ranks of one host that read each other's memory."""

import os
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sley_cma import connection, offers
from sley_cma.connection import MemorySpan, read, write
from sley_core.comm.exchanges import begin_turn
from sley_core.comm.transport import Work
from sley_core.comm.world import Group, Groups, World
from sley_core.errors import RunError
from sley_core.topology import GATHER, REDUCE, Topology
from sley_testing.collectives import can_read_peers

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")


def groups(timeout_s: float = 30, **axes: int) -> Groups:
    world = World.join("cpu")
    return world.make_groups(Topology.from_sizes(world.size, **axes), timeout_s, cross_memory=True)


def wp(timeout_s: float = 30) -> Any:
    return groups(timeout_s, wp=int(os.environ["WORLD_SIZE"]))["wp"]


def stage() -> Group:
    return groups()["stage"]


def run_exchanges() -> list[float]:
    """Returns the sums of more exchanges than offers can be open, with a different late rank each time."""
    group = wp()
    offers.MAX_OPEN_OFFERS = 4
    sums = []
    shard = torch.empty(3)
    for step in range(20):
        if step % 5 == group.coord:
            time.sleep(0.005)
        shard.fill_(10.0 * step + group.coord)
        gathered = torch.empty(3 * group.size)
        exchange = group.transport(GATHER).all_gather([gathered], [shard], label="rows")
        exchange.wait()
        exchange.wait_sent()
        gradient = gathered.clone()
        reduction = group.transport(REDUCE).reduce_scatter([gradient], [], label="rows")
        reduction.wait_sent()
        sums.append(float(gradient.view(group.size, 3)[group.coord][0]))
    return sums


def test_peers_read_shards_before_they_are_overwritten(ranks):
    """`wait_sent` returns only after all peers have read, however late they are. The next exchange overwrites the shard."""
    for rank, sums in enumerate(ranks(3)(run_exchanges)):
        assert sums == [3 * (10.0 * step + rank) for step in range(20)]


def publish_and_gather() -> list[list[float]]:
    """Returns the results of steps that publish shards once, gather them twice, and then write them."""
    group = wp()
    shards = [torch.empty(2), torch.empty(0), torch.empty(1, 3)]
    results = []
    for step in range(6):
        for shard in shards:
            shard.fill_(10.0 * step + group.coord)
        if step % 3 == group.coord:
            time.sleep(0.01)
        share = group.transport(GATHER).publish(shards, label="weights")
        outputs = [torch.empty(group.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        for indices in ([2, 1], [0], [2]):
            args = [outputs[index] for index in indices], [shards[index] for index in indices]
            exchange = share.all_gather(*args, label="some")
            exchange.wait()
            exchange.wait_sent()
        share.wait_sent()
        results.append(outputs[0].tolist() + outputs[2].flatten().tolist())
    return results


def test_published_shards_are_read_several_times_and_then_written(ranks):
    for results in ranks(3)(publish_and_gather):
        for step, values in enumerate(results):
            first = [10.0 * step + rank for rank in range(3) for _ in range(2)]
            third = [10.0 * step + rank for rank in range(3) for _ in range(3)]
            assert values == first + third


def memory_before_and_after_release(is_shared: bool) -> list[bool]:
    """Returns whether the gathered memory is alive before and after `release`."""
    group = wp()
    shards = [torch.ones(2)]
    share = group.transport(GATHER).publish(shards, label="weights")
    output = torch.empty(2 * group.size)
    source = share if is_shared else group.transport(GATHER)
    exchange = source.all_gather([output], shards, label="weights")
    exchange.wait()
    storage = weakref.ref(output.untyped_storage())
    del output
    is_alive = [storage() is not None]
    exchange.release()
    is_alive.append(storage() is not None)
    exchange.wait_sent()
    share.wait_sent()
    return is_alive


@pytest.mark.parametrize("is_shared", [True, False])
def test_release_frees_the_gathered_memory(ranks, is_shared):
    """A released gather holds no memory, even before it ends."""
    assert ranks(2)(memory_before_and_after_release, is_shared) == [[True, False]] * 2


def error_without_the_peer(sums: bool) -> str:
    timeout_s, label = 0.5, "the weights of block.3"
    group = groups(timeout_s)["stage"] if sums else wp(timeout_s)
    if group.coord == 1:
        time.sleep(1.5)
        return ""
    if sums:
        wait = group.transport().all_reduce(torch.ones(4), label=label).wait_sent
    else:
        wait = group.transport(GATHER).all_gather([torch.empty(4)], [torch.ones(2)], label=label).wait
    with pytest.raises(RunError) as raised:
        wait()
    return str(raised.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sums", [True, False])
def test_a_wait_for_a_missing_peer_ends_in_time(ranks, sums):
    message, _ = ranks(2)(error_without_the_peer, sums)
    assert "the weights of block.3" in message
    assert "with rank 1 failed on rank 0: it did not arrive within 0.5 s" in message


def errors_of_three_waits(operation: str) -> list[str]:
    """Returns the errors of `wait`, `wait` and `wait_sent` after rank 1 has started an exchange with other contents."""
    group, label = (stage() if operation == "sum" else wp(), "weights" if int(os.environ["RANK"]) == 0 else "gradients")
    vector, shard = torch.ones(2, 1), torch.ones(1, 1)
    if operation == "published gather":
        work = group.transport(GATHER).publish([shard], label=label).all_gather([vector], [shard], label=label)
    elif operation == "gather":
        work = group.transport(GATHER).all_gather([vector], [shard], label=label)
    elif operation == "reduce-scatter":
        work = group.transport(REDUCE).reduce_scatter([vector], [], label=label)
    elif operation == "all-to-all":
        work = group.transport(GATHER).all_to_all(torch.empty(2, 1), vector, label=label)
    else:
        work = group.transport().all_reduce(vector, label=label)
    errors = []
    for wait in (work.wait, work.wait, work.wait_sent):
        start_s = time.monotonic()
        with pytest.raises(RunError) as raised:
            wait()
        assert not errors or time.monotonic() - start_s < 1.0, "it waited again"
        errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("operation", ["gather", "published gather", "reduce-scatter", "all-to-all", "sum"])
def test_each_wait_raises_the_error_of_the_first(ranks, operation):
    """A wait that returned silently would leave a result with the values of some peers only."""
    for errors in ranks(2)(errors_of_three_waits, operation):
        assert "weights" in errors[0]
        assert "gradients" in errors[0]
        assert set(errors) == {errors[0]}


def transports_without(missing: str) -> list[str]:
    """Returns the transports of this rank's channels if the last rank lacks a capability."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if missing == "the right to read":
            connection.read = lambda *_: -1
        if missing == "the boot's number":
            connection.BOOT_ID = connection.BOOT_ID.with_name("absent")
        if missing == "descriptors of processes":
            del os.pidfd_open
    return [type(transport).__name__ for transport in wp().transports.values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("missing", ["nothing", "the boot's number", "the right to read", "descriptors of processes"])
def test_all_ranks_choose_the_same_transport(ranks, missing):
    """Ranks may lack the right to read, the boot ID in /proc, or process descriptors."""
    kind = "CmaTransport" if missing == "nothing" else "MessageTransport"
    assert ranks(3)(transports_without, missing) == [[kind, kind]] * 3


def errors_after_the_peers_end() -> list[str]:
    """Returns the error codes of calls after the peer's descriptor reports its end, while its pid is that of a live process."""
    group = wp()
    rows = group.transport(GATHER).rows
    memory = rows.connection
    peer = 1 - group.coord
    shard = torch.ones(2)
    group.transport(GATHER).all_gather([torch.empty(4)], [shard], label="weights").wait_sent()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    memory._process_polls[peer] = connection.select.poll()
    memory._process_polls[peer].register(os.pidfd_open(pid), connection.select.POLLIN)
    os.waitpid(pid, 0)
    before = list(memory.inbox.words)
    codes = []
    for call in (
        lambda: group.transport(GATHER).all_gather([torch.empty(4)], [shard], label="weights"),
        lambda: rows.finish_read(peer, 7, "weights"),
        lambda: memory.wait_until(lambda: False, iter([None, peer]).__next__, begin_turn("gather", group, "weights")),
        lambda: memory.read(peer, [MemorySpan(shard.data_ptr(), 8)], [MemorySpan(memory._addresses[peer].inbox, 8)], "weights"),
    ):
        with pytest.raises(RunError) as raised:
            call()
        codes.append(raised.value.diagnostics[0].code)
    dist.barrier(group=group.channel(GATHER))
    assert list(memory.inbox.words) == before, "nobody wrote"
    return codes


def test_no_process_with_a_peers_reused_pid_is_written(ranks):
    """The kernel reuses pids, but a descriptor tells that its process has ended."""
    assert ranks(2)(errors_after_the_peers_end) == [["collective-failed"] * 4] * 2


def run_many_exchanges() -> list[list[float]]:
    """Returns the results of twenty concurrent exchanges of each type, of which four can be open, and the number still open."""
    group = wp()
    offers.MAX_OPEN_OFFERS = 4
    size, coord = group.size, group.coord
    exchanges, results = [], []
    for number in range(20):
        result = torch.full((2 * size,), -1.0)
        exchanges.append(
            group.transport(GATHER).all_gather([result], [torch.full((2,), 10.0 * number + coord)], label="weights")
        )
        results.append(result)
        gradient = torch.full((2 * size,), 10.0 * number + coord)
        exchanges.append(group.transport(REDUCE).reduce_scatter([gradient], [], label="gradients"))
        results.append(gradient[2 * coord : 2 * coord + 2])
        received = torch.empty(size, 1)
        sent = 100.0 * number + 10.0 * coord + torch.arange(size, dtype=torch.float32)[:, None]
        exchanges.append(group.transport(GATHER).all_to_all(received, sent, label="vectors"))
        results.append(received.view(-1))
    for exchange in exchanges:
        exchange.wait()
        exchange.wait_sent()
    num_open = [len(group.transport(channel).rows._open_offers) for channel in (GATHER, REDUCE)]
    return [*(result.tolist() for result in results), num_open]


def test_any_number_of_exchanges_may_be_in_flight(ranks):
    """A new exchange completes the oldest, so that ranks do not wait for each other."""
    for coord, results in enumerate(ranks(3, 30)(run_many_exchanges)):
        expected: list[list[float]] = []
        for number in range(20):
            expected.append([10.0 * number + peer for peer in range(3) for _ in range(2)])
            expected.append([3 * 10.0 * number + 3.0] * 2)
            expected.append([100.0 * number + 10.0 * peer + coord for peer in range(3)])
        assert results == [*expected, [0, 0]]


# -- sums --------------------------------------------------------------------------------------------------------------

SIZES = (1, 2, 7, 64, 300_001)


def values(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + number))


def run_many_sums() -> list[torch.Tensor]:
    """Returns the sums of three rounds over the same tensors, several in flight at once, with late ranks in turn."""
    group = stage()
    sums = group.transport()
    coord = group.coord
    tensors = [torch.empty(size) for size in SIZES]
    results = []
    for round_number in range(3):
        works: list[Work] = []
        for number, tensor in enumerate(tensors):
            if number % group.size == coord:
                time.sleep(0.003)
            tensor.copy_(values(coord, number + 10 * round_number, tensor.numel()))
            works.append(sums.all_reduce(tensor, label=f"tensor {number}"))
            for work in works:
                work.is_completed()
        for work in works:
            work.wait()
        for work in works:
            work.wait_sent()
        results += [tensor.clone() for tensor in tensors]
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_same_bits_of_a_sum(ranks, size):
    by_rank = ranks(size)(run_many_sums)
    for index, totals in enumerate(zip(*by_rank, strict=True)):
        round_number, number = divmod(index, len(SIZES))
        expected = sum(values(rank, number + 10 * round_number, SIZES[number]).double() for rank in range(size))
        torch.testing.assert_close(totals[0].double(), expected, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(totals[0], total) for total in totals[1:])


def poll_sums() -> list[bool]:
    """Returns `is_completed` of two sums: before rank 1 starts the first, before the end of the first, and after both."""
    group = stage()
    sums = group.transport()
    ones, twos, results = torch.ones(5), torch.full((5,), 2.0), []
    if group.coord == 1:
        dist.barrier(group=group.channel())
    first = sums.all_reduce(ones, label="ones")
    if group.coord == 0:
        results = [first.is_completed()]
        dist.barrier(group=group.channel())
    second = sums.all_reduce(twos, label="twos")
    dist.barrier(group=group.channel())
    results.append(second.is_completed())
    first.wait_sent()
    second.wait_sent()
    return [*results, first.is_completed(), second.is_completed(), bool((ones == 2).all()), bool((twos == 4).all())]


def test_polling_does_not_wait_and_sums_complete_in_order(ranks):
    """In another order, a rank could sum the slices of two sums crosswise."""
    assert ranks(2)(poll_sums) == [[False, False, True, True, True, True], [False, True, True, True, True]]


def test_copies_longer_than_one_call_and_copies_of_unknown_processes_and_addresses(monkeypatch):
    """Copies several spans with at most 1000 bytes per call. The last two copies fail."""
    monkeypatch.setattr(connection, "MAX_BYTES", 1000)
    lengths = [1, 999, 0, 1000, 4321, 7, 1993]
    source = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    target = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    local = [MemorySpan(tensor.data_ptr(), tensor.numel()) for tensor in target]
    remote = [MemorySpan(tensor.data_ptr(), tensor.numel()) for tensor in source]
    assert read(os.getpid(), local, remote) == sum(lengths)
    assert read(2**22 + 1, local, remote) == write(os.getpid(), local[:1], [MemorySpan(8, 1)]) == -1
    assert all(map(torch.equal, source, target))
    assert read(os.getpid(), local, [*remote[:-1], MemorySpan(8, lengths[-1])]) == -1

"""Tests that `collectives` records each call with its line of code, that `assert_same_sequence` reports differences, and that
`late_exchanges` changes the results of programs that do not wait.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import all_reduce as imported_all_reduce
from torch.nn.parallel import DistributedDataParallel

from sley_core.comm.world import Group, World
from sley_core.topology import Topology
from sley_testing.collectives import Collective, assert_same_sequence, collectives, late_exchanges
from sley_testing.ranks import Ranks

WORLD = 2
EXCHANGES_LISTS = hasattr(dist, "all_gather_single")
"""Whether gloo exchanges lists of tensors, as in torch 2.13 but not in 2.11."""


def all_calls(rank: int) -> dict[str, Callable[[], object]]:
    """Returns every way to communicate by name, with tensors of 4 elements and root 0."""
    x, pair = torch.ones(4), [torch.empty(4), torch.empty(4)]
    peer = 1 - rank
    group = dist.new_group([0, 1], group_desc="pair")
    exchange = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(4), peer)]
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce imported": lambda: imported_all_reduce(x, group=group),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(pair, x),
        "all_gather_single": lambda: dist.all_gather_into_tensor(torch.empty(8), x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2)]),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(torch.empty(2), x),
        **(
            {"all_to_all": lambda: dist.all_to_all([torch.empty(2), torch.empty(2)], list(x.chunk(2)))}
            if EXCHANGES_LISTS
            else {}
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4), x),
        "scatter": lambda: dist.scatter(torch.empty(4), pair if rank == 0 else None, src=0),
        "gather": lambda: dist.gather(x, pair if rank == 0 else None, dst=0),
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "send": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "isend": lambda: (dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait(),
        "batch": lambda: [work.wait() for work in dist.batch_isend_irecv(exchange)],
        "objects": lambda: dist.all_gather_object([None, None], "same length"),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)),
        "backward": lambda: reduce_in_backward_hook(x),
        "ddp": reduce_in_ddp,
    }


def reduce_in_backward_hook(x):
    weight = nn.Parameter(x.clone())
    weight.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    (weight * 2).sum().backward()


def reduce_in_ddp():
    module = DistributedDataParallel(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()


def record_all():
    recorded = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames some of them
        for name, run in all_calls(dist.get_rank()).items():
            with collectives() as calls:
                run()
            recorded[name] = calls
    return recorded


@pytest.fixture(scope="module")
def recorded():
    return Ranks(WORLD)(record_all)


PLAIN = ["all_reduce", "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_to_all"]
PLAIN += ["all_to_all_single"]
ROOTED = ["broadcast", "reduce", "scatter", "gather"]


@pytest.mark.parametrize("name", PLAIN + ROOTED)
def test_each_collective_is_recorded_once(recorded, name):
    if name == "all_to_all" and not EXCHANGES_LISTS:
        pytest.skip("gloo of this torch does not exchange lists")
    for calls in (rank[name] for rank in recorded):
        (call,) = calls
        assert (call.op, call.numel, call.dtype, call.ranks) == (name, 4, "float32", (0, 1))
        assert call.peer == (0 if name in ROOTED else None)
        assert not call.is_async


@pytest.mark.parametrize("name", ["all_reduce imported", "all_reduce async", "functional", "backward"])
def test_all_forms_of_all_reduce_are_recorded(recorded, name):
    (call,) = recorded[1][name]
    assert name == "functional" or "test_collectives.py:" in call.site[0]
    assert (call.op, call.numel, call.ranks) == ("all_reduce", 4, (0, 1))
    assert call.group == ("pair" if name in ("all_reduce imported", "functional") else "default_pg")
    assert call.is_async == (name in ("all_reduce async", "functional"))


def test_collective_of_ddp_is_recorded_and_equal_sequences_pass(recorded):
    assert recorded[0]["ddp"][-1].op == "all_reduce"
    assert recorded[0]["ddp"][-1].numel == 6  # one bucket: a weight of 2 x 2 and a bias of 2
    assert_same_sequence([[call for calls in rank.values() for call in calls] for rank in recorded])


def reduce_over_axes(axes_by_rank):
    """Reduces over groups of equal ranks, which share a communicator, in the order of this rank."""
    groups = World.join("cpu").make_groups(Topology.from_sizes(WORLD), 30)
    with collectives() as calls:
        for axis in axes_by_rank[dist.get_rank()]:
            groups[axis].all_reduce(torch.ones(1), label="a test").wait()
    groups.close()
    return calls


def test_exchange_has_label_of_requested_group(ranks):
    axes = ["stage", "control", "dp"]
    recorded = ranks(WORLD)(reduce_over_axes, [axes, axes])
    assert [[call.group for call in calls] for calls in recorded] == [["stage[0,1]", "control[0,1]", "dp[0,1]"]] * 2
    assert {call.communicator for calls in recorded for call in calls} == {"control[0,1]"}
    assert_same_sequence(recorded)
    swapped = ranks(WORLD)(reduce_over_axes, [axes, axes[::-1]])
    with pytest.raises(AssertionError, match=r"the order on control\[0,1\] is not the same on all ranks: call 1"):
        assert_same_sequence(swapped)


def test_fake_world_is_recorded():
    with World.fake(5, 8), collectives() as calls:
        dist.broadcast(torch.ones(3), src=2)
    assert [(call.op, call.peer, len(call.ranks)) for call in calls] == [("broadcast", 2, 8)]


# -- comparison of sequences --------------------------------------------------------------------------------------------


def call(op="all_reduce", numel=4, *, group="dp", ranks=(0, 1), dtype="float32", peer=None, line=1):
    return Collective(op, group, ranks, numel, dtype, peer=peer, site=(f"handler.py:{line} finish_step",))


def message(*sequences):
    with pytest.raises(AssertionError) as caught:
        assert_same_sequence(sequences)
    return str(caught.value).splitlines()


def test_first_difference_is_reported_with_sites():
    first, second, third = call(numel=1, line=10), call(numel=2, line=20), call(numel=3, line=30)
    assert_same_sequence([[first, second, third]] * 2)
    assert message([first, second, third], [first, third, second]) == [
        "the order on dp is not the same on all ranks: call 2 differs",
        "  rank 0: all_reduce of 2 float32",
        "      at handler.py:20 finish_step",
        "  rank 1: all_reduce of 3 float32",
        "      at handler.py:30 finish_step",
        "  before it, on all: all_reduce of 1 float32",
        "      at handler.py:10 finish_step",
    ]


@pytest.mark.parametrize(
    "differing_call",
    [call("broadcast"), call(numel=5), call(dtype="float64"), call(peer=1)],
    ids=["op", "numel", "dtype", "root"],
)
def test_members_must_agree(differing_call):
    assert message([call()], [differing_call])[0] == "the order on dp is not the same on all ranks: call 1 differs"


def test_missing_calls_are_reported():
    assert "  rank 1: nothing after 1 calls" in message([call(), call()], [call()])
    assert "  ranks 1, 2: nothing after 0 calls" in message([call(ranks=(0, 1, 2))], [], [])


def test_groups_are_compared_separately():
    dp, wp = call(group="dp"), call(group="wp", numel=9)
    assert_same_sequence([[dp, wp], [wp, dp]])
    assert_same_sequence([[call(ranks=(0, 2))], [call(ranks=(1, 3), numel=7)], [call(ranks=(0, 2))], []][:3])


def test_sends_must_match_receives():
    first = [call("send", 2, peer=1), call("recv", 3, peer=1), call("send", 4, peer=1)]
    second = [call("recv", 2, peer=0), call("recv", 4, peer=0), call("send", 3, peer=0)]
    assert_same_sequence([first, second])
    assert message(first, [second[1], second[0], second[2]])[:4] == [
        "a send and its receive on dp do not match: call 1 differs",
        "  rank 0: send of 2 float32 to 1",
        "      at handler.py:1 finish_step",
        "  rank 1: recv of 4 float32 from 0",
    ]
    assert "  rank 1: nothing after 2 calls" in message([*first, call("send", 5, peer=1)], second)


def test_receive_from_any_source_is_refused():
    assert message([call("send", peer=1)], [call("recv_any")])[0].startswith("the order of a receive from any source")


def gather_correctly(group: Group) -> float:
    whole, shard = torch.zeros(2), torch.ones(1)
    group.transport().all_gather([whole], [shard], label="x").wait_sent()
    shard.zero_()
    return float(whole.sum())


def read_too_early(group: Group) -> float:
    whole = torch.zeros(2)
    work = group.transport().all_gather([whole], [torch.ones(1)], label="x")
    total = float(whole.sum())
    work.wait_sent()
    return total


def write_too_early(group: Group) -> float:
    total = torch.ones(1)
    work = group.transport().all_reduce(total, label="x")
    total.zero_()
    work.wait_sent()
    return float(total)


def results(*programs: Callable[[Group], float]) -> list[float]:
    with World.join("cpu") as world, late_exchanges():
        groups = world.make_groups(Topology.from_sizes(2, dp=2), 30)
        return [program(groups["dp"]) for program in programs]


def test_only_a_program_that_waits_gets_the_right_result(ranks: Any) -> None:
    for right, early_read, early_write in ranks(2)(results, gather_correctly, read_too_early, write_too_early):
        assert right == 2
        assert early_read != early_read, "NaN"
        assert early_write == pytest.approx(0)

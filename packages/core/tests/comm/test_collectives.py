"""Collectives sum over their group and no other, and one that cannot end says which it was."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sley_core.comm.transport import gather_values
from sley_core.comm.world import Group, World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.topology import Topology
from sley_testing.contract import SQUARES, contract_plan
from sley_trainer.assemble import assemble


def results():
    with World.join("cpu") as world:
        groups = world.make_groups(Topology.from_sizes(4, sp=2), 30)
        rank = float(world.rank)
        found = {}
        for axis in ("all", "dp", "sp", "wp"):
            for op in ("sum", "max", "min"):
                value = torch.tensor([rank, -rank])
                pending = groups[axis].all_reduce(value, op, label="the test")
                pending.wait()
                pending.wait()
                found[axis, op] = value.tolist()
            size = groups[axis].size
            gathered, exchanged = torch.empty(size), torch.empty(size)
            groups[axis].all_gather(gathered, torch.tensor([rank]), label="the test").wait()
            mine = 10 * rank + torch.arange(size, dtype=torch.float32)
            groups[axis].all_to_all(exchanged, mine, label="the test").wait()
            found[axis, "gathered"], found[axis, "exchanged"] = gathered.tolist(), exchanged.tolist()
        found["objects"] = groups["control"].gather_objects({"rank": world.rank}, label="the test")
        return found


def test_every_operation_on_every_group(ranks):
    """Four ranks, sp of two: dp is {0, 2} and {1, 3}, sp is {0, 1} and {2, 3}."""
    members = {
        "all": [range(4)] * 4,
        "dp": [(0, 2), (1, 3)] * 2,
        "sp": [(0, 1), (0, 1), (2, 3), (2, 3)],
        "wp": [(rank,) for rank in range(4)],
    }
    for rank, found in enumerate(ranks(4)(results)):
        for axis, of_rank in members.items():
            group = list(of_rank[rank])
            assert found[axis, "sum"] == [sum(group), -sum(group)]
            assert found[axis, "max"] == [max(group), -min(group)]
            assert found[axis, "min"] == [min(group), -max(group)]
            assert found[axis, "gathered"] == group
            assert found[axis, "exchanged"] == [10 * other + group.index(rank) for other in group]
        assert found["objects"] == [{"rank": other} for other in range(4)]


def lonely(how, path):
    """Rank 0 waits for rank 1, which is dead, or at something else; what rank 0 is told goes to `path`."""
    world = World.join("cpu", timeout_s=30)
    value = torch.ones(3)
    groups = {}
    if how != "groups":
        groups = world.make_groups(Topology.from_sizes(2), 1)
        groups["dp"].all_reduce(value, label="the first").wait()
    if world.rank == 1:
        if how in ("absent", "groups"):
            time.sleep(8)
        os._exit(0)
    began = time.monotonic()
    try:
        if how == "groups":
            world.make_groups(Topology.from_sizes(2), 0.5)
        elif how == "objects":
            groups["control"].gather_objects(1, label="the facts")
        else:
            groups["dp"].all_reduce(value, label="layers.3.weight").wait()
    except RunError as error:
        path.write_text(f"{time.monotonic() - began} {error}")
    os._exit(0)


SUM = "error[collective-failed]: all-reduce of layers.3.weight over dp[0, 1] failed on rank 0: "


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dead", SUM),
        ("absent", SUM),
        ("objects", "error[collective-failed]: all-gather of objects of the facts over control[0, 1] failed on rank 0: "),
        ("groups", "error[group-failed]: the process group control[0,1] could not be created on rank 0: "),
    ],
)
def test_a_peer_that_does_not_answer_is_an_error_that_says_what_failed(ranks, tmp_path, how, says):
    """Ranks leave without a word here, so that only rank 0's own account is left."""
    path = tmp_path / "told"
    with pytest.raises(Exception, match="ended with exit code 0"):
        ranks(2, init=False)(lonely, how, path)
    seconds, _, message = path.read_text().partition(" ")
    assert message.startswith(says)
    assert "collective_timeout_s" in message or how == "groups"
    assert float(seconds) < 20


def messages_by_host():
    """Rank 0 sends two messages to rank 1, which waits for each twice; both go as those of a device that gloo cannot reach."""
    Group.needs_host_copy = lambda *_: True
    with World.join("cpu") as world:
        group = world.make_groups(Topology.from_sizes(2, pp=2), 30)["pp"]
        if world.rank == 0:
            given = torch.arange(3.0)
            pending = group.send(given, "up", 1, label="the test")
            given.add_(10)  # what was sent is a copy
            pending.wait()
            group.send(given, "up", 1, label="the test").wait()
            return given.tolist()
        found = []
        for _ in range(2):
            place = torch.zeros(3)
            pending = group.receive(place, "up", 0, label="the test")
            pending.wait()
            found.append(place.tolist())
            place.zero_()
            pending.wait()
            found.append(place.tolist())
        return found


def test_a_message_between_ranks_that_share_a_device_goes_by_the_host(ranks):
    """It lands at the first wait, and only then."""
    _, found = ranks(2)(messages_by_host)
    assert found == [[0, 1, 2], [0, 0, 0], [10, 11, 12], [0, 0, 0]]


def gathered(values):
    """Returns the results of this rank for all values of all ranks."""
    return [gather_values(values_of_ranks[dist.get_rank()]) for values_of_ranks in values]


def test_values_of_any_length_are_gathered(ranks):
    values = [[{"a": [1, None], "ä": "ü"}, ""], ["y" * 5000, "z"], ["z", "y" * 5000]]
    assert ranks(2)(gathered, values) == [values, values]


PLAN = contract_plan(
    "sley_testing.contract", loss=SQUARES, batch={"global_size": 6, "micro_size": 1}, optimizer={"use": "core.sgd", "lr": 0.1}
)


def started_without_pickles(tables):
    """Assembles and trains where nothing that comes from another rank can be unpickled."""

    def refuse(*_):
        raise AssertionError("unpickled what came over a socket")

    distributed_c10d._tensor_to_object = refuse
    with World.join("cpu") as world:
        first = gather_values([0.1, 1e300])[0]
        with assemble(plan_from_dict(tables), world) as run:
            return first, run.step()["step"]


def test_ranks_with_equal_plans_tell_each_other_values_not_programs(ranks):
    """Any user of a host can reach its loopback."""
    assert ranks(2)(started_without_pickles, PLAN) == [([0.1, 1e300], 1)] * 2


def refused(tables, odd):
    """What `assemble` says on this rank; rank 1 is given `odd` instead of `tables`."""
    with World.join("cpu") as world, pytest.raises(RunError) as caught:
        assemble(plan_from_dict(odd if world.rank == 1 else tables), world)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.code, diagnostic.message


def test_a_rank_with_another_plan_is_named_everywhere_with_the_key(ranks):
    for code, message in ranks(3)(refused, PLAN, PLAN | {"evaluation": {"every": 1}}):
        assert code == "ranks-disagree"
        assert message.startswith("rank 1 has a different plan from rank 0: `evaluation.every` is 1, not unset, ")

"""A world is joined as the launcher's environment says, or an error says who is missing, in time."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sley_core.comm.collectives import all_reduce
from sley_core.comm.groups import make_communicator
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_LANE, GroupEntry, Topology


def members():
    with World.join("cpu", timeout_s=20) as world:
        groups = world.groups(Topology.of(4), 20)
        # Nobody leaves while another still connects, as no run does: it agrees on its plan first.
        all_reduce(torch.ones(()), groups["control"], what="that all have joined").wait()
        inside = dist.is_initialized()
        names = {axis: (group.size, group.coord, sorted(group.lanes)) for axis, group in groups.items()}
    return world.rank, world.size, names, inside, dist.is_initialized()


def test_joined_by_the_environment_and_left_again(ranks):
    for rank, (found, size, groups, inside, after) in enumerate(ranks(4, init=False)(members)):
        assert (found, size, inside, after) == (rank, 4, True, False)
        assert groups["dp"] == groups["control"] == groups["stage"] == (4, rank, ["main"])
        assert groups["pp"] == groups["sp"] == (1, 0, [])


def sum_of_ranks():
    with World.join("cpu", timeout_s=10) as world:
        value = torch.full((), float(world.rank + 1))
        all_reduce(value, world.groups(Topology.of(2), 10)["control"], what="a test").wait()
    return value.item()


def sum_twice():
    return sum_of_ranks(), sum_of_ranks()


def test_a_program_may_join_again_after_it_has_left(ranks):
    """As one that trains with several settings, one after the other: the store still has the first world's addresses."""
    assert ranks(2, 30, init=False)(sum_twice) == [(3.0, 3.0), (3.0, 3.0)]


def sums_at_an_address(port):
    """Rank 1 has come again before rank 0 has left."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = []
    for _ in range(2):
        with World.join("cpu", timeout_s=10, environ=environ) as world:
            value = torch.full((), float(world.rank + 1))
            all_reduce(value, world.groups(Topology.of(2), 10)["control"], what="a test").wait()
            time.sleep(0.5 * (1 - world.rank))
        found.append(value.item())
    return found


def test_a_program_may_join_again_at_an_address(ranks, port):
    """The store of rank 0 ended when it left, and with it whoever had come to it again."""
    assert ranks(2, 30, init=False)(sums_at_an_address, port) == [[3.0, 3.0]] * 2


def sums_over_overlapping_groups():
    """Rank 2 is in two of the groups, rank 3 in one, rank 0 in none."""
    extra = [GroupEntry(f"tie{list(pair)}", DEFAULT_LANE, pair) for pair in ((1, 2), (2, 3))]
    with World.join("cpu", timeout_s=20) as world:
        found = {}
        for _ in range(2):  # a program may assemble twice
            groups = world.groups(Topology.of(4), 20, extra)
            for axis in sorted(axis for axis in groups if axis.startswith("tie")):
                value = torch.ones(())
                all_reduce(value, groups[axis], what="a test").wait()
                found[axis] = found.get(axis, 0.0) + value.item()
    return found


def test_groups_may_overlap_however_they_are_shared_out(ranks):
    """Torch numbers groups by how many a rank has made before: no rank may count other than its peers."""
    low, high = {"tie[1, 2]": 4.0}, {"tie[2, 3]": 4.0}
    assert ranks(4, init=False)(sums_over_overlapping_groups) == [{}, low, low | high, high]


def expect_nobody(environ):
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        World.join("cpu", timeout_s=1.5, environ=environ)
    assert not dist.is_initialized()
    return time.monotonic() - began, caught.value.diagnostics[0].code, str(caught.value)


@pytest.mark.parametrize("store", ["file", "env"])
def test_a_peer_that_never_comes_is_an_error_in_time(tmp_path, store, monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    if store == "file":
        environ["SLEY_STORE"] = (tmp_path / "store").as_uri()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    seconds, code, message = expect_nobody(environ)
    assert code == "rendezvous-failed"
    assert "it could not meet the others" in message
    assert seconds < 30


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0"}, "no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "no RANK"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK = 'first', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK = '-1', not a number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK = 5 .* WORLD_SIZE = 2"),
    ],
)
def test_a_launcher_that_says_too_little_is_told_what_is_missing(monkeypatch, environ, named):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match=named) as caught:
        World.join("cpu", environ=environ)
    assert caught.value.diagnostics[0].code == "rendezvous-failed"


def join_without_rank_1(path):
    """Rank 1 stops between start-up and the groups of the run; what rank 0 is told goes to `path`."""
    world = World.join("cpu", timeout_s=30)
    if world.rank == 1:
        time.sleep(20)
        os._exit(0)
    began = time.monotonic()
    try:
        world.groups(Topology.of(2), 1.5)
    except RunError as error:
        path.write_text(f"{time.monotonic() - began} {error}")
    os._exit(0)


def test_a_group_whose_member_is_gone_is_an_error_in_time(ranks, tmp_path):
    path = tmp_path / "told"
    with pytest.raises(Exception, match="exit code 0 before it returned"):
        ranks(2, init=False)(join_without_rank_1, path)
    seconds, _, message = path.read_text().partition(" ")
    assert message.startswith("error[group-failed]: the group control[0,1] could not be made on rank 0: ")
    assert float(seconds) < 15


def gloo_threads():
    """The threads of this process that gloo has started."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return [name for name in map(str.strip, names) if "gloo" in name]


def threads_before_and_after():
    with World.join("cpu", timeout_s=20) as world:
        groups = world.groups(Topology.of(2), 20)
        all_reduce(torch.ones(3), groups["dp"], what="the test").wait()
        before = gloo_threads()
    return before, gloo_threads(), groups["dp"].lanes


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_no_thread_of_a_communicator_outlives_its_world(ranks):
    """One that did could free a tensor in an interpreter that is ending, which aborts the process."""
    for before, after, lanes in ranks(2, init=False)(threads_before_and_after):
        assert len(before) >= 2
        assert after == []
        assert lanes == {}


def leave_with_an_error(path):
    """Rank 0 fails while a sum is under way to which rank 1 never comes."""
    began = 0.0
    try:
        with World.join("cpu", timeout_s=20) as world:
            groups = world.groups(Topology.of(2), 20)
            if world.rank == 1:
                time.sleep(3)
                os._exit(0)
            pending = all_reduce(torch.ones(3), groups["dp"], what="the test")
            began = time.monotonic()
            raise ValueError("as asked")
    except ValueError:
        path.write_text(str(time.monotonic() - began))
        del pending
    os._exit(0)


def test_a_rank_that_fails_waits_for_nobody(ranks, tmp_path):
    path = tmp_path / "seconds"
    with pytest.raises(Exception, match="exit code 0 before it returned"):
        ranks(2, init=False)(leave_with_an_error, path)
    assert float(path.read_text()) < 1


@pytest.mark.parametrize(("backend", "bound"), [("gloo", None), ("nccl", torch.device("cuda", 0))])
def test_a_group_of_gloo_beside_nccl_takes_no_part_in_a_split_of_its_communicator(monkeypatch, backend, bound):
    """torch lets the ranks outside of any new group take part in that, and those inside only of one of NCCL."""
    seen = []

    def new_group(ranks, **_):
        seen.append(dist.group.WORLD.bound_device_id)

    with World.fake(0, 4):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        monkeypatch.setattr("sley_core.comm.groups.dist.new_group", new_group)
        make_communicator(GroupEntry("some", DEFAULT_LANE, (1, 2)), 0, backend, timedelta(seconds=1))
        assert seen == [bound]
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        dist.group.WORLD.bound_device_id = None

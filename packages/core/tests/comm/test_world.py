"""A world is joined as the launcher's environment says, or an error says who is missing, in time."""

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sley_core.comm.exchanges import begin_turn
from sley_core.comm.transport import GroupWork
from sley_core.comm.world import World, make_communicator
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_CHANNEL, GroupEntry, Topology


def members():
    """Ranks 2 and 3, and 1 and 2, have a group more, rank 0 has none."""
    extra = [GroupEntry(f"tie{list(pair)}", DEFAULT_CHANNEL, pair) for pair in ((1, 2), (2, 3))]
    sums = {}
    with World.join("cpu", timeout_s=20) as world:
        for _ in range(2):  # a program may assemble twice
            groups = world.make_groups(Topology.from_sizes(4), 20, extra)
            # Nobody leaves while another still connects, as no run does: it agrees on its plan first.
            for axis in ("control", *sorted(axis for axis in groups if axis.startswith("tie"))):
                value = torch.ones(())
                groups[axis].all_reduce(value, label="a test").wait()
                sums[axis] = sums.get(axis, 0.0) + value.item()
        inside = dist.is_initialized()
        names = {axis: (group.size, group.coord, sorted(group.channels)) for axis, group in groups.items()}
    return world.rank, world.size, names, inside, dist.is_initialized(), sums


def test_joined_by_the_environment_and_left_again_with_groups_that_overlap(ranks):
    """Torch numbers groups by how many a rank has made before: no rank may count other than its peers."""
    everyone, low, high = {"control": 8.0}, {"tie[1, 2]": 4.0}, {"tie[2, 3]": 4.0}
    ties = [{}, low, low | high, high]
    for rank, (found, size, groups, inside, after, sums) in enumerate(ranks(4, init=False)(members)):
        assert (found, size, inside, after) == (rank, 4, True, False)
        assert groups["dp"] == groups["control"] == groups["stage"] == (4, rank, ["main"])
        assert groups["pp"] == groups["sp"] == (1, 0, [])
        assert sums == everyone | ties[rank]


def sums_twice(port):
    """port: where rank 0 listens, whose store ends as it leaves, when rank 1 has come again; None for the ranks' own store."""
    environ = None
    if port is not None:
        environ = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= environ
    found = []
    for _ in range(2):
        with World.join("cpu", timeout_s=10, environ=environ) as world:
            value = torch.full((), float(world.rank + 1))
            world.make_groups(Topology.from_sizes(2), 10)["control"].all_reduce(value, label="a test").wait()
            if port is not None:
                time.sleep(0.5 * (1 - world.rank))
        found.append(value.item())
    return found


@pytest.mark.parametrize("is_address", [False, True])
def test_a_program_may_join_again_after_it_has_left(ranks, port, is_address):
    """As one that trains with several settings, one after the other: the store still has the first world's addresses."""
    assert ranks(2, 30, init=False)(sums_twice, port if is_address else None) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("store", ["file", "env"])
def test_a_peer_that_never_comes_is_an_error_in_time(tmp_path, store, port, monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    if store == "file":
        environ["SLEY_STORE"] = (tmp_path / "store").as_uri()
    else:
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    began = time.monotonic()
    with pytest.raises(RunError, match="could not join the process group") as caught:
        World.join("cpu", timeout_s=0.5, environ=environ)
    assert not dist.is_initialized()
    assert caught.value.diagnostics[0].code == "rendezvous-failed"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0"}, "WORLD_SIZE must be a number, but is not set"),
        ({"WORLD_SIZE": "2"}, "RANK must be a number, but is not set"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK must be a number, but is 'first'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, but is '-1'"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK = 5 .* WORLD_SIZE = 2"),
    ],
)
def test_a_launcher_that_says_too_little_is_told_what_is_missing(monkeypatch, environ, named):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match=named) as caught:
        World.join("cpu", environ=environ)
    assert caught.value.diagnostics[0].code == "rendezvous-failed"


def gloo_threads():
    """The threads of this process that gloo has started."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return [name for name in map(str.strip, names) if "gloo" in name]


def threads_before_and_after():
    with World.join("cpu", timeout_s=20) as world:
        groups = world.make_groups(Topology.from_sizes(2), 20)
        groups["dp"].all_reduce(torch.ones(3), label="the test").wait()
        before = gloo_threads()
    return before, gloo_threads(), groups["dp"].channels


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_no_thread_of_a_communicator_outlives_its_world(ranks):
    """One that did could free a tensor in an interpreter that is ending, which aborts the process."""
    for before, after, channels in ranks(2, init=False)(threads_before_and_after):
        assert len(before) >= 2
        assert after == []
        assert channels == {}


def leave_with_an_error(path):
    """Rank 0 fails while a sum is under way to which rank 1 never comes."""
    began = 0.0
    try:
        with World.join("cpu", timeout_s=20) as world:
            groups = world.make_groups(Topology.from_sizes(2), 20)
            if world.rank == 1:
                time.sleep(3)
                os._exit(0)
            pending = groups["dp"].all_reduce(torch.ones(3), label="the test")
            began = time.monotonic()
            raise ValueError("as asked")
    except ValueError:
        path.write_text(str(time.monotonic() - began))
        del pending
    os._exit(0)


def test_a_rank_that_fails_waits_for_nobody(ranks, tmp_path):
    path = tmp_path / "seconds"
    with pytest.raises(Exception, match="ended with exit code 0"):
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
        monkeypatch.setattr("sley_core.comm.world.dist.new_group", new_group)
        make_communicator(GroupEntry("some", DEFAULT_CHANNEL, (1, 2)), 0, backend, timedelta(seconds=1))
        assert seen == [bound]
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        dist.group.WORLD.bound_device_id = None


class LostWork:
    """A work of a process group whose peer has ended."""

    def wait(self):
        raise RuntimeError("Connection closed by peer")


class EndedWork:
    """A work that has ended. Like that of gloo, it can be waited for once. interrupts: whether a signal ends this wait."""

    def __init__(self, *, interrupts=False):
        self.num_waits = 0
        self.interrupts = interrupts

    def wait(self):
        self.num_waits += 1
        assert self.num_waits == 1
        if self.interrupts:
            raise KeyboardInterrupt


def find_mismatch():
    raise RunError("collective-failed", "the headers differ")


@pytest.mark.parametrize("place", ["works", "sends", "finish"])
def test_a_failed_exchange_fails_again_when_it_is_waited_for_again(place):
    """A program that catches the error of a wait must not read the tensors of the exchange as if it had ended."""
    stages, sends = [([EndedWork()], find_mismatch if place == "finish" else None)], []
    if place == "works":
        stages.append(([EndedWork(), LostWork()], None))
    elif place == "sends":
        sends = [EndedWork(), LostWork()]
    with World.alone("cpu") as world:
        group = world.make_groups(Topology.from_sizes(1), 20)["control"]
        work = GroupWork(begin_turn("all-gather", group, "a test"), stages, sends)
        for _ in range(2):
            with pytest.raises(RunError) as failure:
                work.wait_sent()
            assert failure.value.diagnostics[0].code == "collective-failed"


def test_a_wait_after_an_interrupted_wait_goes_on(monkeypatch):
    """An interrupted wait has ended: a second wait for its gloo message would block. It ends with the same error, if any."""
    works = [EndedWork(interrupts=index % 2 == 1) for index in range(6)]
    finish = mock.Mock(side_effect=[KeyboardInterrupt, None])
    with World.alone("cpu") as world:
        group = world.make_groups(Topology.from_sizes(1), 20)["control"]
        work = GroupWork(begin_turn("all-gather", group, "a test"), [(works[:3], finish)], works[3:])
        for _ in range(4):  # after the works 1, 3 and 5, and in `finish`
            with pytest.raises(KeyboardInterrupt):
                work.wait_sent()
        work.wait_sent()
        assert [work.num_waits for work in works] == [1] * 6
        lost = GroupWork(begin_turn("all-gather", group, "a test"), [([LostWork()], None)])
        monkeypatch.setattr("sley_core.comm.exchanges.first_line", mock.Mock(side_effect=[KeyboardInterrupt, "lost"]))
        with pytest.raises(KeyboardInterrupt):
            lost.wait()
        with pytest.raises(RunError, match="lost"):
            lost.wait()

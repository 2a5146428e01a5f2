"""Ranks meet before they wait for one another: all start, or each says which rank differs, where, and what to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from meeting_ranks import FACTS, PARTS, SECOND, comes, environ, held, told
from torch.distributed import TCPStore

from sley_core.comm import startup
from sley_core.errors import RunError
from train_cli.start.meeting import Meeting

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("impatient")]


def test_ranks_that_agree_start(port: int) -> None:
    found = told({str(rank): comes(port, rank, 4) for rank in range(4)})
    assert set(found.values()) == {""}


def test_a_store_with_the_roll_call_of_an_earlier_start_is_refused(port: int) -> None:
    """torchrun's agents on several hosts keep theirs when they start ranks again. Rank 1 agreed with those of before, and
    rank 0 found two processes of one rank.
    """
    agents = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert set(told({str(rank): comes(port, rank, 2, **torchrun) for rank in range(2)}).values()) == {""}
    for rank in (1, 0):
        startup.forget()  # as new processes
        found = told({"again": comes(port, rank, 2, **torchrun)})["again"]
        assert "the ranks of this run have met before, and their launcher has kept what they said" in found
        assert "`--max-restarts=0`" in found
    del agents


def test_a_rank_that_comes_late_is_waited_for(port: int) -> None:
    def late() -> None:
        time.sleep(0.5)
        comes(port, 0, 2)()

    assert set(told({"0": late, "1": comes(port, 1, 2)}).values()) == {""}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"the plan": "xyz"}, "rank 2 on host2 has another plan than rank 0 on host0: `optimizer.lr` is 0.5, not 0.1"),
        ({"torch": "2.12.0"}, "rank 2 on host2 has torch 2.12.0, rank 0 on host0 has 2.13.0"),
        ({"plugin dp": "sley-dp 0.2.0"}, "has plugin dp sley-dp 0.2.0, rank 0 on host0 has sley-dp 0.1.0"),
        ({"plugin odd": "odd 1"}, "has plugin odd odd 1, rank 0 on host0 has none"),
    ],
)
def test_a_host_that_differs_is_named_to_all(port: int, own: dict[str, str], words: str) -> None:
    found = told({str(rank): comes(port, rank, 3, FACTS | own if rank == 2 else FACTS) for rank in range(3)})
    assert all(words in one for one in found.values()), found
    assert all("install the same versions and give the same plan" in one for one in found.values())


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_cannot_begin_is_named_to_all(port: int, odd: int) -> None:
    def gives_up() -> None:
        at = Meeting.at(environ(port, odd, 3), timeout_s=5)
        held.append(at)
        at.host = "lame"
        at.give_up("no file `plan.toml`", "copy it there")

    others = {str(rank): comes(port, rank, 3) for rank in range(3) if rank != odd}
    begun = time.monotonic()
    found = told({"odd": gives_up, **others})
    assert found.pop("odd") == "", "it has an error of its own"
    assert all(f"rank {odd} on lame cannot begin: no file `plan.toml`" in one for one in found.values()), found
    assert all("copy it there" in one for one in found.values())
    assert time.monotonic() - begun < 10


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    found = told({str(rank): comes(port, rank, 5, timeout_s=1) for rank in (0, 1, 3)})
    assert "of 5 ranks these did not come within 1 s: 2, 4 (hosts that did: host0, host1, host3)" in found["0"]


def test_two_processes_of_one_rank(port: int) -> None:
    found = told({"0": comes(port, 0, 3), "1": comes(port, 1, 3), "again": comes(port, 1, 3, **SECOND)})
    assert all("two processes, on host1 and host1, say that they are rank 1" in one for one in found.values()), found


def test_another_run_at_the_port_is_left_alone(port: int) -> None:
    """The stranger is refused, and does no harm to those who have met there rightly."""
    ours = {str(rank): comes(port, rank, 2, SLURM_JOB_ID="7") for rank in range(2)}
    found = told({**ours, "stranger": comes(port, 1, 2, SLURM_JOB_ID="8", **SECOND)})
    assert "another run meets at this port (job 7 of 2 ranks, on host0)" in found.pop("stranger")
    assert set(found.values()) == {""}


def test_another_run_that_cannot_begin_is_none_of_ours(port: int) -> None:
    def gives_up() -> None:
        Meeting.at(environ(port, 1, 2, SLURM_JOB_ID="8", **SECOND), timeout_s=5).give_up("no file", None)

    ours = {str(rank): comes(port, rank, 2, SLURM_JOB_ID="7") for rank in range(2)}
    assert set(told({**ours, "stranger": gives_up}).values()) == {""}


def test_hosts_that_are_one_machine_may_take_long_to_build(port: int) -> None:
    """Only to meet they have no more than a moment, where their address is that of one machine."""

    def works(rank: int) -> Callable[[], None]:
        def work() -> None:
            at = Meeting.at(environ(port, rank, 2, LOCAL_WORLD_SIZE="1"), timeout_s=600)
            held.append(at)
            at.agree(FACTS, PARTS)
            with at.all_or_none(20):
                time.sleep(1.5 * rank)

        return work

    assert set(told({str(rank): works(rank) for rank in range(2)}).values()) == {""}


@contextmanager
def stranger(port: int) -> Iterator[None]:
    """A program that listens there and says nothing."""
    with closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        yield


def test_a_taken_port(port: int) -> None:
    with stranger(port):
        begun = time.monotonic()
        found = told({"0": comes(port, 0, 2), "1": comes(port, 1, 2)})
    assert f"port {port} cannot be had" in found["0"]
    assert "choose another MASTER_PORT" in found["0"]
    assert f"what listens at 127.0.0.1:{port} is no meeting of ranks" in found["1"]
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "the name `no-such-host.invalid` cannot be resolved"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR = ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"LOCAL_WORLD_SIZE": "1"}, "MASTER_ADDR must be rank 0's host, on all hosts, and not localhost"),
    ],
)
def test_an_address_that_leads_nowhere(port: int, more: dict[str, str], words: str) -> None:
    """The last is a second host whose MASTER_ADDR is itself: nobody will come, whatever the time limit."""
    begun = time.monotonic()
    with pytest.raises(RunError, match="preflight") as caught:
        Meeting.at(environ(port, 1, 2, **more), timeout_s=600)
    assert words in str(caught.value)
    assert time.monotonic() - begun < 10


def test_rank_0_of_a_loopback_does_not_wait_long_for_other_hosts(port: int) -> None:
    found = told({"0": comes(port, 0, 2, timeout_s=600, LOCAL_WORLD_SIZE="1")})
    assert "did not come within 1 s: 1" in found["0"]
    assert "not localhost" in found["0"]


def test_a_store_that_breaks_off_is_not_yet_there(port: int) -> None:
    """What listens for a host that is late, such as a proxy, lets nobody through; then rank 0 comes."""
    with closing(socket.socket()) as proxy:
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.bind(("127.0.0.1", port))
        proxy.listen()

        def first() -> None:
            for _ in range(3):
                proxy.accept()[0].close()
            proxy.close()
            comes(port, 0, 2, timeout_s=20)()

        found = told({"0": first, "1": comes(port, 1, 2, timeout_s=20)})
    assert set(found.values()) == {""}, found


def test_ranks_that_meet_again_compare_again(port: int) -> None:
    """In the same store, where all that was said the first time is still to be read."""

    def twice(rank: int) -> Callable[[], None]:
        def work() -> None:
            comes(port, rank, 2)()
            comes(port, rank, 2, FACTS | {"torch": f"2.{rank}.0"})()

        return work

    found = told({str(rank): twice(rank) for rank in range(2)})
    assert all("rank 1 on host1 has torch 2.1.0, rank 0 on host0 has 2.0.0" in one for one in found.values()), found


def test_ranks_that_meet_again_start_again(port: int) -> None:
    def thrice(rank: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(3):
                at = Meeting.at(environ(port, rank, 2), timeout_s=5)
                held.append(at)
                at.agree(FACTS | {"the plan": str(number)}, PARTS)
                with at.all_or_none(20):
                    time.sleep(0.1 * rank)

        return work

    assert set(told({str(rank): thrice(rank) for rank in range(2)}).values()) == {""}

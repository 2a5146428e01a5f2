"""Ranks that have met build together: what one fails in, or dies of, ends all within seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
from meeting_ranks import FACTS, PARTS, builds, dies, environ, has_loopback_6, held, timed, told
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it

from sley_core.errors import RunError
from train_cli.start import meeting as module
from train_cli.start.meeting import Meeting

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("impatient")]


@pytest.mark.parametrize(("odd", "slow"), [(0, 1), (2, 0)])
def test_what_one_rank_fails_in_ends_all(port: int, odd: int, slow: int) -> None:
    def works(rank: int) -> Callable[[], None]:
        def work() -> None:
            at = Meeting.at(environ(port, rank, 3), timeout_s=5)
            held.append(at)
            at.host = f"host{rank}"
            at.agree(FACTS, PARTS)
            with at.all_or_none(20):
                pass
            with at.all_or_none(20):
                if rank == slow:
                    time.sleep(1.5)  # longer than a rank that gives up stays
                if rank == odd:
                    raise RunError("no-tokenizer", "there is no `tokenizer.json`", hint="copy it there")
            pytest.fail("it went on")

        return work

    found = told({str(rank): works(rank) for rank in range(3)})
    assert found.pop(str(odd)).startswith("error[no-tokenizer]"), "its own error, as it was"
    assert all(f"rank {odd} on host{odd} cannot begin: there is no `tokenizer.json`" in one for one in found.values()), found
    assert all("copy it there" in one for one in found.values())


def test_a_store_that_ends_with_its_process_is_told_of(port: int) -> None:
    first = Meeting.at(environ(port, 0, 2), timeout_s=5)
    second = Meeting.at(environ(port, 1, 2), timeout_s=5)
    del first
    with pytest.raises(RunError, match=r"preflight.*rank 1 has lost the others"):
        second.agree(FACTS, PARTS)
    second.give_up("there is no `plan.toml`", None)  # nobody hears it, and that is no error of its own


def test_a_rank_that_is_killed_while_others_build_is_told_within_seconds(port: int) -> None:
    """The limit is ten minutes: it was waited for. Who still builds is told when it is done."""
    seconds: dict[int, float] = {}
    with dies(port, 2, 3):
        found = told({str(rank): timed(builds(port, rank, 3, 1.5 * (1 - rank)), seconds, rank) for rank in range(2)})
    assert all("rank 2 on host2 has ended without a word" in one for one in found.values()), found
    assert max(seconds.values()) < 10


def test_rank_0_that_is_killed_is_noticed_where_an_agent_holds_the_store(port: int) -> None:
    agents = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    begun = time.monotonic()
    with dies(port, 0, 2, TORCHELASTIC_USE_AGENT_STORE="True"):
        found = told({"1": builds(port, 1, 2, TORCHELASTIC_USE_AGENT_STORE="True")})
    assert "rank 1 waited for rank 0 to hear of all ranks, but rank 0 has ended" in found["1"]
    assert time.monotonic() - begun < 10
    del agents


def test_what_one_rank_fails_in_is_told_while_rank_0_still_builds(port: int) -> None:
    is_told = threading.Event()

    def waits() -> None:
        try:
            builds(port, 1, 3)()
        finally:
            is_told.set()

    slow, odd = builds(port, 0, 3, until=is_told), builds(port, 2, 3, fails=True)
    found = told({"0": slow, "1": waits, "2": odd})
    assert all("rank 2 on host2 cannot begin: there is no `tokenizer.json`" in found[one] for one in "01"), found


@pytest.mark.parametrize(("limit_s", "waits"), [(20.0, True), (0.3, False)])
def test_rank_0_keeps_the_store_until_others_know_why_it_failed(
    port: int, monkeypatch: pytest.MonkeyPatch, limit_s: float, waits: bool
) -> None:
    """They build longer than it does; that it failed was lost with the store, two seconds later."""
    monkeypatch.setattr(module, "BUILDERS_S", limit_s)
    seconds: dict[int, float] = {}
    first = timed(builds(port, 0, 2, fails=True), seconds, 0)
    found = told({"0": first, "1": builds(port, 1, 2, 3.0)})
    assert found["0"].startswith("error[no-tokenizer]")
    assert (seconds[0] > 2.9) == waits
    assert "rank 0 on host0 cannot begin: there is no `tokenizer.json`" in found["1"]


def test_a_rank_that_has_read_and_ended_does_not_stand_for_one_that_builds(port: int) -> None:
    seconds: dict[int, float] = {}
    child = os.fork()
    if child == 0:
        try:
            builds(port, 1, 3)()
        finally:
            os._exit(0)
    first = timed(builds(port, 0, 3, 0.2, fails=True), seconds, 0)
    found = told({"0": first, "2": builds(port, 2, 3, 1.5)})
    os.waitpid(child, 0)
    assert seconds[0] > 1.4
    assert "rank 0 on host0 cannot begin: there is no `tokenizer.json`" in found["2"]


@pytest.mark.parametrize("end", ["Door", "Tether"])
def test_ranks_meet_where_no_connection_can_be_made(port: int, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Behind a firewall only the time limit tells who has died; whoever fails by itself is told as ever."""

    def closed(*_: object) -> None:
        raise OSError("closed to other hosts")

    monkeypatch.setattr(module, end, closed)
    found = told({str(rank): builds(port, rank, 3, fails=rank == 2) for rank in range(3)})
    assert found.pop("2").startswith("error[no-tokenizer]")
    assert all("rank 2 on host2 cannot begin" in one for one in found.values()), found


def test_each_wait_names_the_limit_that_it_had(port: int) -> None:
    """And keeps its own: that of what ranks build was taken for that of the meeting."""
    meetings: list[Meeting] = []

    def first() -> None:
        at = Meeting.at(environ(port, 0, 2), timeout_s=5)
        meetings.append(at)
        at.agree(FACTS, PARTS)
        with at.all_or_none(0.5):
            pass

    found = told({"0": first, "1": builds(port, 1, 2, 1.5)})
    assert "of 2 ranks these had not opened their data and built their model within 0.5 s: 1" in found["0"]
    assert "[limits] collective_timeout_s waits longer" in found["0"]
    assert meetings[0].timeout_s == 5


@pytest.mark.parametrize("odd", [None, 0, 1])
def test_no_connection_is_kept_behind_the_block(port: int, odd: int | None) -> None:
    """Nobody would look at it: it was kept until the run had ended."""
    meetings: list[Meeting] = []

    def works(rank: int) -> Callable[[], None]:
        def work() -> None:
            at = Meeting.at(environ(port, rank, 3), timeout_s=5)
            meetings.append(at)
            at.agree(FACTS, PARTS)
            assert (at._door if rank == 0 else at._tether) is not None
            with at.all_or_none(20):
                if rank == odd:
                    raise RunError("no-tokenizer", "there is no `tokenizer.json`")

        return work

    found = told({str(rank): works(rank) for rank in range(3)})
    assert sum(one != "" for one in found.values()) == (0 if odd is None else 3), found
    assert [(at._door, at._tether) for at in meetings] == 3 * [(None, None)]


def test_no_connection_is_kept_where_ranks_differ(port: int) -> None:
    meetings: list[Meeting] = []

    def works(rank: int) -> Callable[[], None]:
        def work() -> None:
            at = Meeting.at(environ(port, rank, 2), timeout_s=5)
            meetings.append(at)
            at.agree(FACTS | {"torch": str(rank)}, PARTS)

        return work

    assert all("has torch 1" in one for one in told({str(rank): works(rank) for rank in range(2)}).values())
    assert [(at._door, at._tether) for at in meetings] == 2 * [(None, None)]


def test_a_later_block_is_as_good_without_connections(port: int) -> None:
    def works(rank: int) -> Callable[[], None]:
        def work() -> None:
            at = Meeting.at(environ(port, rank, 2), timeout_s=5)
            held.append(at)
            at.agree(FACTS, PARTS)
            for _ in range(3):
                with at.all_or_none(20):
                    time.sleep(0.1 * rank)

        return work

    assert set(told({str(rank): works(rank) for rank in range(2)}).values()) == {""}


@pytest.mark.skipif(not has_loopback_6(), reason="there is no ::1 here")
def test_a_rank_that_is_killed_is_noticed_where_the_address_is_of_ipv6(port: int) -> None:
    with dies(port, 1, 2, MASTER_ADDR="::1"):
        found = told({"0": builds(port, 0, 2, MASTER_ADDR="::1")})
    assert "rank 1 on host1 has ended without a word" in found["0"]

"""Connections by which ranks notice that others have ended: what each end takes for an end, and what not."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from meeting_ranks import has_loopback_6

from train_cli.start.presence import Door, Tether

pytestmark = pytest.mark.timeout(60)


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def tied(door: Door, rank: int = 1, token: str | None = None) -> Tether:
    return Tether("127.0.0.1", door.port, f"{token or door.token} {rank} host{rank}", 3.0)


def known(door: Door, rank: int = 1) -> Tether:
    """A tether to which the door has answered."""
    tether = tied(door, rank)
    assert soon(lambda: not door.gone() and not tether.is_cut and tether._is_known)
    return tether


def test_ranks_beyond_the_files_that_rank_0_may_have_open_wait_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which builds, could open no file any more. Of those that are not let in, nobody hears that they have ended."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    door = Door("127.0.0.1")
    first = [known(door, rank) for rank in (1, 2)]
    late = tied(door, 3)
    for _ in range(3):
        assert door.gone() == {}
        time.sleep(0.05)
    assert not late.is_cut
    assert not late._is_known
    del first[0]
    assert soon(lambda: door.gone() == {1: "host1"} and not late.is_cut and late._is_known), "there is room now"


def test_a_rank_that_has_ended_is_named() -> None:
    door = Door("127.0.0.1")
    stays, ends = tied(door, 1), tied(door, 2)
    assert door.gone() == {}
    del ends
    assert soon(lambda: bool(door.gone()))
    assert door.gone() == {2: "host2"}
    assert not stays.is_cut


def test_the_end_of_a_rank_0_that_has_answered_is_noticed() -> None:
    door = Door("127.0.0.1")
    tether = known(door)
    assert not tether.is_cut
    del door
    assert soon(lambda: tether.is_cut)
    assert tether.is_cut, "and stays so"


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_proxy_that_closes_the_connection_is_no_rank_0(says: bytes) -> None:
    """It accepts in the place of rank 0, whose port is closed to others, and rank 0 is alive."""
    with closing(socket.create_server(("127.0.0.1", 0))) as proxy:
        tether = Tether("127.0.0.1", proxy.getsockname()[1], "token 1 host1", 3.0)
        caller, _ = proxy.accept()
        caller.recv(300)
        caller.sendall(says)
        caller.close()
        time.sleep(0.1)
        assert not tether.is_cut
        assert not tether.is_cut, "however often one looks"


def test_a_stranger_is_neither_answered_nor_counted() -> None:
    door = Door("127.0.0.1")
    tether = tied(door, token="another")
    time.sleep(0.1)
    assert door.gone() == {}
    del door
    time.sleep(0.1)
    assert not tether.is_cut


def test_a_door_that_is_closed_is_closed_to_all() -> None:
    door = Door("127.0.0.1")
    tether = known(door)
    door.close()
    assert soon(lambda: tether.is_cut)
    with pytest.raises(ConnectionRefusedError):
        tied(door)
    door.close()


def test_a_tether_that_is_closed_is_gone() -> None:
    door = Door("127.0.0.1")
    tether = tied(door)
    tether.close()
    assert soon(lambda: door.gone() == {1: "host1"})


@pytest.mark.parametrize("found", [["::1"], ["127.0.0.1"], ["127.0.1.1"], ["::1", "127.0.0.1"]])
def test_a_door_is_where_the_address_leads(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    """On one machine: as where `MASTER_ADDR` is `::1`, or a name that the system gives only that address."""
    if "::1" in found and not has_loopback_6():
        pytest.skip("there is no ::1 here")
    resolve(monkeypatch, found)
    door = Door("a-name")
    tether = Tether("a-name", door.port, f"{door.token} 1 host1", 3.0)
    door.gone()
    tether.close()
    assert soon(lambda: door.gone() == {1: "host1"})


def test_a_door_is_at_the_first_address_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of names has `::1` where the system has no IPv6."""
    resolve(monkeypatch, ["2001:db8::1", "127.0.0.1"])
    door = Door("a-name")
    assert not tied(door).is_cut


def test_a_door_that_can_be_nowhere_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, ["2001:db8::1"])
    with pytest.raises(OSError, match="address"):
        Door("a-name")


def resolve(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    """Lets `a-name` have these addresses."""
    resolved = socket.getaddrinfo

    def look_up(host: str, port: int, family: int = 0, type: int = 0, *more: int) -> list[object]:
        names = found if host == "a-name" else [host]
        return [info for name in names for info in resolved(name, port, family, type, *more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

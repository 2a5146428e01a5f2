"""In a fake world an exchange takes memory for what peers offer where a rank would read that: when it waits, or looks later."""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.comm.groups import nothing
from sley_core.comm.progress import Members
from sley_estimate.bytes.transports import ImitatedTransport


def imitated() -> tuple[ImitatedTransport, Members, list[int]]:
    """A transport of two ranks, who they are, and the elements for which it has taken memory so far."""
    members, taken = Members("dp", (0, 1), 0), list[int]()

    def scratch(own: Tensor) -> None:
        taken.append(own.numel())

    return ImitatedTransport(members, "reduce", lambda *_: nothing, scratch=scratch), members, taken


def test_a_sum_is_made_once_where_it_is_awaited() -> None:
    transport, _, taken = imitated()
    works = [
        transport.reduce_scatter([torch.ones(4, 3), torch.ones(2)], [], what="two"),
        transport.all_reduce(torch.ones(7), what="one"),
    ]
    for work in works:
        assert not work.test()
    assert not taken
    for work in works[::-1]:
        work.wait()
        assert work.test()
        work.wait_sent()
    assert taken == [4, 6, 1]


def test_a_look_in_a_later_entry_finds_that_peers_have_come() -> None:
    """What they offer is read then, but the exchange stays under way: its wait is where the list has it."""
    transport, members, taken = imitated()
    work = transport.reduce_scatter([torch.ones(4, 3)], [], what="one")
    assert not work.test()
    assert not taken
    members.progress.standing.comes("B0.1")
    assert not work.test()
    assert taken == [6]
    work.wait()
    assert work.test()
    assert taken == [6]

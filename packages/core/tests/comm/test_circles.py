"""Ranks that wait for each other are told so; ranks that wait for one that is late, dead or slow are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sley_core.comm import progress
from sley_core.comm.collectives import all_reduce, receive_from, send_to
from sley_core.comm.groups import Groups, make_groups
from sley_core.comm.guard import Waiting, circle_in, told
from sley_core.errors import RunError
from sley_core.topology import GATHER, Topology
from sley_testing.collectives import can_read_peers

reads = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
by_both = pytest.mark.parametrize("memory", [pytest.param(True, marks=reads), False])

LIMIT_S = 2.0
Act = Callable[[Groups], object]


def start_gather(groups: Groups) -> Any:
    whole = torch.empty(2 * groups["wp"].size)
    return groups["wp"].transport(GATHER).all_gather([whole], [torch.ones(2)], what="the weights of one")


def gather(groups: Groups) -> None:
    start_gather(groups).wait()


def total(groups: Groups) -> None:
    all_reduce(torch.ones(2), groups["all"], what="loss and gradient norm").wait()


def message(groups: Groups) -> None:
    """From the first stage to the second."""
    group = groups["pp"]
    start = receive_from if group.coord else send_to
    start(torch.ones(2), group, "up", 1 - group.coord, what="what stage 0 sends").wait()


def answer(groups: Groups) -> None:
    group = groups["pp"]
    start = send_to if group.coord else receive_from
    start(torch.ones(2), group, "down", 1 - group.coord, what="what stage 1 sends").wait()


def ended(acts: list[list[Act]], memory: bool, share: float = 2.0, **sizes: int) -> tuple[str, str, float]:
    """Code and message of the error with which the acts of this rank end, and after how many seconds. share: of the limit, for
    which it hears what others wait in: on a busy machine waits that began together end apart.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=LIMIT_S)
    groups = make_groups(Topology.of(size, **sizes), rank, backend="gloo", timeout=limit, attaches=memory)
    total(groups)
    begin = time.monotonic()
    try:
        with patch.object(progress, "SHARE_OF_LIMIT", share):
            for act in acts[rank]:
                act(groups)
    except RunError as error:
        time.sleep(1.0)  # peers say what they waited in, not that this rank has left
        return error.diagnostics[0].code, error.diagnostics[0].message, time.monotonic() - begin
    return "", "", time.monotonic() - begin


@by_both
def test_a_rank_that_has_left_the_layers(ranks: Any, memory: bool) -> None:
    """One gathers once more than the other, which waits in the sum that ends a step."""
    words = "exchange" if memory else "all-gather"
    first, second = ranks(2)(ended, [[gather, gather, total], [gather, total]], memory, wp=2)
    assert first[:2] == second[:2]
    assert first[0] == "ranks-differ"
    assert first[1] == (
        f"ranks wait for each other: rank 0 waits in the {words} of the weights of one over wp[0, 1] for rank 1, "
        "rank 1 waits in the all-reduce of loss and gradient norm over all[0, 1] for rank 0"
    )


def test_a_circle_over_stages(ranks: Any) -> None:
    """Ranks 0 and 1 share the first stage, 2 and 3 the second: 1 skips a gather, so 0 never sends what 2 needs."""
    acts: list[list[Act]] = [[gather, message], [message, answer], [message, gather, answer], [message, gather, answer]]
    found = ranks(4)(ended, acts, False, pp=2, wp=2)
    assert {code for code, *_ in found} == {"ranks-differ"}
    message_of = found[0][1]
    assert message_of.index("rank 0 waits in the all-gather") < message_of.index("rank 1 waits in the receive")
    assert "rank 3 waits in the all-gather of the weights of one over wp[2, 3] for rank 2" in message_of
    assert "rank 2 waits in the receive of what stage 0 sends over pp[0, 2] for rank 0" in message_of


def late(groups: Groups) -> None:
    time.sleep(LIMIT_S + 1.5)


def test_a_rank_that_is_late_is_not_one_that_differs(ranks: Any) -> None:
    """It comes when the other has given up; what both do is the same."""
    first, second = ranks(2)(ended, [[gather, total], [late, gather, total]], False, 1 / 8, wp=2)
    assert first[0] == "collective-failed"
    assert second[0] in ("", "collective-failed")
    assert first[2] < LIMIT_S + 3


def test_whoever_has_come_is_not_waited_for() -> None:
    here = Waiting(0, "a", (0, 1), "wp gather", 3, {"wp gather": 3})
    assert here.is_for(Waiting(1, "b", (0, 1), "wp reduce", 1, {"wp gather": 2}))
    assert not here.is_for(Waiting(1, "b", (0, 1), "wp reduce", 1, {"wp gather": 3}))
    assert not here.is_for(Waiting(2, "b", (2, 3), "wp gather", 1, {}))


def one(rank: int, late: int) -> Waiting:
    """Rank `rank` waits for rank `late`, in an exchange of which that has started none."""
    return Waiting(rank, f"exchange {rank}", (rank, late), f"queue {rank}", 1, {f"queue {rank}": 1})


def test_a_circle_is_found_wherever_one_begins() -> None:
    chain = {rank: one(rank, rank + 1) for rank in range(5)}
    assert circle_in(chain) == []
    assert [each.rank for each in circle_in(chain | {5: one(5, 3)})] == [3, 4, 5]
    assert [each.rank for each in circle_in({5: one(5, 3), 4: one(4, 5), 3: one(3, 4)})] == [3, 4, 5]
    assert told(circle_in({2: one(2, 1), 1: one(1, 2)})) == (
        "rank 1 waits in exchange 1 for rank 2, rank 2 waits in exchange 2 for rank 1"
    )

"""Tests that `late_exchanges` changes the results of programs that do not wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from sley_core.comm.group import Group, make_groups
from sley_core.comm.world import World
from sley_core.topology import Topology
from sley_testing.late_exchanges import late_exchanges


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
        groups = make_groups(Topology.from_sizes(2, dp=2), world.rank, backend="gloo", timeout=timedelta(seconds=30))
        return [program(groups["dp"]) for program in programs]


def test_only_a_program_that_waits_gets_the_right_result(ranks: Any) -> None:
    for right, early_read, early_write in ranks(2)(results, gather_correctly, read_too_early, write_too_early):
        assert right == 2
        assert early_read != early_read, "NaN"
        assert early_write == pytest.approx(0)

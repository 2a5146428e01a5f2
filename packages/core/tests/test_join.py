"""Groups that plugins list are there on every rank, in one order, and ranks that list others are named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble, plugin_groups
from sley_core.comm.collectives import all_reduce
from sley_core.comm.world import World
from sley_core.errors import PluginError, RunError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import ProcessGroupRecord
from sley_core.topology import Topology
from sley_testing.plans import small_plan

PLAN = small_plan(batch={"global_size": 3, "micro_size": 1}, parallel={"dp": 3})


def lists(*records: Any) -> Any:
    """As `Plan.call` finds them."""
    zeta = SimpleNamespace(name="zeta", label="plugin `zeta` (sley-zeta 1.0)")
    return lambda _, hook, **arguments: [(zeta, records)] if hook == "sley_process_groups" else []


def summed(monkeypatched: str, folder: Path, timeout_s: float = 5.0) -> Any:
    """What each of a plugin's groups sums on this rank, and who is in it; or what is said. timeout_s: of an exchange."""
    rank = int(os.environ["RANK"])
    pairs = [(0, 1), (1, 2)][monkeypatched == "other" and rank == 2]
    called = Plan.call
    listed = lists(ProcessGroupRecord("ends", ((0, 2),), ("up", "down")), ProcessGroupRecord("pairs", (pairs,)))

    def call(self: Plan, hook: str, /, **arguments: Any) -> Any:
        return [*called(self, hook, **arguments), *listed(self, hook)]

    Plan.call = call  # type: ignore[method-assign]
    with World.join("cpu") as world:
        plan = plan_from_dict(PLAN | {"limits": {"collective_timeout_s": timeout_s}}, folder)
        try:
            with assemble(plan, world) as run:
                found = {}
                for axis in ("ends", "pairs"):
                    one = torch.ones(1)
                    group = run.groups[axis]
                    one_lane = replace(group, lanes=dict.fromkeys(["main"], next(iter(group.lanes.values()), None)))
                    all_reduce(one, one_lane, what="ones").wait()
                    found[axis] = (group.ranks, sorted(group.lanes), float(one))
                return found
        except RunError as error:
            return error.diagnostics[0].code


def test_groups_of_a_plugin_are_there_on_all_ranks(ranks, texts):
    """A rank that is in none has one of its own."""
    ends, pairs = ((0, 2), ["down", "up"], 2.0), ((0, 1), ["main"], 2.0)
    assert ranks(3)(summed, "", texts) == [
        {"ends": ends, "pairs": pairs},
        {"ends": ((1,), [], 1.0), "pairs": pairs},
        {"ends": ends, "pairs": ((2,), [], 1.0)},
    ]


def test_ranks_that_list_other_groups_are_told(ranks, texts):
    """By the comparison of all tables, or by the group that does not come about."""
    assert set(ranks(3)(summed, "other", texts, 1.0)) <= {"ranks-disagree", "group-failed", "collective-failed"}


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([ProcessGroupRecord("dp", ((0, 1),))], "'dp' has the name of one of core's own"),
        ([ProcessGroupRecord("tie[0,1]", ((0, 1),))], "core's own"),
        ([ProcessGroupRecord("a", ((0, 1),)), ProcessGroupRecord("a", ((2, 3),))], "'a' is there twice"),
        ([ProcessGroupRecord("a", ((1, 0),))], "do not ascend"),
        ([ProcessGroupRecord("a", ((0, 1),), ())], "has no lane"),
        ([ProcessGroupRecord("a", ((0, 1), (1, 2)))], "has a rank twice"),
        ([ProcessGroupRecord("a", ((3, 4),))], "not among the 4"),
        ([("a", ((0, 1),))], "is no ProcessGroupRecord"),
    ],
)
def test_groups_that_cannot_be(monkeypatch, records, told):
    monkeypatch.setattr(Plan, "call", lists(*records))
    with pytest.raises(PluginError) as caught:
        list(plugin_groups(plan_from_dict(PLAN, Path.cwd()), Topology.of(4)))
    assert told in str(caught.value)
    assert "plugin `zeta` (sley-zeta 1.0) failed in sley_process_groups" in str(caught.value)

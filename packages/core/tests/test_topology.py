"""The layout of a world: both factorizations, the groups of every axis, and the one table of them."""

from collections import Counter
from dataclasses import replace
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.errors import PluginError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import ProcessGroupRecord
from sley_core.topology import AXES, GroupEntry, Topology
from sley_testing.plans import small_plan
from sley_testing.runs import running
from sley_trainer.assemble import list_plugin_groups


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """A valid topology of at most some hundred ranks; `sp` and `wp` need not divide one another."""
    pp, sp, wp = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return Topology.from_sizes(pp * lcm(sp, wp) * draw(st.integers(1, 4)), pp, sp, wp)


def test_sixteen_ranks_in_two_stages() -> None:
    """The worked example: world 16, pp 2, sp 4, wp 2."""
    topology = Topology.from_sizes(16, pp=2, sp=4, wp=2)
    assert (topology.dp, topology.wdp, topology.ranks_per_stage) == (2, 4, 8)
    assert topology.partition("sp") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert topology.partition("wp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert topology.partition("dp") == [(stage + i, stage + i + 4) for stage in (0, 8) for i in range(4)]
    assert topology.partition("wdp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert topology.partition("pp") == [(rank, rank + 8) for rank in range(8)]
    assert topology.partition("stage") == [tuple(range(8)), tuple(range(8, 16))]
    assert topology.partition("model") == [(2 * i, 2 * i + 1, 2 * i + 8, 2 * i + 9) for i in range(4)]
    assert topology.partition("control") == topology.partition("all") == [tuple(range(16))]


@settings(deadline=None, max_examples=40)
@given(topologies())
def test_the_groups_of_an_axis_cut_the_world_into_equal_parts(topology: Topology) -> None:
    """Each rank is in exactly one group of an axis, and all groups of an axis have its size."""
    sizes = {
        "control": topology.world_size,
        "all": topology.world_size,
        "stage": topology.ranks_per_stage,
        "pp": topology.pp,
        "dp": topology.dp,
        "sp": topology.sp,
        "wdp": topology.wdp,
        "wp": topology.wp,
        "model": topology.pp * topology.wp,
    }
    assert set(sizes) == set(AXES)
    for axis, size in sizes.items():
        groups = topology.partition(axis)
        assert topology.size_of(axis) == size
        assert all(len(ranks) == size and list(ranks) == sorted(ranks) for ranks in groups), axis
        assert Counter(rank for ranks in groups for rank in ranks) == Counter(range(topology.world_size)), axis


def test_labels_of_groups_are_short_and_unique() -> None:
    for ranks, label in (((0, 1), "0,1"), ((2, 3, 4), "2-4"), ((1, 5, 9), "1-9:4")):
        assert GroupEntry("wp", "gather", ranks).label == f"wp.gather[{label}]"
    table = list(Topology.from_sizes(16, pp=2, sp=4, wp=2).groups())
    assert table[0] == GroupEntry("control", "main", tuple(range(16)), backend="gloo")
    assert len({entry.label for entry in table}) == len(table)
    assert {entry.channel for entry in table if entry.axis == "pp"} == {"up", "down"}


PLAN = small_plan(batch={"global_size": 3, "micro_size": 1}, parallel={"dp": 3})


def lists(*records: Any) -> Any:
    """As `Plan.call` finds them."""
    zeta = SimpleNamespace(name="zeta", label="plugin `zeta` (sley-zeta 1.0)")
    return lambda _, hook, **arguments: [(zeta, records)] if hook == "sley_process_groups" else []


def sum_ones(folder: Path) -> Any:
    """Returns, for each group of a plugin, its ranks, its channels, and the sum of a one from each rank."""
    called = Plan.call
    listed = lists(ProcessGroupRecord("ends", ((0, 2),), ("up", "down")), ProcessGroupRecord("pairs", ((0, 1),)))
    Plan.call = lambda self, hook, /, **args: [*called(self, hook, **args), *listed(self, hook)]  # type: ignore[method-assign]
    with running(PLAN, folder) as run:
        sums = {}
        for axis in ("ends", "pairs"):
            one, group = torch.ones(1), run.groups[axis]
            one_channel = replace(group, channels=dict.fromkeys(["main"], next(iter(group.channels.values()), None)))
            one_channel.all_reduce(one, label="ones").wait()
            sums[axis] = (group.ranks, sorted(group.channels), float(one))
        return sums


def test_groups_of_a_plugin_are_there_on_all_ranks(ranks, texts):
    """A rank that is in none has one of its own."""
    ends, pairs = ((0, 2), ["down", "up"], 2.0), ((0, 1), ["main"], 2.0)
    assert ranks(3)(sum_ones, texts) == [
        {"ends": ends, "pairs": pairs},
        {"ends": ((1,), [], 1.0), "pairs": pairs},
        {"ends": ends, "pairs": ((2,), [], 1.0)},
    ]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([ProcessGroupRecord("dp", ((0, 1),))], "'dp' has an empty name, or a name that core uses"),
        ([ProcessGroupRecord("tie[0,1]", ((0, 1),))], "a name that core uses"),
        ([ProcessGroupRecord("a", ((0, 1),)), ProcessGroupRecord("a", ((2, 3),))], "'a' already exists"),
        ([ProcessGroupRecord("a", ((1, 0),))], "not in ascending order"),
        ([ProcessGroupRecord("a", ((0, 1),), ())], "has no channel"),
        ([ProcessGroupRecord("a", ((0, 1), (1, 2)))], "has a rank twice"),
        ([ProcessGroupRecord("a", ((3, 4),))], "not one of the 4 ranks"),
        ([("a", ((0, 1),))], "must be a ProcessGroupRecord"),
    ],
)
def test_groups_that_cannot_be(monkeypatch, records, words):
    monkeypatch.setattr(Plan, "call", lists(*records))
    with pytest.raises(PluginError) as caught:
        list(list_plugin_groups(plan_from_dict(PLAN, Path.cwd()), Topology.from_sizes(4)))
    assert words in str(caught.value)
    assert "plugin `zeta` (sley-zeta 1.0) failed in sley_process_groups" in str(caught.value)

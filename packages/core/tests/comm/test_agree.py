"""Ranks that are about to do different things find out before the first step, and the odd one is named on all of them."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import distributed_c10d

from sley_core.assemble import assemble
from sley_core.comm.collectives import agree
from sley_core.comm.groups import Group
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.records import ActivationPolicyRecord
from sley_core.table import Table
from sley_core.topology import Topology
from sley_testing.contract import Data
from sley_testing.plans import loader_of

PLAN = {
    "run": {"name": "agree", "steps": 1, "device": "cpu"},
    "model": {"factory": "sley_testing.contract:layers"},
    "data": {"factory": "sley_testing.contract:Data"},
    "loss": {"factory": "sley_testing.contract:Squares"},
    "batch": {"global_size": 6, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "precision": {"compute": "fp64"},
}


class KeepConfig(Table):
    """Nothing to set."""


def policies():
    return [ActivationPolicyRecord(name="keep", config=KeepConfig, build="sley_core.engine.call:keep")]


def refused(tables, odd, loader=None):
    """What `assemble` says on this rank; rank 1 is given `odd` instead of `tables`."""
    chosen = odd if os.environ["RANK"] == "1" else tables
    with World.join("cpu") as world:
        try:
            assemble(plan_from_dict(chosen, loader=loader), world).close()
        except RunError as error:
            (diagnostic,) = error.diagnostics
            return diagnostic.code, diagnostic.message
    return None


def test_equal_plans_agree(ranks):
    assert ranks(3)(refused, PLAN, PLAN) == [None] * 3


def started_without_pickles(tables):
    """Assembles and trains where nothing that comes from another rank can be unpickled."""

    def refuse(*_):
        raise AssertionError("unpickled what came over a socket")

    distributed_c10d._tensor_to_object = refuse
    with World.join("cpu") as world:
        first = world.from_first(lambda: [0.1, 1e300], "count")
        with assemble(plan_from_dict(tables), world) as run:
            return first, run.step()["step"]


def test_ranks_tell_each_other_values_not_programs(ranks):
    """Any user of a host can reach its loopback."""
    first = ranks(2)(started_without_pickles, PLAN)
    assert [found[0] for found in first] == [[0.1, 1e300]] * 2
    assert [found[1] for found in first] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optimizer": {"use": "core.sgd", "lr": 0.2}}, "`optimizer.lr` is 0.2, not 0.1"),
        ({"run": PLAN["run"] | {"seed": 1}}, "`run.seed` is 1, not 0"),
        ({"evaluation": {"every": 1}}, "`evaluation.every` is 1, not left out; `evaluation.steps` is 10, not left out"),
    ],
    ids=["lr", "seed", "a table"],
)
def test_a_rank_with_another_plan_is_named_everywhere_with_the_key(ranks, changes, what):
    found = ranks(3)(refused, PLAN, PLAN | changes)
    assert found == [("ranks-disagree", f"rank 1 has another plan than rank 0: {what}")] * 3


class MoreOnRank1(Data):
    def __len__(self):
        return 65 if os.environ["RANK"] == "1" else 64


def test_a_rank_with_other_data_is_named_everywhere(ranks):
    data = {"factory": f"{__name__}:MoreOnRank1"}
    found = ranks(3)(refused, PLAN | {"data": data}, PLAN | {"data": data})
    assert found == [("ranks-disagree", "rank 1 has samples per epoch: 65, rank 0 has 64")] * 3


def with_version(tables):
    """As `refused`, with a plugin of which rank 1 has a newer version."""
    plugin = SimpleNamespace(sley_records=hookimpl(policies))
    loader = loader_of({"mine": plugin})
    if os.environ["RANK"] == "1":
        loader._loaded["mine"] = _renamed(loader.load("mine"), "2.0")
    return refused(tables, tables, loader)


def _renamed(plugin, version):
    return replace(plugin, version=version)


def test_a_rank_with_another_version_of_a_plugin_is_named_everywhere(ranks):
    found = ranks(3)(with_version, PLAN | {"activations": {"use": "mine.keep"}})
    assert found == [("ranks-disagree", "rank 1 has plugin mine given 2.0, rank 0 has given 0")] * 3


def test_of_several_odd_ranks_the_first_is_named_and_the_rest_counted(monkeypatch):
    everyone = [{"torch": version} for version in ("2.12", "2.13", "2.11", "2.13", "2.13")]
    monkeypatch.setattr("sley_core.comm.collectives.gather_objects", lambda *_, **__: everyone)
    control = Group("control", (4, 5, 6, 7, 8), 5, {})
    with pytest.raises(RunError, match=r"rank 4 \(and 1 more\) has torch 2\.12, rank 5 has 2\.13"):
        agree({"torch": "2.13"}, control)


def test_one_rank_agrees_with_itself_without_a_communicator():
    agree({"the plan": "1"}, Group("control", (0,), 0, {}))
    assert Topology.of(1).size_of("control") == 1

"""What a search cannot price at a glance is refused by name: a wrong price would look like a right one."""

from __future__ import annotations

import pytest

from sley_core.draft import DTYPES
from sley_core.errors import PlanError
from sley_core.estimate.machine.read import machine_from_dict
from sley_core.estimate.seconds.links import collective
from sley_core.estimate.seconds_of_plan import estimate_seconds
from sley_core.hookspecs import hookimpl
from sley_core.loader import Loader
from sley_core.plan.load import plan_from_dict
from sley_core.records import ActivationPolicyRecord, GradientHandlerRecord
from sley_core.search.best_first import InOrder
from sley_core.search.choices import choices_of
from sley_core.search.layouts import Layouts
from sley_core.search.quick import Quick
from sley_core.table import Table
from sley_core.testing.machines import small_machine
from sley_core.testing.plans import small_plan

MACHINE = machine_from_dict(small_machine())


class Rank(Table):
    rank: int = 0


class Outsider:
    """A reducer that sums all where its rank is 0, one that says nothing, and a policy that copies."""

    @hookimpl
    def sley_gradient_handlers(self):
        build, plain = "sley_core.engine.each:Each", lambda config: config.rank == 0
        variants = ({}, {"rank": 4})
        return [
            GradientHandlerRecord(
                name="low", config=Rank, build=build, role="reducer", plain_sums=plain, variants=variants
            ),
            GradientHandlerRecord(name="silent", config=Rank, build=build, role="reducer", variants=({},)),
        ]

    @hookimpl
    def sley_activation_policies(self):
        build = "sley_core.engine.activations:keep"
        return [ActivationPolicyRecord(name="away", config=Rank, build=build, copies=True, variants=({},))]


def plan_of(**changes):
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(data=data, **changes), loader=Loader({"out": Outsider()}))


def everything(plan, world, keep=()):
    order = InOrder(Layouts(plan, world, choices_of(plan), keep), Quick(plan, world, MACHINE))
    found = []
    while one := order.next():
        found.append(one.layout)
    return found, order.tally


def test_sums_that_do_not_say_what_they_are_and_copies_are_no_candidates() -> None:
    found, tally = everything(plan_of(), 2, ["micro_size"])
    assert {str(one.reducer) for one in found} == {"core.each", "out.low"}
    assert {one.shape.activations.name for one in found} == {"core.keep", "core.recompute"}
    for what in ("sums of `out.low (rank = 4)`", "sums of `out.silent`", "copies of `out.away`"):
        assert tally.refused[f"not-at-a-glance: {what} cannot be told at a glance"] > 0, tally


def test_the_plans_own_reducer_is_refused_as_any_other() -> None:
    own = plan_of(parallel={"dp": 2}, gradient_handlers=[{"use": "out.silent"}])
    found, tally = everything(own, 2, ["reducer"])
    assert found == []
    assert any("out.silent" in reason for reason in tally.refused)


def test_canonical_sums_are_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match="not-at-a-glance") as caught:
        Quick(plan_of(parallel={"dp": 2, "reduction": "canonical"}), 2, MACHINE)
    (problem,) = caught.value.diagnostics
    assert problem.path == ("parallel", "reduction")
    assert "estimate --machine" in problem.hint


def test_seconds_of_a_policy_that_says_that_it_copies_are_refused() -> None:
    with pytest.raises(PlanError, match="copies to the host") as caught:
        estimate_seconds(plan_of(activations={"use": "out.away"}), 1, MACHINE)
    assert caught.value.diagnostics[0].path == ("activations", "use")


def test_exchanges_that_overlap_nothing_are_added_to_computing() -> None:
    """They were counted as hidden beneath the backward."""
    plan = plan_of(parallel={"dp": 2})
    keep = ["pp", "sp", "wp", "micro_size", "reducer", "activations"]
    (layout,) = everything(plan, 2, keep)[0]
    slow, free = ({"bandwidth": bandwidth, "latency_s": 0.0, "overlap": 0.0} for bandwidth in (1e8, 1e15))
    quick = [Quick(plan, 2, machine_from_dict(small_machine(links__same_host=link))) for link in (slow, free)]
    seconds = [one.seconds(layout) for one in quick]
    sums = [
        sum(collective("sum", int(count) * DTYPES[plan.precision.gradients].itemsize, range(2), quick[0].machine.links))
        for count in quick[0].tables.numel
    ]
    assert seconds[0] - seconds[1] == pytest.approx(sum(sums), rel=1e-3)

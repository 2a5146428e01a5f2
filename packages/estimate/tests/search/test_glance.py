"""What a search cannot price at a glance is refused by name: a wrong price would look like a right one."""

from __future__ import annotations

import numpy as np
import pytest

from sley_core.draft import DTYPES
from sley_core.engine.call import Keep
from sley_core.errors import PlanError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.records import ActivationPolicyRecord, GradientHandlerRecord, OffloadManagerRecord
from sley_core.table import Table
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.best_first import InOrder
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Candidate, Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.seconds.links import collective
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import loader_of, small_plan

COPIES = {"to_host": 1e9, "to_device": 1e9, "memory_bandwidth": 1e10}
MACHINE = machine_from_dict(small_machine(host=COPIES))


class Rank(Table):
    rank: int = 0


class Outsider:
    """A reducer that sums all where its rank is 0, one that says nothing, a policy that copies what two layers save, and two
    managers: one that says nothing, and one that swaps states.
    """

    @hookimpl
    def sley_gradient_handlers(self):
        build, plain = "sley_core.engine.handlers:Each", lambda config: config.rank == 0
        variants = ({}, {"rank": 4})
        return [
            GradientHandlerRecord(
                name="low", config=Rank, build=build, role="reducer", plain_sums=plain, variants=variants
            ),
            GradientHandlerRecord(name="silent", config=Rank, build=build, role="reducer", variants=({},)),
        ]

    @hookimpl
    def sley_records(self):
        def record(name, **says):
            parts = {"config": Rank, "build": "none:None", "parts": lambda config: ("optimizer_states",)}
            return OffloadManagerRecord(name=name, variants=({},), scope=lambda config: "per_matrix", **parts, **says)

        away = ActivationPolicyRecord(name="away", config=Rank, build=f"{__name__}:Away", copies=True, variants=({},))
        return [away, record("mute"), record("swap", swaps=lambda config: True)]


class Away(Keep):
    """Stands for a policy that copies what the first two layers save."""

    def __init__(self, config, layer_names):
        self.names = frozenset(layer_names[:2])


def plan_of(**changes):
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(data=data, **changes), loader=loader_of({"out": Outsider()}))


def everything(plan, world, keep=(), memory=None):
    order = InOrder(Layouts(plan, world, choices_of(plan), keep), Quick(plan, world, MACHINE), memory)
    found = []
    while one := order.next():
        found.append(one)
    return [one.layout for one in found], order.tally, [one.estimate.num_bytes for one in found]


def test_sums_that_do_not_say_what_they_are_and_copies_are_no_candidates() -> None:
    found, tally, sizes = everything(plan_of(), 2, ["micro_size"])
    assert {str(one.reducer) for one in found} == {"core.each", "out.low"}
    assert {one.shape.activations.name for one in found} == {"core.keep", "core.recompute", "out.away"}
    assert {one.shape.offload for one in found} == {None}, "states stay where there is room"
    for what in ("sums of `out.low (rank = 4)`", "sums of `out.silent`"):
        assert tally.refused[f"not-at-a-glance: a search has no quick price for {what}"] > 0, tally
    found, tally, _ = everything(plan_of(), 2, ["micro_size"], min(sizes) - 1)
    assert {str(one.shape.offload) for one in found} == {"out.swap"}
    assert tally.refused["not-at-a-glance: a search has no quick price for copies of `out.mute`"] > 0, tally


def test_the_plans_own_reducer_is_refused_as_any_other() -> None:
    own = plan_of(parallel={"dp": 2}, gradient_handlers=[{"use": "out.silent"}])
    found, tally, _ = everything(own, 2, ["reducer"])
    assert found == []
    assert any("out.silent" in reason for reason in tally.refused)


def test_canonical_sums_are_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match="not-at-a-glance") as caught:
        Quick(plan_of(parallel={"dp": 2, "reduction": "canonical"}), 2, MACHINE)
    (problem,) = caught.value.diagnostics
    assert problem.path == ("parallel", "reduction")
    assert "estimate --machine" in problem.hint


def test_without_a_rate_of_copies_what_copies_is_no_candidate() -> None:
    plan = plan_of()
    order = InOrder(
        Layouts(plan, 2, choices_of(plan), ["micro_size"]), Quick(plan, 2, machine_from_dict(small_machine()))
    )
    found = []
    while one := order.next():
        found.append(one.layout.shape)
    assert {(shape.activations.name, shape.offload) for shape in found} == {
        ("core.keep", None),
        ("core.recompute", None),
    }
    assert any(reason.startswith("machine-host: the machine file has no `[host]`") for reason in order.tally.refused)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_layers_save_is_copied_beside_the_next_layer_or_on_a_cpu_before_it(kind: str) -> None:
    plan = plan_of()
    quick = Quick(plan, 1, machine_from_dict(small_machine(device__kind=kind, host=COPIES)))
    shapes = {shape.activations.name: shape for shape in Layouts(plan, 1, choices_of(plan), ["micro_size"]).shapes()}
    kept, away = (quick.tables.of(shapes[name]) for name in ("core.keep", "out.away"))
    copied_s = kept.kept[:2] / 1e9
    if kind == "cuda":
        assert away.forward[:2] == pytest.approx(np.maximum(kept.forward[:2], copied_s))
        assert away.backward[:2] == pytest.approx(np.maximum(kept.backward[:2], copied_s))
    else:
        assert away.forward[:2] == pytest.approx(kept.forward[:2] + copied_s)
        assert away.backward[:2] == pytest.approx(kept.backward[:2] + copied_s)
    assert away.forward[2:] == pytest.approx(kept.forward[2:])
    assert (away.kept == np.where(np.arange(len(kept.kept)) < 2, 0, kept.kept)).all()


def test_states_that_are_swapped_cost_the_slower_way_and_no_bytes() -> None:
    plan = plan_of()
    quick = Quick(plan, 1, machine_from_dict(small_machine(host=COPIES | {"to_host": 5e8})))
    space = Layouts(plan, 1, choices_of(plan), ["micro_size", "activations"])
    shape = next(iter(space.shapes()))
    (away,) = (one for one in space.offloading(shape) if one.offload.name == "out.swap")
    here, swapped = (Candidate(one, None, None) for one in (shape, away))
    num_bytes = 2 * 8 * int(quick.tables.trained.counted(None).numel.sum())  # AdamW's states, in fp64
    assert quick.seconds(swapped) - quick.seconds(here) == pytest.approx(num_bytes / 5e8)
    assert quick.num_bytes(here) - quick.num_bytes(swapped) == num_bytes
    assert quick.least(swapped.shape).seconds <= quick.bound(swapped).seconds <= quick.seconds(swapped)


def test_exchanges_that_overlap_nothing_are_added_to_computing() -> None:
    """They were counted as hidden beneath the backward."""
    plan = plan_of(parallel={"dp": 2})
    keep = ["pp", "sp", "wp", "micro_size", "reducer", "activations", "offload"]
    (layout,) = everything(plan, 2, keep)[0]
    slow, free = ({"bandwidth": bandwidth, "latency_s": 0.0, "overlap": 0.0} for bandwidth in (1e8, 1e15))
    quick = [Quick(plan, 2, machine_from_dict(small_machine(links__same_host=link))) for link in (slow, free)]
    seconds = [one.seconds(layout) for one in quick]
    sums = [
        sum(collective("sum", int(count) * DTYPES[plan.precision.gradients].itemsize, range(2), quick[0].machine.links))
        for count in quick[0].tables.trained.counted(None).numel
    ]
    assert seconds[0] - seconds[1] == pytest.approx(sum(sums), rel=1e-3)

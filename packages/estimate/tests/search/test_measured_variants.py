"""What of a model was measured does not decide which of its layouts comes first: all is in the measure of what was."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import draft_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.layers.of_plan import PricedLayer, priced_layers
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import MachineFile
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Layouts
from sley_estimate.search.roofline import Roofline
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine, timed_layers
from sley_testing.plans import small_plan
from train_cli.on_meta import meta_micro_batch

DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 64}
SHAPE = {"use": "models.llama", "num_layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128}


def plan_of(micro_size: int = 2, policy: str = "core.keep") -> Plan:
    batch = {"global_size": 16, "micro_size": micro_size}
    return plan_from_dict(small_plan(data=DATA, model=SHAPE, batch=batch, activations={"use": policy}))


def priced(plan: Plan, machine: MachineFile) -> list[PricedLayer]:
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    return priced_layers(plan, model, meta_micro_batch(plan, dataset), machine)


def measured(plan: Plan, times: float, **more: Any) -> MachineFile:
    """The small machine, on which each layer of `plan` was measured to take so many times what is counted."""
    return machine_from_dict(small_machine(layers=[table | more for table in timed_layers(plan, times)]))


def ranked(machine: MachineFile) -> dict[str, float]:
    """The seconds of all layouts of one rank by the formula, in order."""
    plan = plan_of()
    choices = choices_of(plan)
    roofline = Roofline(plan, 1, machine, choices)
    layouts = [one for one in Layouts(plan, 1, choices, ["offload"]).every() if not one.shape.activations.copies]
    return dict(sorted(((str(one), roofline.of(one).seconds) for one in layouts), key=lambda item: item[1]))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("times", "micro_size", "policy"), [(2.0, 2, "core.keep"), (0.5, 4, "core.keep"), (2.0, 4, "core.recompute")]
)
def test_layers_of_one_variant_change_no_order(times: float, micro_size: int, policy: str) -> None:
    """Recomputation was first where it alone was counted, or where it alone was measured, on a faster machine."""
    counted = ranked(machine_from_dict(small_machine()))
    assert len(counted) > 4
    found = ranked(measured(plan_of(micro_size, policy), times))
    assert list(found) == list(counted)
    for name, seconds in found.items():
        assert seconds == pytest.approx(times * counted[name], rel=0.05), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("said", [{}, {"micro_size": 2, "activations": "core.keep"}], ids=["of before", "said"])
def test_an_estimate_brings_layers_to_the_same_measure_as_a_formula(said: dict[str, Any]) -> None:
    plan, machine = plan_of(), measured(plan_of(), 2.0, **said)
    choices = choices_of(plan)
    roofline, space = Roofline(plan, 1, machine, choices), Layouts(plan, 1, choices, ["offload"])
    for shape in space.shapes():
        if shape.sizes.micro_size > 4 or shape.activations.name == "memory.host":
            continue
        (layout,) = space.within(shape)
        told = estimate_seconds(layout.plan(plan, 1), 1, machine)
        assert roofline.of(layout).seconds == pytest.approx(told.step.seconds, rel=0.05), str(layout)
        own = shape.sizes.micro_size == 2 and shape.activations.name == "core.keep"
        assert {one.source for one in told.layers} == {"measured" if own else "in proportion"} | (
            {"measured"} if shape.sizes.micro_size == 2 else set()
        )


def test_the_variant_with_about_as_many_samples_counts() -> None:
    """Small layers and large ones are seldom as far from what is counted."""
    few, many = measured(plan_of(1), 3.0), measured(plan_of(8), 1.0)
    machine = machine_from_dict(small_machine(layers=[one.model_dump() for one in (*few.layers, *many.layers)]))
    bare = machine_from_dict(small_machine())
    for micro_size, times in ((1, 3.0), (2, 3.0), (4, 1.0), (8, 1.0), (16, 1.0)):
        plan = plan_of(micro_size, "core.recompute")
        found, counted = priced(plan, machine), priced(plan, bare)
        assert found[1].seconds.backward == pytest.approx(times * counted[1].seconds.backward, rel=1e-2), micro_size


def test_a_layer_that_runs_again_does_so_as_its_forward_was_measured() -> None:
    device = machine_from_dict(small_machine(device__kind="cpu", device__launch_s=0.0)).device
    forward, backward = (Operator("x", int(1e9)),), (Operator("y", int(2e9)),)
    keep = LayerWork(forward, (), backward, backward, (), 0, 0, 0)
    again = LayerWork(forward, forward, backward, backward, (), 0, 0, 0)
    counted = LayerSeconds.computed(keep, device)
    slow = LayerSeconds(3 * counted.forward, counted.backward, counted.input_gradient, 0.0)
    found = LayerSeconds.in_proportion(again, keep, slow, device)
    assert found.forward == pytest.approx(3 * counted.forward)
    assert found.backward == pytest.approx(3 * counted.forward + counted.backward)


def test_a_layer_of_another_model_stays_counted() -> None:
    """It has nothing to do with what was measured."""
    plan = plan_of()
    other = plan_from_dict(small_plan(data=DATA, model={**SHAPE, "ffn_hidden": 192}))
    machine = measured(other, 2.0)
    assert [one.source for one in priced(plan, machine)][1:-1] == ["counted"] * 3
    assert ranked(machine)

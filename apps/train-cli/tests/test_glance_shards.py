"""What a search sees of shards and slices at a glance is near what `estimate` says, in its parts too."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import draft_model
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.layers.distinct import layer_keys
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import MachineFile
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Candidate, Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan

SHAPE = {"use": "models.llama", "num_layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn_hidden": 512}
PARTS = {"wp": {"weights": {"use": "isp.communicator"}}, "sp": {"sequence": {"use": "isp.all_to_all"}}}
SUMS = {"latency_s": 0.0, "bandwidth": 1e15}
"""What replicas sum is another matter: here it costs nothing."""


def machine(overlap: float, **changes: Any) -> MachineFile:
    """A machine whose seconds are those of bytes, as shards and slices change them. overlap: of its links."""
    link = {"latency_s": 1e-6, "bandwidth": 1e10, "overlap": overlap}
    fast = {"flops_per_s": 1e12}
    return machine_from_dict(
        small_machine(
            device__launch_s=1e-7,
            device__kind="cuda" if overlap else "cpu",
            device__matmul={"fp32": fast, "bf16": fast},
            links__same_host={**link, "sum": {**SUMS, "overlap": overlap}},
            **changes,
        )
    )


def plan_of(axis: str, size: int, compute: str = "fp32") -> Plan:
    """A plan of which `size` ranks have shards or slices."""
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 128}
    batch = {"global_size": 4, "micro_size": 1}
    tables = small_plan(
        data=data, model=SHAPE, batch=batch, precision={"compute": compute}, parallel={axis: size}, **PARTS[axis]
    )
    return plan_from_dict(tables)


def only_layout(plan: Plan, world: int) -> Candidate:
    """The plan's own layout, as a search sees it."""
    keep = ("pp", "sp", "wp", "micro_size", "activations", "reducer")
    space = Layouts(plan, world, choices_of(plan), keep)
    shape = next(one for one in space.shapes() if one.weights is None or one.weights.name == "isp.communicator")
    return next(iter(space.within(shape)))


def glance_and_estimate(plan: Plan, world: int, on: MachineFile) -> tuple[float, float]:
    layout = only_layout(plan, world)
    return Quick(plan, world, on).seconds(layout), estimate_seconds(plan, world, on).step.seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axis", "size", "overlap", "compute"),
    [
        ("wp", 4, 0.0, "fp32"),
        ("sp", 4, 1.0, "bf16"),
        pytest.param("wp", 2, 1.0, "bf16", marks=pytest.mark.campaign),
        pytest.param("wp", 4, 1.0, "bf16", marks=pytest.mark.campaign),
        pytest.param("wp", 2, 0.0, "fp32", marks=pytest.mark.campaign),
        pytest.param("sp", 2, 1.0, "bf16", marks=pytest.mark.campaign),
        pytest.param("sp", 4, 0.0, "fp32", marks=pytest.mark.campaign),
        pytest.param("sp", 2, 0.0, "fp32", marks=pytest.mark.campaign),
    ],
)
def test_a_glance_at_shards_and_slices_is_near_their_own_steps(
    axis: str, size: int, overlap: float, compute: str
) -> None:
    """Sums of rows, and copies beside swaps, were left out: up to a fifth of a step with shards."""
    glance, estimate = glance_and_estimate(plan_of(axis, size, compute), size, machine(overlap))
    assert glance == pytest.approx(estimate, rel=0.05)


def test_reductions_run_beside_the_layers_that_follow_them() -> None:
    """A look whether one had ended found it done, which made the rank wait for it in front of the next product."""
    step = estimate_seconds(plan_of("wp", 4, "bf16"), 4, machine(1.0)).step
    took_s = sum(span.end_s - span.start_s for span in step.exchanges if span.lane == "reduce wp.reduce")
    assert 0 < step.exposed_s(0)["reduce"] < took_s / 4


def test_seconds_of_layers_of_slices_are_those_of_the_machine_file() -> None:
    """They were looked up for whole sequences alone, and computed from operators instead."""
    plan = plan_of("sp", 2)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
    each = {"forward": 0.01, "backward": 0.02, "input_gradient": 0.01, "weight_gradient": 0.01, "output_bytes": 1}
    layers = [{"key": key, "name": key, **each} for key in dict.fromkeys(keys)]
    glance, estimate = glance_and_estimate(plan, 2, machine(1.0, layers=layers))
    assert estimate > 4 * len(model.layers) * 0.03
    assert glance == pytest.approx(estimate, rel=0.01)

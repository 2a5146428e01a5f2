"""Bytes at a glance are near those of a layout's own steps, and never above them: what would fit is not dropped unseen."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Candidate, Layouts, Sizes
from sley_estimate.search.quick import Quick
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan

SHAPE = {"use": "models.llama", "num_layers": 8, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn_hidden": 320}
DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 256}
WORLD = 4


def layout_of(space: Layouts, sizes: Sizes, *names: str, offload: str = "") -> Candidate:
    """The layout with these sizes whose parts have these names."""
    for shape in (one for each in space.shapes() for one in (each, *space.offloading(each))):
        if shape.sizes == sizes and (shape.offload.name if shape.offload else "") == offload:
            for layout in space.within(shape):
                parts = (layout.schedule, shape.activations, layout.reducer, shape.weights)
                if {part.name for part in parts if part} == set(names):
                    return layout
    raise AssertionError((sizes, names))


@pytest.mark.sample(1)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("sizes", "names", "least"),
    [
        ((4, 1, 1, 2), ("pp.one_f_one_b", "core.keep"), 0.8),
        ((1, 1, 1, 4), ("core.keep", "dp.bucketed"), 0.9),
        ((1, 1, 1, 4), ("core.recompute", "dp.sharded"), 0.8),
        ((1, 1, 4, 1), ("core.keep", "dp.bucketed", "isp.communicator"), 0.8),
        ((2, 1, 1, 2), ("pp.zero_bubble_v", "core.keep", "dp.sharded"), 0.8),
        ((2, 1, 1, 1), ("pp.one_f_one_b", "core.recompute", "core.each"), 0.8),
        ((1, 4, 1, 4), ("core.keep", "dp.bucketed"), 0.7),
        ((1, 1, 1, 4), ("memory.host", "dp.bucketed"), 0.7),
        ((4, 1, 1, 2), ("pp.one_f_one_b", "memory.host"), 0.55),
    ],
)
def test_a_glance_at_bytes_is_near_and_never_above(
    sizes: tuple[int, int, int, int], names: tuple[str, ...], least: float, compute: str
) -> None:
    """A loss's logits, what a backward has at once, and what the steps of a norm save were left out: up to a third."""
    batch: dict[str, Any] = {"global_size": 16, "micro_size": 1}
    plan = plan_from_dict(small_plan(model=SHAPE, data=DATA, batch=batch, precision={"compute": compute}))
    machine = machine_from_dict(
        small_machine(
            device__matmul={"bf16": {"flops_per_s": 1e12}, "fp32": {"flops_per_s": 1e12}},
            host={"to_host": 1e9, "to_device": 1e9, "memory_bandwidth": 1e10},
        )
    )
    layout = layout_of(Layouts(plan, WORLD, choices_of(plan)), Sizes(*sizes), *names)
    made = layout.plan(plan, WORLD)
    glance = Quick(plan, WORLD, machine).num_bytes(layout)
    per_stage = WORLD // sizes[0]
    exact = max(rank_bytes(made, stage * per_stage, WORLD).peak for stage in range(sizes[0]))
    assert least < glance / exact <= 1.0, f"{glance / exact:.3f} of {exact}"


@pytest.mark.parametrize(("world", "names"), [(1, ("core.recompute",)), (2, ("pp.one_f_one_b", "core.recompute"))])
def test_the_start_of_a_rank_that_nobody_shares_weights_with_has_no_gradients(
    world: int, names: tuple[str, ...]
) -> None:
    """With its optimizer on the host little else is on the device: what comes too early there would be above the step."""
    batch: dict[str, Any] = {"global_size": 4, "micro_size": 1}
    tables = small_plan(model=SHAPE, data=DATA, batch=batch, precision={"compute": "bf16"}, run__device="cuda")
    plan = plan_from_dict(tables)
    host = {"to_host": 1e10, "to_device": 1e10, "memory_bandwidth": 1e11}
    machine = machine_from_dict(
        small_machine(device__kind="cuda", device__matmul={"bf16": {"flops_per_s": 1e12}}, host=host)
    )
    space = Layouts(plan, world, choices_of(plan))
    layout = layout_of(space, Sizes(world, 1, 1, 1), *names, offload="memory.host_optimizer")
    glance = Quick(plan, world, machine).num_bytes(layout)
    exact = max(rank_bytes(layout.plan(plan, world), rank, world).peak for rank in range(world))
    assert 0.8 < glance / exact <= 1.0, f"{glance / exact:.3f} of {exact}"

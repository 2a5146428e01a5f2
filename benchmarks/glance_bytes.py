"""How far the bytes that a search sees at a glance are below those of a layout's own steps: 8 blocks of 1024 on 8 ranks."""

from __future__ import annotations

import argparse

from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Candidate, Layouts, Sizes
from sley_estimate.search.quick import Quick
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan

WORLD = 8
MODEL = {"use": "models.llama", "num_layers": 8, "hidden": 1024, "heads": 16, "vocab_size": 32_000}
DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 1024}
LAYOUTS = [  # pp, sp, wp, micro_size, and what the layout names
    ((1, 1, 1, 2), ("core.keep", "dp.bucketed")),
    ((1, 1, 1, 2), ("core.recompute", "dp.sharded")),
    ((1, 1, 1, 8), ("core.keep", "dp.sharded")),
    ((4, 1, 1, 2), ("pp.one_f_one_b", "core.keep", "dp.bucketed")),
    ((4, 1, 1, 2), ("pp.zero_bubble_v", "core.keep", "dp.sharded")),
    ((2, 1, 1, 2), ("pp.one_f_one_b", "core.recompute", "core.each")),
    ((1, 1, 8, 1), ("core.keep", "isp.communicator", "dp.bucketed")),
    ((1, 8, 1, 1), ("memory.selective", "dp.sharded")),
    ((4, 2, 1, 2), ("pp.interleaved", "core.keep", "dp.sharded")),
]


def plan_in(compute: str) -> Plan:
    """Returns the plan whose layouts are compared."""
    batch = {"global_size": 64, "micro_size": 1}
    return plan_from_dict(small_plan(model=MODEL, data=DATA, batch=batch, precision={"compute": compute}))


def with_names(plan: Plan, sizes: Sizes, names: set[str]) -> Candidate:
    """Returns the first layout of these sizes whose parts have these names, without offload."""
    space = Layouts(plan, WORLD, choices_of(plan))
    for shape in space.shapes():
        if shape.sizes == sizes and shape.offload is None:
            for layout in space.within(shape):
                parts = (layout.schedule, shape.activations, layout.reducer, shape.weights)
                if {part.name for part in parts if part} == names:
                    return layout
    raise AssertionError((sizes, names))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    types = ("bf16", "fp32")
    machine = machine_from_dict(small_machine(device__matmul={dtype: {"flops_per_s": 1e12} for dtype in types}))
    for compute in types:
        plan = plan_in(compute)
        quick = Quick(plan, WORLD, machine)
        for sizes, names in LAYOUTS:
            layout = with_names(plan, Sizes(*sizes), set(names))
            made, each = layout.plan(plan, WORLD), WORLD // sizes[0]
            fullest = max(
                (rank_bytes(made, stage * each, WORLD) for stage in range(sizes[0])), key=lambda one: one.peak
            )
            below = quick.num_bytes(layout) / fullest.peak - 1
            print(
                f"{compute} {sizes} {', '.join(names):<50} {fullest.peak / 2**20:7.0f} MiB {below:+7.1%}, "
                f"fullest at {fullest.place.entry}",
                flush=True,
            )


if __name__ == "__main__":
    main()

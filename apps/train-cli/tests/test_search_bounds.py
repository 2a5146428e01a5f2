"""No layout is faster than a search was told before it looked: else the fastest might be passed over."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import changed, small_plan

WORLD = 16
MODEL = {"use": "models.llama", "num_layers": 14, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn_hidden": 128}
PLAN = small_plan(
    data={"use": "data.text", "source": "python-stdlib", "sequence": 64},
    model=MODEL,
    batch={"global_size": 64, "micro_size": 1},
    precision={"compute": "fp32"},
)
LINKS: dict[str, dict[str, Any]] = {
    "fast": {"latency_s": 1e-5, "bandwidth": 1e10},
    "slow": {"latency_s": 1e-5, "bandwidth": 1e7},
    "late": {"latency_s": 1e-3, "bandwidth": 3e7},
    "half of it hidden": {"latency_s": 1e-4, "bandwidth": 1e8, "overlap": 0.5},
    "fast sums": {"latency_s": 1e-5, "bandwidth": 1e7, "overlap": 0.0, "sum": {"latency_s": 1e-5, "bandwidth": 1e10}},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("link", LINKS)
def test_no_layout_undercuts_its_bounds(link: str, seed: int) -> None:
    """Those of its shape, its own, and that by the critical paths of other layouts."""
    plan: Any = plan_from_dict(PLAN)
    links = {"links__same_host": LINKS[link], "links__ranks_per_host": WORLD}
    quick = Quick(plan, WORLD, machine_from_dict(small_machine(device__launch_s=1e-6, **links)))
    space = Layouts(plan, WORLD, choices_of(plan))
    every = [layout for shape in space.shapes() for layout in space.within(shape)]
    near = []
    for layout in random.Random(seed).sample(every, 150):
        try:
            bound_s, closer_s = quick.bound(layout).seconds, quick.closer_s(layout, look=True)
            seconds = quick.seconds(layout)
        except SleyError:
            continue
        assert quick.least(layout.shape).seconds <= seconds * (1 + 1e-9), layout
        assert bound_s <= seconds * (1 + 1e-9), layout
        assert closer_s <= seconds * (1 + 1e-9), layout
        near.append(max(bound_s, closer_s) > 0.8 * seconds)
    assert sum(near) > len(near) / 2 > 30, "else this says little"


def test_gathers_of_a_late_stage_run_while_it_waits_for_its_first_input() -> None:
    """They begin with the step. Both were counted, one after the other."""
    tables = changed(
        PLAN,
        model__num_layers=30,
        model__hidden=256,
        parallel={"pp": 8, "dp": 2},
        batch={"global_size": 4, "micro_size": 1},
        pipeline={"use": "pp.one_f_one_b"},
        partition={"use": "pp.explicit", "layers": [3, 3, 3, 3, 3, 3, 3, 11]},
        gradient_handlers=[{"use": "dp.sharded", "bucket_mb": 0.1}],
    )
    plan: Any = plan_from_dict(tables)
    links = {"links__same_host": {"latency_s": 1e-5, "bandwidth": 1e6}, "links__ranks_per_host": WORLD}
    quick = Quick(plan, WORLD, machine_from_dict(small_machine(device__launch_s=1e-6, **links)))
    keep = ("pp", "sp", "wp", "micro_size", "schedule", "reducer", "activations", "offload")
    space = Layouts(plan, WORLD, choices_of(plan), keep)
    (layout,) = [layout for shape in space.shapes() for layout in space.within(shape)]
    assert quick.bound(layout).seconds <= quick.seconds(layout)

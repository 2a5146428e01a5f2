"""What a search sees of the reducers' buckets at a glance is what `estimate` says of them, bucket by bucket."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan

SHAPE = {"use": "models.llama", "num_layers": 6, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128}


@pytest.mark.sample(3)
@pytest.mark.parametrize("use", ["dp.bucketed", "dp.sharded"])
@pytest.mark.parametrize(("bucket_mb", "overlap"), [(0.02, 1.0), (0.1, 0.0), (25.0, 1.0)])
def test_a_glance_counts_the_latency_of_each_bucket(use: str, bucket_mb: float, overlap: float) -> None:
    """It counted one sum per layer: a step of many buckets between hosts seemed a fifth shorter than it is."""
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 64}
    tables: dict[str, Any] = small_plan(
        data=data,
        model=SHAPE,
        batch={"global_size": 4, "micro_size": 1},
        precision={"compute": "fp32"},
        parallel={"dp": 4},
        gradient_handlers=[{"use": use, "bucket_mb": bucket_mb}],
    )
    plan = plan_from_dict(tables)
    link = {"latency_s": 1e-3, "bandwidth": 1e10, "overlap": overlap}
    machine = machine_from_dict(small_machine(device__launch_s=1e-6, links__same_host=link))
    keep = ("pp", "sp", "wp", "micro_size", "activations", "reducer", "offload")
    space = Layouts(plan, 4, choices_of(plan), keep)
    (layout,) = (one for shape in space.shapes() for one in space.within(shape))
    glance, estimate = Quick(plan, 4, machine).seconds(layout), estimate_seconds(plan, 4, machine).step.seconds
    assert glance == pytest.approx(estimate, rel=0.03)

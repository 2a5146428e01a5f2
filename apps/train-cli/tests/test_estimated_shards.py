"""Estimated bytes of `dp.sharded`: no weight is there twice at the start, and gloo takes memory for exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import fake_run, rank_bytes
from sley_testing.plans import changed, small_plan

PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 2, "hidden": 64, "heads": 4},
    batch={"global_size": 8, "micro_size": 1},
    precision={"compute": "fp32"},
    gradient_handlers=[{"use": "dp.sharded"}],
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_cpu_takes_memory_for_what_comes_from_peers(texts: Path, device: str) -> None:
    attached, by_messages = (
        rank_bytes(plan_from_dict(changed(PLAN, run__device=device, parallel=parallel), texts), 0, 8)
        for parallel in ({"dp": 8}, {"dp": 8, "cross_memory_attach": False})
    )
    assert attached.states == by_messages.states
    if device == "cpu":
        assert by_messages.peak > attached.peak
    else:
        assert by_messages.peak == attached.peak


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_the_start_has_no_weight_twice(texts: Path, compute: str) -> None:
    """Values as they were made and gradients, both fp32; beside them the bucket to which values move, and masters."""
    model = {"use": "models.llama", "num_layers": 8, "hidden": 64, "heads": 4}
    reducer = {"use": "dp.sharded", "bucket_mb": 0.1}
    tables = small_plan(model=model, precision={"compute": compute}, batch__global_size=16, gradient_handlers=[reducer])
    with fake_run(plan_from_dict(tables, texts), 0, 8) as (run, ledger, _):
        numel = sum(param.numel for param in run.registry)
        largest = max(buffer.num_bytes for buffer in run.parts.weights.buffers)
        peak, _ = ledger.peak()
    assert largest < 0.1 * 4 * numel
    assert 8 * numel <= peak < 9 * numel + largest  # and half a byte of masters, and padding

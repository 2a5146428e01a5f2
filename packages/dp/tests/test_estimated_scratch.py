"""What an exchange takes beside its tensors is estimated by what makes it: gloo takes memory, NCCL sums in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
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

"""On CUDA: the bits of `core.keep`, less device memory at the peak, and host memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_same_run, record

PLAN = small_plan(
    run__device="cuda",
    model={"factory": "attending:layers", "options": {"num_blocks": 8, "hidden": 512, "dropout": 0.1}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 512, "documents": "pack"},
    precision__compute="bf16",
)
POLICIES: dict[str, dict[str, Any]] = {
    "memory.host": {"use": "memory.host", "layers": 7},
    "memory.selective": {"use": "memory.selective"},
}


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("use", POLICIES)
def test_the_same_bits(own: Path, use: str) -> None:
    reference = record(PLAN, 4)
    assert_same_run(reference, record(changed(PLAN, activations=POLICIES[use]), 4))


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("use", POLICIES)
def test_less_is_held_at_the_peak(own: Path, use: str) -> None:
    peaks = []
    for policy in ({"use": "core.keep"}, POLICIES[use]):
        with World.alone("cuda") as world, assemble(plan_from_dict(changed(PLAN, activations=policy)), world) as run:
            for _ in range(3):
                run.step()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = run.counts.get("memory.host", {}).get("host_allocations")
            run.step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            assert run.counts.get("memory.host", {}).get("host_allocations") == made
    assert peaks[1] < 0.7 * peaks[0], peaks

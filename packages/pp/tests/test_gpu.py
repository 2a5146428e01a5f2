"""Stages on CUDA: the numbers of one process, with a device for each and on one that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity_of_parts, record

TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 64, "documents": "pack"}
PLAN = small_plan(run__device="cuda", model__num_layers=4, model__hidden=64, model__ffn_hidden=None, data=TEXT)


def staged(schedule: str, **changes: Any) -> dict[str, Any]:
    return changed(PLAN, pipeline={"use": schedule}, parallel={"pp": 2}, **changes)


@pytest.mark.parametrize("schedule", ["pp.one_f_one_b", "pp.zero_bubble_v"])
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_two_stages_equal_one_process(ranks: Any, schedule: str, num_devices: int) -> None:
    """By the host where they share a device, whose tensors gloo cannot send; by NCCL, with a device for each."""
    if num_devices == 1 and torch.cuda.device_count() > 1:
        pytest.skip("here each has its own")
    reference = record(changed(PLAN, model__tie_embeddings=True), 3)
    layouts = ranks(2, timeout_s=180, init=False)(record, staged(schedule, model__tie_embeddings=True), 3)
    assert_parity_of_parts(reference, layouts, PLAN["precision"]["compute"])

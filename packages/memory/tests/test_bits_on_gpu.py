"""On CUDA, whose copies run beside the steps: memory that left comes back with the bits of a run where all of it stayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import ALONE, LAYOUTS, assert_same
from parking import three_ways

from sley_testing.plans import changed, small_plan
from sley_testing.runs import WEIGHTS, alone, record

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

POLICIES = [{"use": "memory.host", "layers": 1}, {"use": "memory.selective"}]
ON_HOST = [{"use": "memory.host_optimizer", "bucket_mb": 0.004}]


def on_gpu(**changes: Any) -> dict[str, Any]:
    return small_plan(run__device="cuda", **changes)


@pytest.mark.parametrize("changes", ALONE.values(), ids=ALONE.keys())
def test_one_rank(changes: dict[str, Any], texts: Path) -> None:
    assert_same(*three_ways(on_gpu(**changes), texts))


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_on_one_device(ranks: Callable[..., Any], changes: dict[str, Any], texts: Path) -> None:
    tables = on_gpu(**changes, precision__compute="bf16")
    for found in ranks(2, timeout_s=180, init=False)(three_ways, tables, texts):
        assert_same(*found)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["use"])
def test_a_policy(policy: dict[str, Any], texts: Path) -> None:
    tables = on_gpu(precision__compute="bf16")
    wanted, found = (record(one, 5, folder=texts) for one in (tables, changed(tables, activations=policy)))
    assert [row["loss"] for row in wanted.rows] == [row["loss"] for row in found.rows]
    for name, weight in wanted.weights.items():
        assert torch.equal(weight, found.weights[name]), name


@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_an_optimizer_on_the_host_is_as_close_as_its_arithmetic(compute: str, texts: Path) -> None:
    """The processor rounds other than the device, and nothing else differs."""
    tables = on_gpu(precision__compute=compute)
    wanted = alone(tables, 5, folder=texts)
    found = record(changed(tables, offload=ON_HOST), 5, folder=texts)
    for name, weight in wanted.weights.items():
        error = float((weight.double() - found.weights[name].double()).norm() / weight.double().norm())
        assert error <= WEIGHTS[compute], (name, error)

"""Memory that moves between all steps, with copies in any order that the managers permit, changes no bit of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.testing.plans import Tables, changed, small_plan

PLAN = small_plan(model__num_layers=1, batch__micro_size=2, precision__compute="bf16")  # four micro-batches, masters
EVERYTHING = [{"use": "memory.everything", "bucket_mb": 0.004}]
GROUPS = [{"match": "*.attention.*", "lr": 1e-3}]
EACH = [
    {"use": f"memory.{part}", "bucket_mb": 0.004} for part in ("weights", "masters", "optimizer_states", "gradients")
]
BETWEEN = [
    {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01},
    {"use": "memory.everything", "parts": ["weights", "buffers", "masters", "gradients"], "bucket_mb": 0.004},
]
ON_HOST = [{"use": "memory.host_optimizer", "bucket_mb": 0.01}, {"use": "memory.weights"}]

ALONE: dict[str, tuple[Tables, list[Tables]]] = {
    "everything": (PLAN, EVERYTHING),
    "each part, two groups": (changed(PLAN, optimizer__groups=GROUPS), EACH),
    "between steps": (PLAN, BETWEEN),
    "between steps, fp32, two groups": (changed(PLAN, precision__compute="fp32", optimizer__groups=GROUPS), BETWEEN),
    "optimizer on the host": (PLAN, ON_HOST),
}
"""Plans of one process: without offload, and the tables that add it."""

REPLICAS = changed(PLAN, parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}], batch__micro_size=1)
STAGES = changed(PLAN, parallel={"pp": 2}, pipeline={"use": "pp.interleaved"}, model__num_layers=2)
SHARDS = changed(PLAN, parallel={"wp": 2}, weights={"use": "isp.communicator"}, batch__micro_size=1)

ON_TWO: dict[str, tuple[Tables, list[Tables], str]] = {
    "replicas": (REPLICAS, EVERYTHING, "sley_core"),
    "replicas, between steps": (REPLICAS, BETWEEN, "sley_core"),
    "interleaved stages": (STAGES, EVERYTHING, "sley_pp"),
    "interleaved stages, optimizer on the host": (STAGES, ON_HOST, "sley_pp"),
    "sharded weights": (SHARDS, EVERYTHING, "sley_isp"),
    "sharded weights, between steps": (SHARDS, BETWEEN, "sley_isp"),
}
"""Plans of two ranks, and the package that they need beside core."""

SAMPLE = range(2)
SAMPLE_ON_TWO = range(1)
BLOCKS = [range(start, start + 100) for start in range(0, 1000, 100)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("orders", [SAMPLE, *(pytest.param(block, marks=pytest.mark.campaign) for block in BLOCKS)])
def test_every_order_gives_the_same_bits(case: str, orders: range, train: Callable[..., str], texts: Path) -> None:
    tables, offload = ALONE[case]
    found = {train(changed(tables, offload=offload), texts, order) for order in orders}
    assert found == {train(tables, texts)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ON_TWO)
@pytest.mark.parametrize(
    "orders", [SAMPLE_ON_TWO, *(pytest.param(block, marks=pytest.mark.campaign) for block in BLOCKS)]
)
def test_every_order_gives_the_same_bits_on_two_ranks(
    case: str, orders: range, train_all: Callable[..., Any], ranks: Callable[..., Any], texts: Path
) -> None:
    """Each rank draws an order of its own, and moves what it likes."""
    tables, offload, package = ON_TWO[case]
    pytest.importorskip(package)
    for plain, moved in ranks(2, 60 + 30 * len(orders))(
        train_all, tables, changed(tables, offload=offload), texts, orders
    ):
        assert set(moved) == {plain}

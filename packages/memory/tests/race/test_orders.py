"""Tests that moves between all steps change no bit of a training, with copies in any permitted order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed, small_plan

PLAN = small_plan(model__num_layers=1, batch__micro_size=4, precision__compute="bf16")  # two microbatches, masters
EVERYTHING = {"offload": [{"use": "memory.everything", "bucket_mb": 0.004}]}
GROUPS = [{"match": "*.attention.*", "lr": 1e-3}]
EACH = {
    "offload": [
        {"use": f"memory.{part}", "bucket_mb": 0.004} for part in ("weights", "masters", "optimizer_states", "gradients")
    ]
}
BETWEEN = {
    "offload": [
        {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01},
        {"use": "memory.everything", "parts": ["weights", "buffers", "masters", "gradients"], "bucket_mb": 0.004},
    ]
}
ON_HOST = {"offload": [{"use": "memory.host_optimizer", "bucket_mb": 0.01}, {"use": "memory.weights"}]}
ACTIVATIONS_AWAY = {"activations": {"use": "memory.host", "min_bytes": 512}, **EVERYTHING}
ATTENTION_KEPT = {"activations": {"use": "memory.selective"}, **EVERYTHING}

SHARED = [{"use": "dp.sharded", "bucket_mb": 0.002}]

REPLICAS = changed(PLAN, parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}], batch__micro_size=2)
PARTS = changed(REPLICAS, gradient_handlers=SHARED)
STAGES = changed(PLAN, parallel={"pp": 2}, pipeline={"use": "pp.interleaved"}, model__num_layers=2, batch__micro_size=2)
SHARDS = changed(PLAN, parallel={"wp": 2}, weights={"use": "isp.communicator"}, batch__micro_size=2)

ON_TWO: dict[str, tuple[Tables, Tables]] = {
    "replicas": (REPLICAS, EVERYTHING),
    "replicas, between steps": (REPLICAS, BETWEEN),
    "replicas, each part, two groups": (changed(REPLICAS, optimizer__groups=GROUPS), EACH),
    "replicas, between steps, fp32, two groups": (
        changed(REPLICAS, precision__compute="fp32", optimizer__groups=GROUPS),
        BETWEEN,
    ),
    "replicas, attention kept": (changed(REPLICAS, model__num_layers=2), ATTENTION_KEPT),
    "shared optimizer": (PARTS, EVERYTHING),
    "shared optimizer, between steps": (PARTS, BETWEEN),
    "shared optimizer, optimizer on the host": (PARTS, ON_HOST),
    "interleaved stages": (STAGES, EVERYTHING),
    "interleaved stages, between steps": (STAGES, BETWEEN),
    "interleaved stages, optimizer on the host": (STAGES, ON_HOST),
    "sharded weights": (SHARDS, EVERYTHING),
    "sharded weights, between steps": (SHARDS, BETWEEN),
    "sharded weights, activations on the host": (SHARDS, ACTIVATIONS_AWAY),
}
"""Plans of two ranks: without offload, and the tables that add it. The contract of managers has one process."""

SAMPLE = range(1)
BLOCKS = [pytest.param(range(start, start + 20), marks=pytest.mark.campaign) for start in range(0, 100, 20)]
"""The campaign: 100 orders of each case."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ON_TWO)
@pytest.mark.parametrize("orders", [SAMPLE, *BLOCKS])
def test_every_order_gives_the_same_bits_on_two_ranks(
    case: str, orders: range, train_all: Callable[..., Any], ranks: Callable[..., Any], texts: Path
) -> None:
    """Each rank draws its own order and moves."""
    tables, moves = ON_TWO[case]
    for plain, moved in ranks(2, 60 + 30 * len(orders))(train_all, tables, changed(tables, **moves), texts, orders):
        assert set(moved) == {plain}

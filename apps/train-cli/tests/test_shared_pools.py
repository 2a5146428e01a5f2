"""One pool for sharded weights and for messages between stages: the same bits, no allocation after the first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import record

PLAN = small_plan(
    model__num_layers=2,
    model__vocab_size=257,
    batch__micro_size=1,
    parallel={"pp": 2, "dp": 2, "wp": 2},
    pipeline={"use": "pp.zero_bubble_h1"},
    weights={"use": "isp.communicator"},
    evaluation={"every": 2, "steps": 1},
)
SHARED = changed(
    PLAN,
    weights={"use": "isp.communicator", "pool": "common"},
    link={"use": "pp.link", "pool": "common"},
    pools={"common": {"use": "memory.size_classes", "per_doubling": 2}},
)


def watched(tables: Tables, folder: Path) -> tuple[Any, list[dict[str, float]], bool]:
    """What a run recorded of two steps; then, of four steps, the counts of the shared pool and whether it is shared."""
    recorded = record(tables, 2, folder=folder)
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        counts = []
        for _ in range(4):
            run.step()
            counts.append(run.counts["pools.common"])
        executor = run.stepper.executor
        one = executor.weights.pool is executor.crossing.link._pool is run.parts.pool("common")
        held = {tensor.untyped_storage().data_ptr() for _, tensor in run.parts.pool.held()}
        assert counts[-1]["lent_bytes"] == 0, "a lease outlived its step"
        assert run.parts.pool("common").trim() == counts[-1]["held_bytes"]
        return recorded, counts, one and len(held) > 4


@pytest.mark.timeout(300)
def test_weights_and_messages_share_a_pool(ranks: Any, texts: Path) -> None:
    alone = ranks(4, 180)(record, PLAN, 2, folder=texts)
    for apart, (together, counts, is_one) in zip(alone, ranks(4, 180)(watched, SHARED, texts), strict=True):
        assert is_one
        assert_same_bits(apart.weights, together.weights)
        assert counts[1]["allocations"] == counts[3]["allocations"] > 0
        assert counts[3]["hit_rate"] > 0.8

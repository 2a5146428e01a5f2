"""More exchanges under way than ranks can have offers open for each other: no plan makes them wait for one another."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from sley_cma import offers
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import can_read_peers
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")


def stepped(tables: dict[str, Any], folder: Any, ring: int) -> dict[str, Tensor]:
    """The weights after two steps of ranks that can have `ring` offers open; each gather is one, as every layer has a wait."""
    offers.RING = ring
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for layer in run.layers:
            run.before_layer(layer.name, lambda: None)
        for _ in range(2):
            run.step()
        return weights(run)


def test_more_than_can_be_open(ranks, sharded, texts):
    """64 reductions of modules and 40 gathers ahead, with four offers."""
    many = {"reductions": 64, "fused": False, "unit": "module", "ahead": 40}
    wanted = ranks(2, 40)(stepped, sharded(2, weights={"overlap": False}), texts, offers.RING)
    for one, found in zip(wanted, ranks(2, 40)(stepped, sharded(2, weights=many), texts, 4), strict=True):
        assert_same_bits(one, found)

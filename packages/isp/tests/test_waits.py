"""What a layer waits for costs nothing while there is nothing to wait for: shards are offered once per step, not per gather."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_cma.offers import Offers
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import can_read_peers
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")

Found = tuple[list[int], int, dict[str, Tensor]]


def offered(tables: dict[str, Any], folder: Any, kinds: list[str]) -> list[Found]:
    """For each kind of wait: the offers of weights in each step, how often a wait was called, and the weights after four.

    never: they know that nothing is due. block: one layer's shards are spoilt after each step, until its wait mends them.
    """
    found = []
    offer = Offers.offer
    for kind in kinds:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            steps, calls, kept = [], [0], {}

            def count(ring: Any, tensors: Any, mark: Any, *more: Any, steps: Any = steps) -> int:
                steps[-1] += "weights" in mark.what
                return offer(ring, tensors, mark, *more)

            @torch.no_grad()
            def bring(kept: Any = kept, calls: Any = calls) -> None:
                calls[0] += 1
                for param, value in kept.items():
                    param.parameter.data.copy_(value)  # as a collective writes: no version tells of it
                kept.clear()

            for layer in run.layers if kind != "none" else ():
                is_own = kind == "block" and layer.name == "blocks.1"
                is_due = partial(bool, kept if is_own else {})
                run.before_layer(layer.name, bring, None if kind == "always" else is_due)
            Offers.offer = count
            try:
                for _ in range(4):
                    steps.append(0)
                    run.step()
                    if kind == "block":
                        own = [param for param in run.registry if param.name.startswith("blocks.1.")]
                        kept |= {param: param.parameter.detach().clone() for param in own}
                        for param in own:
                            param.parameter.data.fill_(torch.nan)
                bring()
            finally:
                Offers.offer = offer
            found.append((steps, calls[0] - 1, weights(run)))
    return found


def test_shards_are_offered_once_where_nothing_is_due(ranks, sharded, texts):
    changes = {"batch": {"global_size": 4, "micro_size": 1}, "evaluation": {"every": 9, "steps": 1}, "run__steps": 9}
    changes["model__num_layers"] = 3
    kinds = ["none", "never", "block", "always"]
    for none, never, block, always in ranks(2, 120)(offered, sharded(2, **changes), texts, kinds):
        assert none[0] == never[0] == [1] * 4
        assert never[1] == 0, "nobody is called for weights that are there"
        assert block[0][0] == 1
        assert 2 <= block[0][1] < always[0][1], "those of the other layers stay one offer"
        assert block[1] == 3, "once in each step after the first"
        assert always[0][1] > 5
        for other in (never, block, always):
            assert_same_bits(none[2], other[2])

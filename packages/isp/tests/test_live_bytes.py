"""What is held at one time is what is counted: by live tensors, not by the counter alone."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.memory.pool import class_bytes
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import ATTACHES
from sley_testing.live_bytes import memory_profile, peak_bytes


def live(plans: list[dict[str, Any]], folder: Any) -> list[tuple[int, int]]:
    """Of each plan: tensor bytes alive at most, in its second step, and what its reductions say they held at most."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            run.step()
            run.parts.pool(None).trim()
            with memory_profile() as profile:
                run.step()
            found.append((peak_bytes(profile), run.stepper.executor.weights.reductions.max_live_bytes))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("attaches", ATTACHES)
def test_full_gradients_take_what_is_counted(ranks, sharded, texts, attaches):
    """Two more gradients of blocks on their way take what the counter says, and no byte more, by live tensors.

    By messages, what comes from the other rank is received beside each: half of it again. The two peaks need not fall on the
    same moment of a backward, so that a part of a block's activations may be missing from their difference.
    """
    wide = {"model__num_layers": 7, "model__hidden": 64, "model__ffn_hidden": 704, "activations": {"use": "core.recompute"}}
    changes = wide | {"parallel": {"cross_memory_attach": attaches}, "batch": {"global_size": 2, "micro_size": 1}}
    plans = [sharded(2, weights={"reductions": bound}, **changes) for bound in (4, 6)]
    whole = (4 * 64 * 64 + 3 * 64 * 704) * 8
    for (few, few_counted), (many, many_counted) in ranks(2, fresh=True)(live, plans, texts):
        counted = many_counted - few_counted
        print(f"{many - few} bytes alive for two more gradients of blocks, {counted} counted, {2 * whole} without scratch")
        assert counted == pytest.approx(2 * whole * (1.0 if attaches else 1.5), rel=0.02)
        assert 0.85 * counted < many - few < 1.02 * counted * class_bytes(whole) / whole

"""What stages hold at most, weighed with counts, is what going through their lists finds."""

from __future__ import annotations

from random import Random

import pytest

from sley_core.actions.action import loop, v
from sley_core.actions.costs import Costs
from sley_core.actions.lower import lower
from sley_core.actions.simulate import peaks_of
from sley_estimate.search.held import Held


def bytes_of(placement, chance):
    graphs, queues, handed = (
        tuple(chance.choice([0, 1, chance.randrange(10**12)]) for _ in range(placement.num_positions)) for _ in range(3)
    )
    return Costs({}, (0.0,) * (len(graphs) - 1), graphs, queues, handed[1:])


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("training", [True, False])
def test_counts_weigh_what_lists_hold(seed, training, any_lists):
    chance = Random(seed)
    placement, micros = chance.choice([loop(1), loop(3), loop(2, 3), v(4)]), chance.randint(1, 8)
    made = any_lists(placement, micros, chance)
    if not training:
        made = [[action for action in actions if action.kind == "F"] for actions in made]
    lowered = lower(made, placement, micros, training=training)
    held = Held(lowered, placement)
    for _ in range(4):
        costs = bytes_of(placement, chance)
        each = [peaks_of(steps, stage, placement, costs).num_bytes for stage, steps in enumerate(lowered)]
        assert held.most_bytes(costs) == each

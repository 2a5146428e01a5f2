"""Steps timed by the numbers of an outline are, to the bit, those of the programs that the same lists make."""

from __future__ import annotations

import random

import pytest

from sley_core.actions.action import Placement, loop, v
from sley_core.actions.lower import lower
from sley_core.errors import PlanError
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import Cost
from sley_estimate.seconds.outline import Outline
from sley_estimate.seconds.result import simulate_step, simulated_s
from sley_estimate.seconds.step import GradientExchange, StepWork
from sley_testing.lists import any_lists


def cost(rng, some):
    """Nothing, or seconds that often are alike: then many things happen at once."""
    return Cost(*rng.choices(some, k=3))


def drawn_exchanges(rng, stage, parts, placement, some):
    """Sums, and weights, of one layer or several; some of them begin at the end."""
    uses = [
        (chunk, at) for chunk in range(placement.chunks) for at in range(len(parts[placement.position(stage, chunk)]))
    ]
    found = []
    for _ in range(rng.randint(0, 5)):
        starts = rng.choice(["ready", "finish", "updated"])
        of = tuple(rng.sample(uses, rng.randint(1, len(uses))))
        lane = rng.choice(["reduce", "weights"])
        found.append(GradientExchange(cost(rng, some), starts, of, rng.randint(0, 1), lane))
    return found


def drawn_work(rng, placement, some):
    layers = [LayerSeconds(*(rng.choice(some) for _ in range(4))) for _ in range(3)]
    parts = [[rng.choice(layers) for _ in range(rng.randint(1, 3))] for _ in range(placement.num_positions)]
    stages = range(placement.stages)
    gradients = {stage: drawn_exchanges(rng, stage, parts, placement, some) for stage in stages if rng.random() < 0.8}
    if placement.stages > 1 and rng.random() < 0.5:
        both = tuple(sorted(rng.sample(stages, 2)))
        tie = GradientExchange(cost(rng, some), handler=2, lane="tie", members=both, key="tie")
        for stage in both:
            gradients[stage] = [*gradients.get(stage, []), tie]
    return StepWork(
        parts=parts,
        messages=[cost(rng, some) for _ in range(placement.num_positions - 1)],
        gradients=gradients,
        update_s={stage: rng.choice(some) for stage in stages},
        together=cost(rng, some),
        after_s=rng.choice(some),
    )


def drawn_placement(rng):
    free = [stage for stage in range(3) for _ in range(2)]
    rng.shuffle(free)
    return rng.choice([loop(1), loop(1, 2), loop(4), loop(3, 2), v(3), loop(2, 4), Placement(tuple(free))])


@pytest.mark.parametrize("seed", range(60))
def test_it_takes_as_long_as_the_programs_to_the_bit_whatever_it_was_filled_with_before(seed):
    rng = random.Random(seed)
    placement, micros = drawn_placement(rng), rng.randint(1, 9)
    lowered = lower(any_lists(placement, micros, rng), placement, micros)
    outline = Outline(lowered, placement)
    for some in ([0.0, 0.1, 0.3], [1.0, 2.0], [rng.random() for _ in range(50)], [0.0]):
        work = drawn_work(rng, placement, some)
        assert simulated_s(outline, work).hex() == float(simulate_step(lowered, placement, work).seconds).hex(), some


def test_a_step_that_comes_to_a_stop_is_refused_with_what_is_waited_for():
    placement = loop(2)
    lowered = lower(any_lists(placement, 2, random.Random(1)), placement, 2)
    tie = GradientExchange(Cost(0.0, 1.0), lane="tie", members=(0, 1), key="tie")
    work = StepWork([[LayerSeconds(1.0, 1.0, 1.0, 1.0)]] * 2, [Cost(0.0, 0.0)], {1: [tie]})
    with pytest.raises(PlanError, match=r"schedule-deadlock.*program 1 waits for tie"):
        simulated_s(Outline(lowered, placement), work)

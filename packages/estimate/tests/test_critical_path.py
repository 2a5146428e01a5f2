"""A critical path takes as long as its step where no messages meet on a link, and no step of the same lists is shorter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sley_core.actions.action import Placement, loop, v
from sley_core.actions.lower import lower
from sley_estimate.seconds.critical_path import critical_path, path_costs
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import Cost
from sley_estimate.seconds.outline import KINDS, Outline
from sley_estimate.seconds.result import simulated_s
from sley_estimate.seconds.step import GradientExchange, StepWork
from sley_testing.lists import any_lists

PLACEMENTS = [loop(1), loop(1, 2), loop(4), loop(3, 2), v(3), loop(2, 4), Placement((0, 2, 1, 1, 0, 2))]


def drawn(rng: random.Random, placement: Placement, *, is_alone: bool) -> StepWork:
    """A step without sums. is_alone: whether its messages take no link's time."""
    layers = [[LayerSeconds(*(rng.random() for _ in range(4)))] for _ in range(placement.num_positions)]
    between = range(placement.num_positions - 1)
    messages = [Cost(rng.random(), 0.0 if is_alone else rng.random(), rng.random() / 2) for _ in between]
    return StepWork(layers, messages)


def costs_of(work: StepWork, heads_s: np.ndarray | None = None, tails_s: np.ndarray | None = None) -> np.ndarray:
    nothing = np.zeros(len(work.parts))
    seconds = np.array([[part[0].of(kind) for part in work.parts] for kind in KINDS])
    return path_costs(
        seconds, work.messages, nothing if heads_s is None else heads_s, nothing if tails_s is None else tails_s
    )


@pytest.mark.parametrize("seed", range(40))
def test_it_takes_as_long_as_its_step_and_no_longer_than_any_other(seed: int) -> None:
    rng = random.Random(seed)
    placement, micros = rng.choice(PLACEMENTS), rng.randint(1, 9)
    outline = Outline(lower(any_lists(placement, micros, rng), placement, micros), placement)
    work = drawn(rng, placement, is_alone=True)
    path = critical_path(outline, costs_of(work))
    assert path @ costs_of(work) == pytest.approx(simulated_s(outline, work))
    for is_alone in (True, False, False):
        other = drawn(rng, placement, is_alone=is_alone)
        assert path @ costs_of(other) <= simulated_s(outline, other) * (1 + 1e-9)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_before_a_first_forward_or_behind_the_last_gradients_is_on_it(is_first: bool) -> None:
    """As gathers and sums of one layer, of which a step takes ten times as long as it computes."""
    rng = random.Random(5)
    placement = loop(3, 2)
    outline = Outline(lower(any_lists(placement, 4, rng), placement, 4), placement)
    for position in range(placement.num_positions):
        work = drawn(rng, placement, is_alone=True)
        holder = placement.holder(position)
        starts = "updated" if is_first else "ready"
        exchange = GradientExchange(Cost(1000.0, 0.0), starts, ((holder.chunk, 0),))
        around = np.zeros(placement.num_positions)
        around[position] = 1000.0
        costs = costs_of(work, around) if is_first else costs_of(work, None, around)
        path = critical_path(outline, costs)
        exchanged = replace(work, gradients={holder.stage: [exchange]})
        assert path @ costs == pytest.approx(simulated_s(outline, exchanged))
        assert path @ costs > 1000.0

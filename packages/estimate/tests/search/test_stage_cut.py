"""Sums over positions and stages are those of going through the layers, one row at a time or many."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sley_core.actions.action import Placement, loop, v
from sley_estimate.search.stage_cut import ModelParts


def drawn_parts(rng):
    placement = rng.choice([loop(1), loop(1, 3), loop(5), loop(3, 4), v(4), Placement((1, 0, 0, 2, 1, 2))])
    bounds = [0]
    for _ in range(placement.num_positions):
        bounds.append(bounds[-1] + rng.randint(1, 12))
    return ModelParts(tuple(bounds), placement)


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_those_of_the_layers(seed):
    rng = random.Random(seed)
    parts = drawn_parts(rng)
    rows = np.array([[rng.randrange(10**9) for _ in range(parts.bounds[-1])] for _ in range(3)])
    by_position, by_stage = parts.by_position(rows), parts.by_stage(rows)
    for row, at_positions, at_stages in zip(rows, by_position, by_stage, strict=True):
        stages = range(parts.placement.stages)
        each = [sum(sum(row[first:last]) for first, last in parts.of_stage(stage)) for stage in stages]
        assert at_stages.tolist() == each
        assert sum(at_positions) == sum(each)
    firsts = [parts.placement.route.index(stage) for stage in range(parts.placement.stages)]
    assert parts.firsts.tolist() == firsts


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_summed_together_have_the_bits_of_each_alone(seed):
    rng = random.Random(seed)
    parts = drawn_parts(rng)
    rows = np.array([[rng.random() for _ in range(parts.bounds[-1])] for _ in range(4)])
    together = parts.by_stage(rows)
    for row, found in zip(rows, together, strict=True):
        assert parts.by_stage(row).tobytes() == found.tobytes()

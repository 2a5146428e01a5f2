"""Tests that partitions have every layer once, no empty position, and a heaviest position as light as possible."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.errors import PlanError
from sley_pp.config import BalancedConfig, ExplicitConfig, UniformConfig
from sley_pp.partitioners import balanced, build_balanced, build_explicit, build_uniform, explicit, uniform

COSTS = st.lists(st.one_of(st.just(0), st.integers(0, 6), st.floats(0, 10)), min_size=1, max_size=12)


def loads(boundaries, costs) -> list[float]:
    return [sum(costs[first:end]) for first, end in pairwise(boundaries)]


def is_cut(boundaries, num_layers, num_positions) -> bool:
    ends = boundaries[0] == 0 and boundaries[-1] == num_layers
    return ends and len(boundaries) == num_positions + 1 and all(a < b for a, b in pairwise(boundaries))


def all_cuts(num_layers, num_positions):
    for inner in combinations(range(1, num_layers), num_positions - 1):
        yield (0, *inner, num_layers)


@given(COSTS, st.data())
@settings(max_examples=200, deadline=None)
def test_the_heaviest_position_is_that_of_the_best_cut(costs, data):
    num_positions = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, num_positions)
    assert is_cut(found, len(costs), num_positions)
    best = min(max(loads(cut, costs)) for cut in all_cuts(len(costs), num_positions))
    assert max(loads(found, costs)) == pytest.approx(best, rel=1e-12, abs=1e-12)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
@settings(max_examples=100, deadline=None)
def test_the_cut_is_the_most_even_of_the_best(costs, data):
    num_positions = data.draw(st.integers(1, len(costs)))
    found = loads(balanced(costs, num_positions), costs)
    cuts = [loads(cut, costs) for cut in all_cuts(len(costs), num_positions)]
    best = min((max(cut), sum(load * load for load in cut)) for cut in cuts)
    assert (max(found), sum(load * load for load in found)) == best


def test_a_thousand_layers_are_cut_fast():
    costs = [1 + (layer * 7919) % 13 for layer in range(1000)]
    start_s = time.process_time()
    assert is_cut(balanced(costs, 64), 1000, 64)
    assert time.process_time() - start_s < 5


@given(st.integers(1, 40), st.integers(1, 40))
def test_uniform_positions_differ_by_one_layer_and_the_ends_are_small(num_layers, num_positions):
    if num_layers < num_positions:
        num_layers, num_positions = num_positions, num_layers
    found = uniform(num_layers, num_positions)
    sizes = [end - first for first, end in pairwise(found)]
    assert is_cut(found, num_layers, num_positions)
    assert max(sizes) - min(sizes) <= 1
    if num_layers % num_positions < num_positions - 1:
        assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("layers", "code", "words"),
    [
        ([3, 3, 3, 1], "partition-length", "`layers` must have 3 numbers .* but has 4"),
        ([3, 2, 3], "partition-layers", "must add up to the model's 9 layers, but adds up to 8"),
        ([3, 0, 6], "partition-empty", "part 1 has no layer"),
    ],
)
def test_a_wrong_explicit_cut_is_refused(layers, code, words):
    with pytest.raises(PlanError, match=words) as caught:
        explicit(layers, 9, 3)
    assert caught.value.diagnostics[0].code == code


@pytest.mark.parametrize("cut", [build_uniform(UniformConfig()), build_balanced(BalancedConfig())])
@pytest.mark.parametrize("num_layers", [0, 3])
def test_fewer_layers_than_positions_are_refused(cut, num_layers):
    with pytest.raises(PlanError, match=f"{num_layers} layers cannot be cut into 4 parts") as caught:
        cut([1.0] * num_layers, 4)
    assert caught.value.diagnostics[0].code == "partition-empty"


def test_builders_use_their_tables():
    assert build_uniform(UniformConfig())([9, 1, 1, 1], 2) == (0, 2, 4)
    assert build_balanced(BalancedConfig())([9, 1, 1, 1], 2) == (0, 1, 4)
    assert build_balanced(BalancedConfig(layer_costs=(1.0, 1.0, 1.0, 9.0)))([9, 1, 1, 1], 2) == (0, 3, 4)
    assert build_explicit(ExplicitConfig(layers=(3, 1)))([9, 1, 1, 1], 2) == (0, 3, 4)
    with pytest.raises(PlanError, match="`layer_costs` must have one number for each of the 4 layers, but has 1"):
        build_balanced(BalancedConfig(layer_costs=(1.0,)))([9, 1, 1, 1], 2)

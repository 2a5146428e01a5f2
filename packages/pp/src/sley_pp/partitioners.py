"""Cuts a list of layers into the positions of a pipeline: `(costs, num_positions) -> boundaries`. Pure; imports no torch.

With the boundaries (0, 3, 5, 9), position 0 has the layers 0 1 2, position 1 has 3 4, and position 2 has 5 6 7 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from sley_core.errors import PlanError
from sley_pp.config import BalancedConfig, ExplicitConfig, MeasuredConfig, UniformConfig

Boundaries = tuple[int, ...]
"""`num_positions + 1` ascending numbers from 0 to the number of layers; every position has a layer or more."""


def check_enough(num_layers: int, num_positions: int) -> None:
    """Raises PlanError "partition-empty" if there are fewer layers than positions."""
    if num_layers < num_positions:
        message = f"{num_layers} layers cannot be cut into {num_positions} parts, as each needs a layer"
        hint = f"use at most {num_layers} stages x chunks" if num_layers else "the model has no layers"
        raise PlanError("partition-empty", message, path=("parallel", "pp"), hint=hint)


def uniform(num_layers: int, num_positions: int) -> Boundaries:
    """Returns boundaries of positions whose numbers of layers differ by at most one. The larger ones lie in the middle.

    The first and last layers, embedding and head, usually cost more than a block, so the ends are kept small. Raises
    PlanError "partition-empty" if there are fewer layers than positions.
    """
    check_enough(num_layers, num_positions)
    size, larger = divmod(num_layers, num_positions)
    first = (num_positions - larger) // 2
    boundaries = [0]
    for position in range(num_positions):
        boundaries.append(boundaries[-1] + size + (first <= position < first + larger))
    return tuple(boundaries)


PATH = ("partition", "layers")


def explicit(layers: Sequence[int], num_layers: int, num_positions: int) -> Boundaries:
    """Returns the boundaries in which position i has `layers[i]` layers.

    Raises PlanError: "partition-length" if there are not as many numbers as positions, "partition-layers" if their sum
    is not the model's number of layers, "partition-empty" for a position without one.
    """
    if len(layers) != num_positions:
        message = f"`layers` has {len(layers)} numbers, but there are {num_positions} parts (stages x chunks)"
        raise PlanError("partition-length", message, path=PATH)
    if min(layers) < 1:
        raise PlanError("partition-empty", f"part {layers.index(min(layers))} has no layer", path=PATH)
    if sum(layers) != num_layers:
        message = f"`layers` adds up to {sum(layers)}, but the model has {num_layers} layers"
        raise PlanError("partition-layers", message, path=PATH)
    return (0, *accumulate(layers))


def balanced(costs: Sequence[float], num_positions: int) -> Boundaries:
    """Returns the boundaries with the lightest heaviest position; among equal ones, the most even.

    costs: one per layer, none negative. Raises PlanError "partition-empty" if there are fewer layers than positions.

    For k positions over the first n layers, lightest(k, n) = min over m of max(lightest(k - 1, m), cost of layers m .. n - 1).
    As m grows one term rises and the other falls, so the best m is where they cross, and it only increases with n: the whole
    table takes O(layers x positions).

    Many cuts have the same lightest maximum. Among them this takes one with the least sum of squares, so that the other
    positions are even too: a second table, over cuts in which no position is heavier than the first table allows.
    """
    check_enough(len(costs), num_positions)
    before = [0.0, *accumulate(costs)]
    return _most_even(before, num_positions, _lightest_maximum(before, num_positions))


def _lightest_maximum(before: Sequence[float], num_positions: int) -> float:
    """Returns the cost of the heaviest position of the best cut. before: prefix sums of the layers' costs, [layers + 1]."""
    num_layers = len(before) - 1
    row = list(before)
    for done in range(1, num_positions):
        following = [inf] * (num_layers + 1)
        cut = done
        for end in range(done + 1, num_layers + 1):
            while cut + 1 < end and row[cut] < before[end] - before[cut]:
                cut += 1
            # The crossing lies between the last two cuts looked at.
            following[end] = min(max(row[at], before[end] - before[at]) for at in (cut, cut - 1) if at >= done)
        row = following
    return row[num_layers]


def _most_even(before: Sequence[float], num_positions: int, most: float) -> Boundaries:
    """Returns the cut with the least sum of squares among those in which no position costs more than `most`."""
    num_layers = len(before) - 1
    squares = [0.0] + [inf] * num_layers
    begins: list[list[int]] = []
    for done in range(num_positions):
        following, begin = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(done + 1, num_layers + 1):
            for first in range(end - 1, done - 1, -1):
                load = before[end] - before[first]
                if load > most:
                    break
                if squares[first] + load * load < following[end]:
                    following[end], begin[end] = squares[first] + load * load, first
        squares = following
        begins.append(begin)
    boundaries = [num_layers]
    for begin in reversed(begins):
        boundaries.append(begin[boundaries[-1]])
    return tuple(reversed(boundaries))


Partition = Callable[[Sequence[float], int], Boundaries]


def build_uniform(config: UniformConfig) -> Partition:
    """Returns the partitioner with equal numbers of layers."""
    return lambda costs, num_positions: uniform(len(costs), num_positions)


def build_balanced(config: BalancedConfig | MeasuredConfig) -> Partition:
    """Returns the partitioner by the table's costs, or else by those given.

    It raises PlanError "partition-length" if the table does not have one cost per layer.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        own = config.layer_costs
        if own is not None and len(own) != len(costs):
            message = f"`layer_costs` has {len(own)} numbers, but the model has {len(costs)} layers"
            raise PlanError("partition-length", message, path=("partition", "layer_costs"))
        return balanced(costs if own is None else own, num_positions)

    return partition


def build_explicit(config: ExplicitConfig) -> Partition:
    """Returns the partitioner with the numbers of layers in the plan."""
    return lambda costs, num_positions: explicit(config.layers, len(costs), num_positions)

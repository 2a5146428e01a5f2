"""Partitioners, which split layers into the positions of a pipeline: `(costs, num_positions) -> boundaries`. Imports no torch.

A position is one chunk of the model; each stage holds one or more. With the boundaries (0, 3, 5, 9), position 0 has the layers
0 1 2, position 1 has 3 4, and position 2 has 5 6 7 8.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from math import inf

from sley_core.errors import PlanError
from sley_pp.plugin import BalancedConfig, ExplicitConfig, MeasuredConfig, UniformConfig

Boundaries = tuple[int, ...]
"""`num_positions + 1` strictly ascending numbers from 0 to the number of layers."""


def check_num_layers(num_layers: int, num_positions: int) -> None:
    """Raises PlanError "partition-empty" if there are fewer layers than positions."""
    if num_layers < num_positions:
        message = f"{num_layers} layers cannot be split into {num_positions} chunks, since each chunk needs a layer"
        hint = f"use at most {num_layers} stages x chunks" if num_layers else "use a model with layers"
        raise PlanError("partition-empty", message, path=("parallel", "pp"), hint=hint)


def uniform_boundaries(num_layers: int, num_positions: int) -> Boundaries:
    """Returns boundaries that give all positions the same number of layers, or to some in the middle one layer more.

    The first and last positions are the smaller ones, since embedding and head usually cost more than a block. Raises PlanError
    "partition-empty" if there are fewer layers than positions.
    """
    check_num_layers(num_layers, num_positions)
    size, num_larger = divmod(num_layers, num_positions)
    first_larger = (num_positions - num_larger) // 2
    boundaries = [0]
    for position in range(num_positions):
        boundaries.append(boundaries[-1] + size + (first_larger <= position < first_larger + num_larger))
    return tuple(boundaries)


def balanced_boundaries(costs: Sequence[float], num_positions: int) -> Boundaries:
    """Returns the boundaries that minimise the cost of the most expensive position.

    costs: a non-negative cost per layer. Among all such boundaries, returns those with the least sum of squared costs, so that
    the other positions are balanced too. Raises PlanError "partition-empty" if there are fewer layers than positions.
    """
    check_num_layers(len(costs), num_positions)
    prefix_sums = [0.0, *accumulate(costs)]
    return _most_even_boundaries(prefix_sums, num_positions, _minimal_maximum(prefix_sums, num_positions))


def _minimal_maximum(prefix_sums: Sequence[float], num_positions: int) -> float:
    """Returns the least possible cost of the most expensive position. prefix_sums: costs of the first 0, 1, ... layers."""

    def fits(limit: float) -> bool:
        """Returns whether the layers fit into the positions if no position costs more than `limit`."""
        start, num_used = 0.0, 1
        for previous, total in pairwise(prefix_sums):
            if total - start > limit:
                start, num_used = previous, num_used + 1
        return num_used <= num_positions

    largest = max(end - start for start, end in pairwise(prefix_sums))
    limits = sorted({end - start for start, end in combinations(prefix_sums, 2) if end - start >= largest})
    return limits[bisect_left(limits, True, key=fits)]


def _most_even_boundaries(prefix_sums: Sequence[float], num_positions: int, max_cost: float) -> Boundaries:
    """Returns the boundaries with the least sum of squared costs for which no position costs more than `max_cost`."""
    num_layers = len(prefix_sums) - 1
    squares = [0.0] + [inf] * num_layers
    all_starts: list[list[int]] = []
    for position in range(num_positions):
        next_squares, starts = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(position + 1, num_layers + 1):
            for start in range(end - 1, position - 1, -1):
                cost = prefix_sums[end] - prefix_sums[start]
                if cost > max_cost:
                    break
                if squares[start] + cost * cost < next_squares[end]:
                    next_squares[end], starts[end] = squares[start] + cost * cost, start
        squares = next_squares
        all_starts.append(starts)
    boundaries = [num_layers]
    for starts in reversed(all_starts):
        boundaries.append(starts[boundaries[-1]])
    return tuple(reversed(boundaries))


Partition = Callable[[Sequence[float], int], Boundaries]
"""A function `(costs, num_positions) -> boundaries`, where `costs` has one number per layer."""


def build_uniform(config: UniformConfig) -> Partition:
    """Returns a partitioner that gives all positions numbers of layers that differ by at most one."""
    return lambda costs, num_positions: uniform_boundaries(len(costs), num_positions)


def build_balanced(config: BalancedConfig | MeasuredConfig) -> Partition:
    """Returns a partitioner that balances the table's `layer_costs`, or its argument `costs` if the table has none.

    The partitioner raises PlanError "partition-length" if `layer_costs` does not have one number per layer, and
    "partition-empty" if there are fewer layers than positions.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        layer_costs = costs if config.layer_costs is None else config.layer_costs
        if len(layer_costs) != len(costs):
            message = f"`layer_costs` must have one number for each of the {len(costs)} layers, but has {len(layer_costs)}"
            raise PlanError("partition-length", message, path=("partition", "layer_costs"))
        return balanced_boundaries(layer_costs, num_positions)

    return partition


def build_explicit(config: ExplicitConfig) -> Partition:
    """Returns a partitioner that gives position i `config.layers[i]` layers.

    The partitioner raises PlanError "partition-length" if `config.layers` does not have one number per position, and
    "partition-layers" if the numbers do not add up to the number of layers.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        layers, path = config.layers, ("partition", "layers")
        if len(layers) != num_positions:
            message = f"`layers` must have {num_positions} numbers (stages x chunks), but has {len(layers)}"
            raise PlanError("partition-length", message, path=path)
        if sum(layers) != len(costs):
            message = f"`layers` must add up to the model's {len(costs)} layers, but adds up to {sum(layers)}"
            raise PlanError("partition-layers", message, path=path)
        return (0, *accumulate(layers))

    return partition

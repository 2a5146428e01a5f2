"""Makes the heaviest position as light as possible: exact, by dynamic programming over where the last position begins.

For k positions over the first n layers, lightest(k, n) = min over m of max(lightest(k - 1, m), cost of layers m .. n - 1). As m
grows one term rises and the other falls, so the best m is where they cross, and it only increases with n: the whole table takes
O(layers x positions).

Many cuts have the same lightest maximum. Among them this takes one with the least sum of squares, so that the other positions
are even too: a second table, over cuts in which no position is heavier than the first table allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from sley_pp.partition.boundaries import Boundaries, check_enough


def balanced(costs: Sequence[float], num_positions: int) -> Boundaries:
    """Returns the boundaries with the lightest heaviest position; among equal ones, the most even.

    costs: one per layer, none negative. Raises PlanError "partition-empty" if there are fewer layers than positions.
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

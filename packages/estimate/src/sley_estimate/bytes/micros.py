"""Finds how many micro-batches show a step's peak: a step of a thousand holds no more at once than one of a few."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sley_core.actions.simulate import Costs, Peaks, peaks_of
from sley_core.errors import SleyError

if TYPE_CHECKING:
    from sley_core.engine.stage import Lists

LEAST = 3
"""The first, those in between, the last: gradients come with the first, and are reduced with the last."""

LEAST_BETWEEN_STAGES = 12
"""A link may have eight messages under way that nobody waits for, while one is written, one is used and one is expected."""


def fewest_micros(lists: Lists, num_micros: int) -> int:
    """Returns the smallest number of micro-batches with which this stage's list has the same peaks as with `num_micros`: of
    pairs in flight, graphs, receives, and of all three together. At least 3, or 12 where the model is cut into several parts;
    `num_micros` if it is less, or no smaller number will do.
    """
    wanted = _peaks(lists, num_micros)
    least = LEAST if lists.placement.num_positions == 1 else LEAST_BETWEEN_STAGES
    for fewer in range(least, num_micros):
        try:
            if _peaks(lists, fewer) == wanted:
                return fewer
        except SleyError:
            continue  # the schedule has no list for so many
    return num_micros


def least_micros(lists: Lists, num_micros: int) -> int:
    """Returns the smallest number of micro-batches, up to `num_micros`, for which the schedule has a list."""
    for fewer in range(1, num_micros):
        try:
            lists.training(fewer)
        except SleyError:
            continue
        return fewer
    return num_micros


def _peaks(lists: Lists, num_micros: int) -> Peaks:
    """Returns the most that this stage's list with `num_micros` micro-batches holds at once, of each kind and
    of all together.
    """
    positions = lists.placement.num_positions
    # A graph, a deferred weight gradient and a message of sizes whose sums do not meet.
    costs = replace(
        Costs.even(positions),
        graph_bytes=(1009,) * positions,
        queued_bytes=(499,) * positions,
        boundary_bytes=(11,) * (positions - 1),
    )
    return peaks_of(lists.training(num_micros), lists.stage, lists.placement, costs)

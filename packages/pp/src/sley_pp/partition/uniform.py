"""Cuts into equal numbers of layers, for models of equal blocks."""

from __future__ import annotations

from sley_pp.partition.boundaries import Boundaries, check_enough


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

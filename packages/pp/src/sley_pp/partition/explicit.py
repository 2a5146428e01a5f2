"""Cuts as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sley_core.errors import PlanError
from sley_pp.partition.boundaries import Boundaries

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

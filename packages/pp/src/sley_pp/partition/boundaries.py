"""The form of a partition: the first layer of each position, and the end of the last one.

With the boundaries (0, 3, 5, 9), position 0 has the layers 0 1 2, position 1 has 3 4, and position 2 has 5 6 7 8.
"""

from __future__ import annotations

from sley_core.errors import PlanError

Boundaries = tuple[int, ...]
"""`num_positions + 1` ascending numbers from 0 to the number of layers; every position has a layer or more."""


def check_enough(num_layers: int, num_positions: int) -> None:
    """Raises PlanError "partition-empty" if there are fewer layers than positions."""
    if num_layers < num_positions:
        message = f"{num_layers} layers cannot be cut into {num_positions} parts, as each needs a layer"
        hint = f"use at most {num_layers} stages x chunks" if num_layers else "the model has no layers"
        raise PlanError("partition-empty", message, path=("parallel", "pp"), hint=hint)

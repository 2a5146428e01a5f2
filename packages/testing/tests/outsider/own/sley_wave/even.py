"""Equal numbers of layers for each part of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sley_core.errors import PlanError
from sley_wave.config import EvenConfig


def build(config: EvenConfig) -> Callable[[Sequence[float], int], tuple[int, ...]]:
    return even


def even(costs: Sequence[float], num_positions: int) -> tuple[int, ...]:
    if len(costs) < num_positions:
        message = f"{len(costs)} layers cannot be split into {num_positions} parts"
        raise PlanError("partition-empty", message, path=("parallel", "pp"))
    return tuple(len(costs) * at // num_positions for at in range(num_positions + 1))

"""The table of `topk.reducer` in a plan."""

from __future__ import annotations

from math import sqrt
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from sley_core.api.plan import Table


class TopKConfig(Table):
    """`topk.reducer`: sends the largest elements of each gradient, and the other elements in later steps."""

    ratio: Annotated[PositiveFloat, Field(le=1.0)] = 0.01
    """Share of a gradient's elements that a rank sends in a step, at least one element. With 1.0 sums are exact."""

    min_numel: NonNegativeInt = 1024
    """Smaller gradients have exact sums: norms and biases are sensitive and small."""


def compute_tolerance(config: TopKConfig) -> float:
    """Returns the maximum relative norm of omitted elements: the largest elements have at least their share of the square."""
    return sqrt(1.0 - config.ratio)

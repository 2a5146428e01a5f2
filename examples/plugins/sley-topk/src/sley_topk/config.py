"""The table of `topk.reducer` in a plan."""

from __future__ import annotations

from math import sqrt
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from sley_core.api.plan import Table


class TopKConfig(Table):
    """`topk.reducer`: of each gradient the largest elements travel now, and the others when they have grown."""

    ratio: Annotated[PositiveFloat, Field(le=1.0)] = 0.01
    """Share of a gradient's elements that a rank sends in a step; at least one. With 1.0 sums are exact."""

    min_numel: NonNegativeInt = 1024
    """Smaller gradients are summed whole: norms and biases are sensitive, and cost nothing."""


def compute_tolerance(config: TopKConfig) -> float:
    """Returns how much of a gradient may be left out, relative: the largest have their share of its square, or more."""
    return sqrt(1.0 - config.ratio)

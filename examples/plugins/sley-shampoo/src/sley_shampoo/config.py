"""The table of `shampoo.optimizer` in a plan."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import OptimizerConfig


class ShampooConfig(OptimizerConfig):
    """`shampoo.optimizer`: a gradient that is preconditioned along each dim (Gupta, Koren and Singer, 2018)."""

    momentum: float = 0.9
    """The momentum of the preconditioned gradient."""

    eps: PositiveFloat = 1e-4
    """The multiple of the identity with which each statistic starts."""

    every: PositiveInt = 1
    """The number of steps between two computations of the inverse roots."""

"""Defines the table and the record of `shampoo.optimizer`. Imports no torch, since plan checks import it."""

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import OptimizerConfig
from sley_core.hookspecs import hookimpl
from sley_core.records import OptimizerRecord


class ShampooConfig(OptimizerConfig):
    """`shampoo.optimizer`: a gradient that is preconditioned along each dim (Gupta, Koren and Singer, 2018)."""

    momentum: float = 0.9
    """The momentum of the preconditioned gradient."""

    eps: PositiveFloat = 1e-4
    """The multiple of the identity with which each statistic starts."""

    every: PositiveInt = 1
    """The number of steps between two computations of the inverse roots."""


@hookimpl
def sley_records() -> list[OptimizerRecord]:
    return [OptimizerRecord(name="optimizer", config=ShampooConfig, build="sley_shampoo.optimizer:build", scope="per_matrix")]

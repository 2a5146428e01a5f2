"""Builds partitioners from config tables: `(costs, num_positions) -> boundaries`, with the costs that the record declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sley_core.errors import PlanError
from sley_pp.config import BalancedConfig, ExplicitConfig, MeasuredConfig, UniformConfig
from sley_pp.partition.balanced import balanced
from sley_pp.partition.boundaries import Boundaries
from sley_pp.partition.explicit import explicit
from sley_pp.partition.uniform import uniform

Partition = Callable[[Sequence[float], int], Boundaries]


def build_uniform(config: UniformConfig) -> Partition:
    """Returns the partitioner with equal numbers of layers."""
    return lambda costs, num_positions: uniform(len(costs), num_positions)


def build_balanced(config: BalancedConfig | MeasuredConfig) -> Partition:
    """Returns the partitioner by the table's costs, or else by those given.

    It raises PlanError "partition-length" if the table does not have one cost per layer.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        own = config.layer_costs
        if own is not None and len(own) != len(costs):
            message = f"`layer_costs` has {len(own)} numbers, but the model has {len(costs)} layers"
            raise PlanError("partition-length", message, path=("partition", "layer_costs"))
        return balanced(costs if own is None else own, num_positions)

    return partition


def build_explicit(config: ExplicitConfig) -> Partition:
    """Returns the partitioner with the numbers of layers in the plan."""
    return lambda costs, num_positions: explicit(config.layers, len(costs), num_positions)

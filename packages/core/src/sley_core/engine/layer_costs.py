"""What each layer costs, so that a pipeline's parts can be cut evenly: its parameters, or the seconds that it takes.

Seconds are those of the first rank, which tells the others: one cut, on every rank. A layer is timed alone (`layer_bench.py`),
on one micro-batch of the plan's data and on the run's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.layer_bench import Handed, LayerBench
from sley_core.records import PartitionerRecord

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import DataInfo
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

DIGITS = 6
"""Decimals of the seconds: what the plan of the run's folder holds is exactly what the layers were cut by."""


def by_parameters(model: Model) -> list[float]:
    """Returns the number of parameters of each layer; one that several layers hold counts in each of them."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def are_timed(plan: Plan) -> bool:
    """Whether the plan's partition wants seconds and has none yet."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return False
    return plan.partition.record.costs == "seconds" and plan.partition.config.layer_costs is None


def timed(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the seconds of each layer, equal on every rank; a blocking collective of start-up.

    draft: makes the model on meta; only the first rank calls it. dtype: of the working weights.
    """

    def measure() -> list[float]:
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        with world.device.random_state_kept():
            bench = LayerBench(plan, world.device, draft(dataset.info), dataset, dtype)
            return _seconds(bench)

    return world.from_first(measure, "time the layers")


def _seconds(bench: LayerBench) -> list[float]:
    """Returns the medians of each layer's forward and backward together, in order; each gets the output of the one before."""
    found = []
    value: Handed | None = None
    for layer in bench.model.layers:
        times, value = bench.time(layer, value)
        found.append(round(times.forward + times.backward, DIGITS))
    return found

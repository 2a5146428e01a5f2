"""What each layer costs, for cutting a pipeline into even parts: its number of parameters, or its seconds.

Seconds are measured by the first rank, which sends them to the others, so that all ranks cut alike. A layer is timed alone
(`layer_bench.py`), on one micro-batch of the plan's data and on the run's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.layer_bench import LayerBench
from sley_core.engine.layer_calls import Handed
from sley_core.records import PartitionerRecord

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import DataInfo
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

DIGITS = 6
"""Decimals to which seconds are rounded, so that the resolved plan holds exactly the numbers by which the layers were cut."""


def by_parameters(model: Model) -> list[float]:
    """Returns the number of parameters of each layer; a tied parameter counts in each layer that holds it."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def are_timed(plan: Plan) -> bool:
    """Returns whether the plan's partition needs the layers' seconds and the plan does not have them yet."""
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
    """Times each layer in order, on the output of the one before; returns the seconds of forward and backward together."""
    found = []
    value: Handed | None = None
    for layer in bench.model.layers:
        times, value = bench.time(layer, value)
        found.append(round(times.whole_s, DIGITS))
    return found

"""Times the layers of a plan for the partition of a pipeline: `timer` of a partitioner's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_estimate.bench.layer_bench import LayerBench
from sley_estimate.bench.layer_calls import Handed

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import DataInfo
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

DIGITS = 6
"""Decimals to which seconds are rounded, so that the resolved plan holds exactly the numbers by which the layers were cut."""


def layer_seconds(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the seconds of a forward and backward of each layer, equal on every rank; a blocking collective of `world`.

    The first rank times each layer alone, on one micro-batch of the plan's data and on the run's device, and sends the seconds
    to the others, so that all ranks cut alike. draft: makes the model on meta; only the first rank calls it. dtype: of the
    working weights.
    """

    def measure() -> list[float]:
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        with world.device.random_state_kept():
            return _in_order(LayerBench(plan, world.device, draft(dataset.info), dataset, dtype))

    return world.from_first(measure, "time the layers")


def _in_order(bench: LayerBench) -> list[float]:
    """Times each layer on the output of the one before; returns the seconds of forward and backward together."""
    seconds = []
    value: Handed | None = None
    for layer in bench.model.layers:
        times, value = bench.time(layer, value)
        seconds.append(round(times.whole_s, DIGITS))
    return seconds

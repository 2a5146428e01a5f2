"""What each layer costs, for cutting a pipeline into even parts: its number of parameters, or its seconds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from sley_core.records import PartitionerRecord

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import DataInfo
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan


def by_parameters(model: Model) -> list[float]:
    """Returns the number of parameters of each layer; a tied parameter counts in each layer that holds it."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def are_timed(plan: Plan) -> bool:
    """Returns whether the plan's partition needs the layers' seconds and the plan does not have them yet."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return False
    return plan.partition.record.timer is not None and plan.partition.config.layer_costs is None


def timed(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the seconds of each layer, equal on every rank, as the partitioner's timer measures them; a blocking collective.

    draft: makes the model on meta. dtype: of the working weights.
    """
    record = plan.partition.record if plan.partition else None
    assert isinstance(record, PartitionerRecord), record
    assert record.timer is not None, record
    module, _, attribute = record.timer.partition(":")
    seconds: list[float] = getattr(import_module(module), attribute)(plan, world, draft, dtype)
    return seconds

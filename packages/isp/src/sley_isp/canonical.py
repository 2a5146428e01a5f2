"""Refuses options that add gradients of several micro-batches, or of parts of one, before the summation tree over
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.records import Problem
from sley_isp.config import CommunicatorConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan

INSTEAD = {"reduce": "micro_batch", "head": "gather", "embedding": "gather"}
WHY = {
    "reduce": "sums micro-batches before ranks",
    "head": "sums over slices of the vocabulary, whose products have other shapes",
    "embedding": "sums the tokens of all ranks at once",
}


def check_order(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each option that is not canonical, in a plan with `reduction = "canonical"`."""
    config = plan.weights.config if plan.weights is not None else None
    if plan.parallel.reduction != "canonical" or plan.parallel.wp == 1 or not isinstance(config, CommunicatorConfig):
        return
    for key, only in INSTEAD.items():
        value = getattr(config, key)
        if value != only:
            message = f'`{key} = "{value}"` {WHY[key]}, and sums of the plan are canonical'
            hint = f'use {key} = "{only}", or `[parallel] reduction = "fast"`'
            yield Problem(("weights", key), message, hint, "canonical-unsupported")

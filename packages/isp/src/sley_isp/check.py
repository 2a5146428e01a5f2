"""Checks this plugin's options without torch: launch points, the shared vocabulary, the order of canonical sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.records import LossRecord, Problem
from sley_isp.config import ANYWHERE, CommunicatorConfig

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


def check_launch(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if `launch` is set with `unit = "module"`, where each module starts the next one's gather anyway.

    Whether the name matches a module is checked when the model is built.
    """
    weights = plan.weights
    if weights is None or not isinstance(weights.config, CommunicatorConfig):
        return
    config = weights.config
    if config.unit == "module" and config.launch != ANYWHERE:
        message = f'`launch = "{config.launch}"` says where in a layer gathers start; with `unit = "module"` each module does'
        yield Problem(("weights", "launch"), message, 'leave it out, or use `unit = "layer"`', "launch-unit")


def check_loss(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the loss cannot work on split logits. The model is checked when it is built."""
    weights = plan.weights
    if weights is None or not isinstance(weights.config, CommunicatorConfig) or weights.config.head != "vocabulary":
        return
    record = plan.loss.record
    if not isinstance(record, LossRecord) or not record.split_logits:
        message = f"the loss `{plan.loss.name}` takes all logits of a token, and with `vocabulary` no rank has them"
        yield Problem(("weights", "head"), message, 'use `head = "gather"`, or `core.cross_entropy`', "head-loss")

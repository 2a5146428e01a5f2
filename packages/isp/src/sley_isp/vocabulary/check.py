"""Checks a plan with `head = "vocabulary"`, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.records import LossRecord, Problem
from sley_isp.config import CommunicatorConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


def check_loss(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the loss cannot work on split logits. The model is checked when it is built."""
    weights = plan.weights
    if weights is None or not isinstance(weights.config, CommunicatorConfig) or weights.config.head != "vocabulary":
        return
    record = plan.loss.record
    if not isinstance(record, LossRecord) or not record.split_logits:
        message = f"the loss `{plan.loss.name}` takes all logits of a token, and with `vocabulary` no rank has them"
        yield Problem(("weights", "head"), message, 'use `head = "gather"`, or `core.cross_entropy`', "head-loss")

"""Refuses, by name, the parts of a plan with which sums have no fixed order: an error is better than a different hash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sley_core.errors import KeyPath
from sley_core.optim.config import FactoryOptimizerConfig
from sley_core.plan.tables import ModelConfig
from sley_core.records import GradientHandlerRecord, Problem, WeightCommunicatorRecord

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

NORMS = (1.0, 2.0, math.inf, "inf")
"""Kinds of norm whose terms every kernel computes to the same bits."""

CODE = "canonical-unsupported"


def check_canonical(plan: Plan) -> Iterator[Problem]:
    """Yields a problem, code "canonical-unsupported", for each part of a plan with `reduction = "canonical"` that would make
    numbers depend on the layout. Plugins check their own parts.
    """
    if plan.parallel.reduction != "canonical":
        return
    if plan.parallel.sp > 1:
        yield _problem(
            ("parallel", "sp"), f"`sp = {plan.parallel.sp}` gives matrix products other shapes", "leave `sp` at 1"
        )
    config = plan.model.config
    if isinstance(config, ModelConfig) and config.compile:
        yield _problem(("model", "compile"), "a compiled layer sums in an order of its own", "leave `compile` out")
    if plan.precision.accumulation == "autograd":
        message = "weight gradients that autograd adds up have the order of its graph"
        yield _problem(("precision", "accumulation"), message, 'use "direct", or leave it out')
    yield from _optimizer(plan)
    yield from _plugins(plan)


def _optimizer(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a norm or a fused optimizer whose rounding depends on the layout."""
    config: Any = plan.optimizer.config
    if config.clip_kind not in NORMS:
        message = f"the {config.clip_kind:g}-norm takes powers, which kernels round each in its way"
        yield _problem(("optimizer", "clip_kind"), message, 'use 1, 2 or "inf"')
    if isinstance(config, FactoryOptimizerConfig) and config.options.get("fused"):
        message = (
            "a fused optimizer rounds the last elements of a tensor otherwise, and parts end elsewhere than wholes"
        )
        yield _problem(("optimizer", "options"), message, "leave `fused` out")


def _plugins(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a handler or a weight communicator whose record does not declare canonical sums."""
    for number, handler in enumerate(plan.gradient_handlers):
        record = handler.record
        if not isinstance(record, GradientHandlerRecord) or record.role == "observer":
            continue
        if not record.canonical or record.tolerance_with(handler.config):
            message = f"`{handler.name}` sums in an order, or to a precision, of its own"
            yield _problem(
                ("gradient_handlers", number, "use"), message, "take `core.each`, `dp.bucketed` or `dp.sharded`"
            )
    weights = plan.weights
    if weights is not None and isinstance(weights.record, WeightCommunicatorRecord) and not weights.record.canonical:
        message = f"`{weights.name}` adds up what ranks contribute to a weight's gradient"
        yield _problem(("weights", "use"), message, "take `isp.communicator`")


def _problem(path: KeyPath, message: str, hint: str) -> Problem:
    return Problem(path, f"{message}, so there is no canonical sum", f'{hint}, or `reduction = "fast"`', CODE)

"""Defines the records of this package. Imports no torch, since plan checks import it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem
from sley_topk.config import TopKConfig, compute_tolerance

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="reducer", config=TopKConfig, build="sley_topk.handler:TopK", role="reducer", tolerance=compute_tolerance
        )
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    for number, handler in enumerate(plan.gradient_handlers):
        if isinstance(handler.config, TopKConfig) and plan.precision.compute == "fp16":
            message = "`topk.reducer` sends elements in later steps, when the loss scale of fp16 may differ"
            hint = 'use compute = "bf16", or an exact reducer'
            yield Problem(("gradient_handlers", number, "use"), message, hint, "handler-precision")

"""What this package offers to Sley. Imports no torch: it is read to check a plan."""

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
            name="reducer",
            config=TopKConfig,
            build="sley_topk.handler:TopK",
            role="reducer",
            exact=False,
            compute_tolerance=compute_tolerance,
            summary="sends the largest elements of each gradient, and what it left out later",
        )
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    for number, handler in enumerate(plan.gradient_handlers):
        if isinstance(handler.config, TopKConfig) and plan.precision.compute == "fp16":
            message = "`topk.reducer` gives later what it left out, and fp16's loss scale is another one by then"
            hint = 'use compute = "bf16", or a reducer that sums everything'
            yield Problem(("gradient_handlers", number, "use"), message, hint, "handler-precision")
